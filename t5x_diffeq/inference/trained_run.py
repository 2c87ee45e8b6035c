"""A trained run in Python: its weights at any time, its states at every step, its text.

import t5x_diffeq as td

run = td.load("workdirs/tiny")
W = run.weights([0.0, 0.5, 1.0])
"""

import html
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from os import PathLike
from typing import TYPE_CHECKING, Any, Literal, NoReturn, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from jax.typing import ArrayLike
from jaxtyping import Array, Float, Int

from t5x_diffeq.checkpoints.workdir import read_config
from t5x_diffeq.config.config import Config
from t5x_diffeq.config.keys.model import ModelKeys
from t5x_diffeq.config.keys.values import SEEDS
from t5x_diffeq.data.corpus import Corpus, load_corpus
from t5x_diffeq.data.tokenizer import Tokenizer
from t5x_diffeq.inference import validation
from t5x_diffeq.inference.notebook import Figures, Trajectory, WeightsOverTime
from t5x_diffeq.inference.sampling import BUCKET, Continuation, Sampling, generate, grow
from t5x_diffeq.model.config import ModelConfig
from t5x_diffeq.model.language_model import LanguageModel, nodes
from t5x_diffeq.model.ode.sources import source_of
from t5x_diffeq.model.sub_fields import declared_leaves
from t5x_diffeq.system.arguments import checked
from t5x_diffeq.system.console import format_count
from t5x_diffeq.system.errors import InputError
from t5x_diffeq.system.files import AnyPath, parse_path
from t5x_diffeq.training.load import Run, load_run
from t5x_diffeq.training.tracking.jsonl import read_metrics

_Texts = TypeVar("_Texts", str, list[str])


