"""The answers that the page shows of a run: one method per endpoint, ready for JSON."""

from collections.abc import Iterator
from itertools import islice
from math import isfinite
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from t5x_diffeq.analysis.lyapunov import lyapunov_exponents
from t5x_diffeq.analysis.weight_paths import make_weight_paths, principal_path
from t5x_diffeq.data.batches import eval_batches
from t5x_diffeq.data.examples import eval_examples
from t5x_diffeq.inference import validation
from t5x_diffeq.inference.explorer.stepping import Depth, Stepper
from t5x_diffeq.inference.sampling import Continuation, Sampling
from t5x_diffeq.inference.trained_run import TrainedRun, describe_model
from t5x_diffeq.model.language_model import nodes
from t5x_diffeq.model.ode.solvers import SCHEMES, find_scheme, grid
from t5x_diffeq.model.ode.sources import source_of
from t5x_diffeq.system.errors import InputError
from t5x_diffeq.training.objective import places_of

PAGE = Path(__file__).parent / "page"  # its files
MOST_STEPS = 256  # the most solver steps that a request may ask for
_COARSER = (16, 20, 24, 32, 48, 64, 96, 128)  # offered up to four times the trained number of steps
_OPENING = 96  # tokens of the validation text that form the first text
_KEPT = 0.75  # of the model's length, what is read of a longer text; the rest is for a continuation
_VALIDATION_ROWS = 8  # sequences on which the loss over N is computed
_BETWEEN = 8  # points of a path of W(t) from one node to the next, if there is room for them
_MOST_POINTS = 96  # of a path of W(t)
_PADDING = 16  # texts are padded to multiples of it for Lyapunov exponents
Answer = dict[str, Any]


def _to_json(values: object) -> Any:
    """Arrays as lists, numbers with five digits; None for numbers that aren't finite."""
    if isinstance(values, np.ndarray | jax.Array):
        return _to_json(np.asarray(values).tolist())
    if isinstance(values, list):
        return [_to_json(value) for value in values]
    if isinstance(values, float):
        return float(f"{values:.5g}") if isfinite(values) else None
    return values


