"""A trained run in Python: its weights at any time, its states at every step, its text.

import t5x_diffeq as td

run = td.load("workdirs/tiny")
W = run.weights([0.0, 0.5, 1.0])
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from os import PathLike
from typing import TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from jax.typing import ArrayLike
from jaxtyping import Array, Float, Int

from t5x_diffeq.data.corpus import Corpus, load_corpus
from t5x_diffeq.data.tokenizer import Tokenizer
from t5x_diffeq.inference.continuation import Continuation, grow
from t5x_diffeq.inference.sampling import Sampling, generate
from t5x_diffeq.inference.split_loss import evaluate_split
from t5x_diffeq.layers.array_types import Weights
from t5x_diffeq.models.language_model import LanguageModel, nodes
from t5x_diffeq.runs.load import Run, load_run
from t5x_diffeq.runtime.errors import InputError
from t5x_diffeq.runtime.files import parse_path

_Result = TypeVar("_Result")


@dataclass(frozen=True)
class TrainedRun:
    """A model with its trained parameters, its tokenizer and its data.

    Attributes:
      run: config, model and parameters.
      corpus: the run's tokenizer and data.
    """

    run: Run
    corpus: Corpus

    def at_depth(self, num_steps: int | None, scheme: str | None = None) -> "TrainedRun":
        """The same run, with the same parameters, on another grid; see `ModelConfig.at_depth`."""
        return replace(self, run=self.run.at_depth(num_steps, scheme))

    def weights(self, t: Sequence[float] | ArrayLike) -> Weights:
        """The weights of the vector field at the times `t`: a tree with leaves `[len(t), ...]`.

        Raises:
          InputError: if the weights are per-layer, and `t` isn't the grid of their layers.
        """
        config = self.run.placed.model.config
        own, times = nodes(config), np.asarray(t, np.float32)
        if config.weights == "per_layer" and not (
            own.shape == times.shape and np.allclose(own, times)
        ):
            raise InputError(
                f"per-layer weights exist at their own {len(own)} nodes alone, {own.tolist()}, and "
                f"{times.tolist()} were asked for; time-dependent and shared weights have others"
            )
        return self._apply(LanguageModel.weights, jnp.asarray(t, jnp.float32))

    def logits(self, text: str) -> Float[Array, "L V"]:
        """The logits of each token's successor, over the padded vocabulary.

        Raises:
          InputError: if the text is longer than the model's length.
        """
        return self._apply(LanguageModel.__call__, self.tokens(text)[None])[0]

    def trajectory(self, text: str) -> Float[Array, "states L D"]:
        """The states y at t = 0, 1/N, ..., 1, for the N solver steps of the run's grid.

        Raises:
          InputError: if the text is longer than the model's length.
        """
        weights = self._apply(LanguageModel.weights)
        return self._apply(LanguageModel.trajectory, self.tokens(text)[None], weights)[:, 0]

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

    def evaluate(self, batch_size: int = 32, limit: int | None = None) -> dict[str, float]:
        """`loss` (nats per token), `perplexity`, `bits_per_byte` and `tokens` on validation.

        `bits_per_byte` is there if the bytes of tokens are known (see `data.token_bytes`).

        Args:
          batch_size: sequences per batch.
          limit: only the first `limit` batches; None for the whole split.
        """
        return evaluate_split(self.run, self.corpus, batch_size, limit)

    def generate(
        self,
        prompts: str | list[str],
        max_tokens: int = 64,
        sampling: Sampling | None = None,
        seed: int = 0,
    ) -> str | list[str]:
        """Each prompt and its continuation, up to the model's length.

        Args:
          prompts: a text to continue, or several, which are continued at once.
          max_tokens: most tokens to add to each.
          sampling: how tokens are drawn; None draws at temperature 0.8.
          seed: seed of the random draws.

        Raises:
          InputError: if a prompt is longer than the model's length.
        """
        texts = [prompts] if isinstance(prompts, str) else prompts
        tokens = [self.tokens(text).tolist() for text in texts]
        room = self.run.placed.model.config.max_length - max(map(len, tokens))
        rows = [Continuation(self.tokenizer, each) for each in tokens]
        sampling, key = sampling or Sampling(temperature=0.8), jax.random.key(seed)
        with self.run.placed.context():
            drawn = generate(
                self.run.placed.model,
                self.run.params,
                tokens,
                min(max_tokens, room),
                sampling,
                key,
            )
            for _ in grow(rows, drawn):
                pass
        found = [row.text() for row in rows]
        return found[0] if isinstance(prompts, str) else found

    @property
    def tokenizer(self) -> Tokenizer:
        """The run's tokenizer."""
        return self.corpus.tokenizer

    def tokens(self, text: str) -> Int[Array, " L"]:
        """The text's tokens.

        Raises:
          InputError: if the text is longer than the model's length.
        """
        (tokens,) = self.tokenizer.encode([text])
        limit = self.run.placed.model.config.max_length
        if len(tokens) > limit:
            raise InputError(
                f"the text has {len(tokens)} tokens, and the model's length is {limit}"
            )
        return jnp.asarray(tokens, jnp.int32)

    def _apply(self, method: Callable[..., _Result], *arguments: Array | Weights) -> _Result:
        with self.run.placed.context():
            return nn.apply(method, self.run.placed.model)({"params": self.run.params}, *arguments)


def load(
    workdir: str | PathLike,
    *,
    num_steps: int | None = None,
    scheme: str | None = None,
    checkpoint: int | str | None = None,
    adapters: str | PathLike | None = None,
    averages: bool = False,
) -> TrainedRun:
    """Loads the run of a workdir, on this machine or in a bucket, onto one device.

    Args:
      workdir: the run's workdir.
      num_steps: another number of solver steps; None for the trained one.
      scheme: another scheme; None for the trained one.
      checkpoint: optimizer step of the checkpoint, or "best"; None for the newest.
      adapters: folder of adapters that another run trained for this run's weights.
      averages: take the moving averages of the parameters (train.ema_decay).

    Raises:
      InputError: if the workdir holds no such run, or its weights don't exist on that grid.
    """
    folder = parse_path(str(workdir), "workdir")
    corpus = load_corpus(folder)
    run = load_run(
        folder,
        corpus.tokenizer.vocab_size,
        batch_size=1,
        checkpoint=checkpoint,
        averages=averages,
        grids=[(num_steps, scheme)],
        adapters=parse_path(str(adapters), "adapters") if adapters else None,
    )
    return TrainedRun(run.at_depth(num_steps, scheme), corpus)