@checked
@dataclass(frozen=True, repr=False, eq=False)
class TrainedRun:
    """A model with its trained parameters, its tokenizer and its data.

    Attributes:
      run: model and parameters.
      corpus: the run's tokenizer and data.
      workdir: where it was trained.
      config: the config with which it was trained; `at_depth` doesn't change it.
      loaded_with: what was loaded besides the parameters, or instead of them; "" for nothing.
    """

    run: Run
    corpus: Corpus
    workdir: AnyPath
    config: Config
    loaded_with: str = ""

    def __repr__(self) -> str:
        facts = self._facts()
        wide = max(map(len, facts))
        return "\n".join(f"{name:<{wide}}  {value}" for name, value in facts.items())

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            f"a TrainedRun can't be pickled or copied; pass its workdir, {str(self.workdir)!r}, "
            "and call td.load there"
        )

    if not TYPE_CHECKING:  # else each misspelt name would have a type

        def __getattr__(self, name: str) -> NoReturn:
            public = ", ".join(each for each in dir(self) if not each.startswith("_"))
            raise AttributeError(
                f"a TrainedRun has no attribute {name!r}; it has {public}; .run.params are its "
                "parameters, and its files are in .workdir"
            )

    def _repr_html_(self) -> str:
        rows = (
            f"<tr><th>{html.escape(name)}</th><td>{html.escape(value)}</td></tr>"
            for name, value in self._facts().items()
        )
        return f"<table>{''.join(rows)}</table>"

    def _facts(self) -> dict[str, str]:
        """Facts of the run by name, a line each."""
        c = self._model
        leaves = jax.tree.leaves(self.run.params)
        trained = "as trained" if self.on_trained_grid else "not a grid that it was trained on"
        own = self.config.model
        is_evaluated = (c.scheme, c.num_steps) == (own.scheme, own.num_steps)  # by the training
        try:
            known = is_evaluated and not self.loaded_with
            reports = read_metrics(self.workdir, "eval/loss") if known else ()
            losses = [x["eval/loss"] for x in reports if x["step"] == self.step]
        except InputError:  # a run is shown even if its metrics can't be read
            losses = []
        return {
            "run": ", ".join(filter(None, (f"{self.workdir}, step {self.step}", self.loaded_with))),
            "model": f"{describe_model(c, source_of(c).describe())}, {c.vocab_size} tokens",
            "parameters": format_count(sum(leaf.size for leaf in leaves)),
            "grid": f"{c.num_steps} steps of {c.scheme}, {trained}",
            "validation loss": f"{losses[-1]:.4f} nats per token when it was trained"
            if losses
            else "unknown: evaluate()",
        }

    @property
    def _model(self) -> ModelConfig:
        return self.run.placed.model.config

    @property
    def num_steps(self) -> int:
        """The number of solver steps of its grid."""
        return self._model.num_steps

    @property
    def step(self) -> int:
        """The optimizer step of its checkpoint."""
        return self.run.step

    @property
    def nodes(self) -> Float[np.ndarray, " nodes"]:
        """The times at which a forward pass reads the weights, in the order in which it does."""
        return nodes(self._model)

    @property
    def on_trained_grid(self) -> bool:
        """Whether its grid is one that it was trained on."""
        return validation.is_trained_grid(self.config, self._model.scheme, self._model.num_steps)

    @property
    def plot(self) -> Figures:
        """Figures: `plot()` of the losses; `plot.weights`, `plot.states` and `plot.depths`."""
        trained = self.config.model

        def perplexity(num_steps: int, scheme: str, eval_batches: int | None) -> float:
            on_grid = self.at_depth(num_steps, scheme)
            return on_grid.evaluate(eval_batches=eval_batches)["perplexity"]

        return Figures(
            self.run,
            (trained.scheme, trained.num_steps),
            lambda: {self.workdir.name: self.metrics()},
            self.trajectory,
            perplexity,
        )

    def metrics(self) -> list[dict[str, float]]:
        """The reports of the training, oldest first: the lines of `metrics.jsonl`."""
        return list(read_metrics(self.workdir))

    def at_depth(self, num_steps: int | None, scheme: str | None = None) -> "TrainedRun":
        """The same run, with the same parameters, on another grid; see `ModelConfig.at_depth`."""
        return replace(self, run=self.run.at_depth(num_steps, scheme))

    def weights(self, t: float | Sequence[float] | np.ndarray | Array) -> WeightsOverTime:
        """The weights of the vector field at the times `t`: a tree with leaves `[len(t), ...]`.

        At one time, given as a number, the leaves have no axis of time. Adapters are merged into
        the kernels.

        Raises:
          InputError: if a time isn't in [0, 1]; or the weights are per-layer, and `t` isn't the
            grid of their layers.
        """
        times = np.asarray(t, np.float32)
        if times.ndim > 1 or not times.size:
            raise InputError(f"t has the shape {times.shape}; give a number or a list of numbers")
        if not ((times >= 0) & (times <= 1)).all():
            raise InputError(f"t={t!r}: times must be in [0, 1], where W(t) was trained")
        if not source_of(self._model).any_time and not (
            self.nodes.shape == times.shape and np.allclose(self.nodes, times)
        ):
            raise InputError(
                f"t={times.tolist()}: {self._model.weights} weights exist only at their own "
                f"{len(self.nodes)} nodes, {self.nodes.tolist()}; give these"
            )
        W = self._apply(LanguageModel.merged_weights, jnp.atleast_1d(times))
        W = W if times.ndim else jax.tree.map(lambda leaf: leaf[0], W)
        return WeightsOverTime(W, times if times.ndim else float(times), _axes_of(self._model))

    def logits(self, text: str) -> Float[Array, "L V"]:
        """The logits of each token's successor, over the padded vocabulary.

        Raises:
          InputError: if the text is empty, or longer than the model's length.
        """
        return self._read(LanguageModel.__call__, self.tokens(text))[0]

    def trajectory(self, text: str) -> Trajectory:
        """The states y at t = 0, 1/N, ..., 1, for the N solver steps of the run's grid.

        An array `[N + 1, tokens, width]`, whose `t` and `tokens` say where its entries belong.

        Raises:
          InputError: if the text is empty, or longer than the model's length.
        """
        tokens = self.tokens(text)
        states = self._read(LanguageModel.trajectory_of_pass, tokens)[:, 0]
        t = np.arange(self.num_steps + 1) / self.num_steps
        return Trajectory.of(np.asarray(states), t, self.tokenizer.pieces(tokens.tolist()))

    def loss(self, text: str) -> float:
        """The mean cross entropy of the text's tokens but the first, in nats per token.

        Raises:
          InputError: if the text has fewer than two tokens, or is longer than the model's length.
        """
        tokens = self.tokens(text)
        if len(tokens) < 2:
            raise InputError(f"{text!r} has {len(tokens)} tokens; a loss takes at least 2")
        logits = self.logits(text)[:-1, : self.tokenizer.vocab_size]
        return float(optax.softmax_cross_entropy_with_integer_labels(logits, tokens[1:]).mean())

    def evaluate(self, batch_size: int = 32, eval_batches: int | None = None) -> dict[str, float]:
        """`loss` (nats per token), `perplexity`, `bits_per_byte` and `tokens` on validation.

        `bits_per_byte` is there if the bytes of tokens are known (see `data.token_bytes`). On a
        grid that the run wasn't trained on it warns once, unless W(t) is smooth.

        Args:
          batch_size: sequences per batch.
          eval_batches: number of batches, from the first; None for the whole split.

        Raises:
          InputError: if `batch_size` or `eval_batches` is less than 1.
        """
        for name, value in (("batch_size", batch_size), ("eval_batches", eval_batches)):
            if value is not None and value < 1:
                raise InputError(f"{name}={value}; it must be at least 1")
        if not self.on_trained_grid and not validation.is_smooth(self.config):
            _warn_once(validation.off_grid_warning(self.config))
        return validation.evaluate_split(self.run, self.corpus, batch_size, eval_batches)

    def generate(
        self,
        prompts: _Texts,
        max_tokens: int = 64,
        sampling: Sampling | None = None,
        seed: int = 0,
        *,
        temperature: float = 0.8,
        top_k: int | None = None,
        top_p: float = 1.0,
    ) -> _Texts:
        """Each prompt and its continuation, up to the model's length.

        Args:
          prompts: a text to continue, or several, which are continued at once.
          max_tokens: most tokens to add to each.
          sampling: how tokens are drawn; None for what the last three arguments say.
          seed: seed of the random draws; the same arguments with the same seed give the same text.
          temperature: temperature of the softmax; 0 takes the likeliest token.
          top_k: draw among this many likeliest tokens; None for all.
          top_p: draw among the likeliest that together have this probability.

        Raises:
          InputError: if there is no prompt, one is empty or longer than the model's length, or
            another argument is invalid.
        """
        texts = [prompts] if isinstance(prompts, str) else prompts
        if not texts:
            raise InputError(
                f"prompts={prompts!r}: there is no text to continue; give at least one"
            )
        if max_tokens < 1:
            raise InputError(f"max_tokens={max_tokens}; it must be at least 1")
        if not 0 <= seed < SEEDS:
            raise InputError(f"seed={seed}; it must be at least 0 and below {SEEDS}")
        if sampling and (temperature, top_k, top_p) != (0.8, None, 1.0):
            raise InputError(
                f"sampling={sampling!r} says it all; leave temperature, top_k, top_p out"
            )
        sampling = sampling or Sampling(temperature, top_k, top_p)
        tokens = [self.tokens(text).tolist() for text in texts]
        room = self._model.max_length - max(map(len, tokens))
        rows = [Continuation(self.tokenizer, each) for each in tokens]
        with self.run.placed.context():
            sampled = generate(
                self.run.placed.model,
                self.run.params,
                tokens,
                min(max_tokens, room),
                sampling,
                jax.random.key(seed),
            )
            for _ in grow(rows, sampled):
                pass
        continued = [row.text() for row in rows]
        return continued[0] if isinstance(prompts, str) else continued

    @property
    def tokenizer(self) -> Tokenizer:
        """The run's tokenizer."""
        return self.corpus.tokenizer

    def tokens(self, text: str) -> Int[Array, " L"]:
        """The text's tokens as the model reads them; `pieces` has their texts.

        Raises:
          InputError: if the text is empty, longer than the model's length, or not UTF-8.
        """
        if not text:
            raise InputError(f"the text {text!r} has no tokens; give at least one")
        tokens = self.tokenizer.read(text, "the text", self._model.max_length)
        return jnp.asarray(tokens, jnp.int32)

    def pieces(self, text: str) -> list[str]:
        """The text of each token of a text, which together are the text."""
        return self.tokenizer.pieces(self.tokens(text).tolist())

    def _read(self, method: Callable, tokens: Int[Array, " L"]) -> Array:
        """What a method of the model returns for one row of tokens: an array `[..., L, width]`.

        The row is padded, and the padding cut off, so that few programs are compiled.
        """
        length = len(tokens)
        padded = min(-(-length // BUCKET) * BUCKET, self._model.max_length)
        row = jnp.pad(tokens, (0, padded - length))[None]
        return self._apply(method, row)[..., :length, :]

    def _apply(self, method: Callable, *arguments: ArrayLike) -> Any:
        with self.run.placed.context():
            return _apply(method, self.run.placed.model, self.run.params, *arguments)


def describe_model(c: ModelConfig | ModelKeys, weights: str) -> str:
    """`gpt, W(t) = W0 + P e(t), T = 24, width 128, 4 heads`; `weights` says what makes them."""
    return f"{c.block or c.architecture}, {weights}, width {c.embed_dim}, {c.num_heads} heads"


@partial(jax.jit, static_argnames=("method", "model"))
def _apply(method: Callable, model: LanguageModel, params: dict, *arguments: Array) -> Any:
    return nn.apply(method, model)({"params": params}, *arguments)


@cache
def _axes_of(model: ModelConfig) -> dict[tuple[str, ...], tuple[str | None, ...]]:
    return {path: tuple(parameter.names) for path, parameter in declared_leaves(model).items()}


@cache
def _warn_once(message: str) -> None:
    warnings.warn(message, stacklevel=3)


@checked
def load(
    workdir: str | PathLike,
    *,
    num_steps: int | None = None,
    scheme: str | None = None,
    checkpoint: int | Literal["best"] | None = None,
    averages: bool = False,
    trust_plugins: bool = False,
) -> TrainedRun:
    """Loads the run of a workdir, on this machine or in a bucket, onto one device.

    It turns on JAX's persistent compilation cache, as training does, so that a later process
    compiles less.

    Args:
      workdir: the run's workdir.
      num_steps: another number of solver steps; None for the trained one.
      scheme: another scheme; None for the trained one.
      checkpoint: optimizer step of the checkpoint, or "best"; None for the newest.
      averages: take the moving averages of the parameters (train.ema_decay).
      trust_plugins: run the code of other packages that the workdir's config names.

    Raises:
      InputError: if the workdir holds no such run, its weights don't exist on that grid, or its
        config names code of other packages that isn't trusted.
    """
    folder = parse_path(str(workdir), "workdir")
    corpus = load_corpus(folder)
    trained = read_config(folder, trust_plugins=trust_plugins)
    run = load_run(
        folder,
        corpus.tokenizer.vocab_size,
        batch_size=1,
        checkpoint=checkpoint,
        averages=averages,
        grids=[(num_steps, scheme)],
    )
    with_averages = "moving averages of the parameters" if averages else ""
    return TrainedRun(run.at_depth(num_steps, scheme), corpus, folder, trained, with_averages)