class Explorer:
    """A run, and what the page shows of it.

    The page offers the numbers of steps `offered`, and `schemes`. If W(t) is `smooth`, times
    between the nodes mean something.
    """

    def __init__(self, name: str, trained: TrainedRun):
        self.name, self.trained = name, trained
        self.tokenizer = trained.tokenizer
        self.placed = trained.run.placed
        self.config = self.placed.model.config
        self.stepper = Stepper(trained.run)
        model = trained.config.model
        self.trained_with = sorted({model.num_steps, *trained.config.train.depths})
        self.offered, self.schemes = [model.num_steps], [model.scheme]
        if self.config.any_num_steps:
            most = self.trained_with[-1]
            near = range(1, min(max(2 * most, 12), MOST_STEPS) + 1)
            coarser = (n for n in _COARSER if n <= 4 * most)
            self.offered = sorted({*near, *self.trained_with, *coarser})
            if find_scheme(model.scheme).leaves is None:
                self.schemes = [*dict.fromkeys((model.scheme, *SCHEMES))]
        self.smooth = validation.is_smooth(trained.config)

    def about(self) -> Answer:
        """The run's name, model and grids, and a text to begin with."""
        c = self.config
        return {
            "name": self.name,
            "step": self.trained.run.step,
            "model": describe_model(c, source_of(c).describe()),
            "num_steps": c.num_steps,
            "scheme": c.scheme,
            "max_tokens": c.max_length,
            "trained": self.trained_with,
            "offered": self.offered,
            "schemes": self.schemes,
            "smooth": self.smooth,
            "text": self.trained.corpus.opening(min(_OPENING, c.max_length // 2)),
        }

    def _describe(self, grid: Depth) -> Answer:
        """A grid, whether the run was trained on it, and in a sentence what its numbers mean."""
        num_steps, scheme = grid
        config = self.trained.config
        trained = validation.is_trained_grid(config, scheme, num_steps)
        grids = validation.describe_trained_grids(config)
        if trained:
            note = f"The run was trained on this grid ({grids})."
        elif self.smooth:
            note = (
                f"The run was trained with {grids}, not on this grid. Its W(t) is a smooth "
                "function of t, so the numbers show how well the dial works."
            )
        else:
            warning = validation.off_grid_warning(config)
            note = f"{warning[0].upper()}{warning[1:]}."
        return {"num_steps": num_steps, "scheme": scheme, "trained": trained, "note": note}

    def _tokens(self, text: str) -> tuple[list[int], str]:
        """The tokens that are read of a text, and a sentence if these are not all: its end is."""
        if not text:
            raise InputError("the text has no tokens; write something")
        tokens, most = self.tokenizer.read(text, "the text"), self.config.max_length
        if len(tokens) <= most:
            return tokens, ""
        opener = tokens[:1] if tokens[0] == self.tokenizer.opener else []
        kept = int(_KEPT * most)
        said = (
            f"The text has {len(tokens)} tokens, and the model takes {most}: the last {kept} are "
            "read here, which leaves room for a continuation. "
        )
        return [*opener, *tokens[len(opener) - kept :]], said

    def tokens(self, text: str, grid: Depth) -> Answer:
        """What is known of a reading before it is computed: its tokens, and what its grid means.

        Raises:
          InputError: if the text can't be read.
        """
        tokens, said = self._tokens(text)
        meaning = self._describe(grid)
        meaning["note"] = said + meaning["note"]
        return {**meaning, "tokens": self.tokenizer.pieces(tokens), "ids": tokens}

    def read(self, text: str, grid: Depth) -> Answer:
        """The text at a depth: each token's loss, predictions and speed at every node.

        Raises:
          InputError: if the text can't be read, or the run doesn't exist on the grid.
        """
        reading = self.tokens(text, grid)
        tokens, count = reading["ids"], len(reading["ids"])
        inputs = self.stepper.pad(tokens)
        # The last token has no target: the loss there is left out of `losses`.
        targets = jnp.asarray(np.roll(inputs, -1, axis=1))
        top, log_p, losses, speeds = [], [], [], []
        before: Float[np.ndarray, "L D"] | None = None
        with self.placed.context():
            for state in self.stepper.states(jnp.asarray(inputs), grid):
                look = self.stepper.look(state, targets)
                top.append(look.top[0, :count])
                log_p.append(look.log_p[0, :count])
                losses.append(look.loss[0, : count - 1])
                y = np.asarray(state[0, :count], np.float32)
                if before is not None:
                    speeds.append(np.sqrt(np.square(y - before).mean(-1)) * grid[0])
                before = y
        token_losses = np.stack(losses, 1)
        return {
            **reading,
            "times": _to_json(np.arange(len(top)) / grid[0]),
            "loss": [None, *_to_json(token_losses[:, -1])],
            "loss_at": [None, *_to_json(token_losses)],
            "top": np.stack(top, 1).tolist(),
            "p": _to_json(np.exp(np.stack(log_p, 1))),
            "speed": _to_json(np.stack(speeds, 1)),
            "pieces": {
                str(each): self.tokenizer.decode([each]) for each in np.unique(top).tolist()
            },
            "mean_loss": _to_json(float(token_losses[:, -1].mean())) if count > 1 else None,
        }

    def continuation(
        self, text: str, grid: Depth, limit: int, sampling: Sampling, seed: int
    ) -> Iterator[str]:
        """Yields the text that each drawn token adds, without characters that may still change."""
        prompt, _ = self._tokens(text)
        row, sent = Continuation(self.tokenizer, prompt), ""
        for token in islice(self.stepper.draw(prompt, grid, sampling, seed), limit):
            row.add(token)
            if row.ended:
                break
            # The bytes of one character may take several tokens, and decode as U+FFFD until then.
            added = row.completion().rstrip("\ufffd")[len(sent) :]
            sent += added
            yield added
        yield row.completion()[len(sent) :]

    def validation(self, grid: Depth) -> Answer:
        """The loss on the first sequences of the validation split."""
        parts = eval_examples(self.placed.config.data, self.trained.corpus)
        rows = min(_VALIDATION_ROWS, sum(map(len, parts)))
        losses, tokens = 0.0, 0
        with self.placed.context():  # a row at a time, by the programs that read a text
            on_devices = eval_batches(parts, 1, self.placed.batch_sharding, limit=rows)
            for sharded in on_devices:
                batch = jax.tree.map(jnp.asarray, jax.device_get(sharded))  # off the mesh
                y = self.stepper.last_state(batch["inputs"], grid, places_of(batch))
                loss = self.stepper.look(y, batch["targets"]).loss
                losses += float((loss * np.asarray(batch["mask"])).sum())
                tokens += int(batch["mask"].sum())
        return {
            **self._describe(grid),
            "loss": _to_json(losses / max(tokens, 1)),
            "tokens": tokens,
            "sequences": rows,
        }

    def sensitivity(self, text: str, output: int, grid: Depth) -> Answer:
        """The largest Lyapunov exponent of a token's output for each token up to it.

        The convention is `pair` of `analysis.lyapunov`.

        Raises:
          InputError: as `read`; or if there is no such token.
        """
        tokens, _ = self._tokens(text)
        if output >= len(tokens):
            raise InputError(f"output is {output}; the text has the tokens 0 to {len(tokens) - 1}")
        length = min(-(-len(tokens) // _PADDING) * _PADDING, self.config.max_length)
        row = np.zeros((1, length), np.int32)
        row[0, : len(tokens)] = tokens
        params = jax.tree.map(jnp.asarray, jax.device_get(self.trained.run.params))  # off the mesh
        exponents = lyapunov_exponents(
            self.placed.model.at_depth(*grid), params, jnp.asarray(row), outputs=np.array([output])
        )
        return {"output": output, "exponents": _to_json(exponents.largest[0, : len(tokens)])}

    def paths(self) -> Answer:
        """Each kernel's path W(t), in the plane in which it moves the most, and its size |W(t)|."""
        num_steps, at_nodes = self.config.num_steps, nodes(self.config)
        times = at_nodes
        if source_of(self.config).any_time:
            between = max(1, min(_BETWEEN, _MOST_POINTS // num_steps))
            times = grid(self.config.scheme, num_steps * between).reshape(-1)
        with self.placed.context():
            weight_paths = make_weight_paths(self.placed.model, self.placed.mesh, times)
            paths = weight_paths(self.trained.run.params)
        is_node = np.isclose(paths.times[:, None], at_nodes, atol=1e-4).any(1)
        kernels = {}
        for name, centred in paths.centred.items():
            points, shares = principal_path(centred)
            sizes = np.sqrt(np.maximum(np.diag(paths.inner[name]), 0))
            kernels[name] = {
                "points": _to_json(points),
                "shares": _to_json(shares),
                "sizes": _to_json(sizes),
            }
        return {
            "times": _to_json(paths.times),
            "is_node": is_node.tolist(),
            "smooth": self.smooth,
            "kernels": kernels,
        }
