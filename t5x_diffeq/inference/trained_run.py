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
from flax import linen as nn
from jax.typing import ArrayLike
from jaxtyping import Array, Float

from t5x_diffeq.array_types import Tokens, Weights
from t5x_diffeq.data.corpus import load_corpus
from t5x_diffeq.data.tokenizer import Tokenizer
from t5x_diffeq.inference.continuation import Continuation, grow
from t5x_diffeq.inference.sampling import Sampling, generate
from t5x_diffeq.models.language_model import LanguageModel
from t5x_diffeq.runs.load import Run, load_run
from t5x_diffeq.runtime.errors import InputError
from t5x_diffeq.runtime.files import parse_path

_Result = TypeVar("_Result")


@dataclass(frozen=True)
class TrainedRun:
    """A model with its trained parameters and its tokenizer.

    Attributes:
      run: config, model and parameters.
      tokenizer: the run's tokenizer.
    """

    run: Run
    tokenizer: Tokenizer

    def at_depth(self, num_steps: int | None, scheme: str | None = None) -> "TrainedRun":
        """The same run, with the same parameters, on another grid; see `ModelConfig.at_depth`."""
        return replace(self, run=self.run.at_depth(num_steps, scheme))

    def weights(self, t: Sequence[float] | ArrayLike) -> Weights:
        """The weights of the vector field at the times `t`: a tree with leaves `[len(t), ...]`."""
        return self._apply(LanguageModel.weights, jnp.asarray(t, jnp.float32))

    def logits(self, text: str) -> Float[Array, "L V"]:
        """The logits of each token's successor, over the padded vocabulary.

        Raises:
          InputError: if the text is longer than the model's length.
        """
        return self._apply(LanguageModel.__call__, self._tokens(text))[0]

    def trajectory(self, text: str) -> Float[Array, "states L D"]:
        """The states y at t = 0, 1/N, ..., 1, for the N solver steps of the run's grid.

        Raises:
          InputError: if the text is longer than the model's length.
        """
        weights = self._apply(LanguageModel.weights)
        return self._apply(LanguageModel.trajectory, self._tokens(text), weights)[:, 0]

    def generate(
        self,
        prompt: str,
        max_tokens: int = 64,
        sampling: Sampling | None = None,
        seed: int = 0,
    ) -> str:
        """The prompt and its continuation, up to the model's length.

        Args:
          prompt: the text to continue.
          max_tokens: most tokens to add.
          sampling: how tokens are drawn; None draws at temperature 0.8.
          seed: seed of the random draws.

        Raises:
          InputError: if the prompt is longer than the model's length.
        """
        tokens = self._tokens(prompt)[0].tolist()
        max_tokens = min(max_tokens, self.run.setup.model.config.max_length - len(tokens))
        row = Continuation(self.tokenizer, tokens)
        model, sampling = self.run.setup.model, sampling or Sampling(temperature=0.8)
        with self.run.setup.context():
            key, params = jax.random.key(seed), self.run.params
            for _ in grow([row], generate(model, params, [tokens], max_tokens, sampling, key)):
                pass
        return row.text()

    def _tokens(self, text: str) -> Tokens:
        (tokens,) = self.tokenizer.encode([text])
        limit = self.run.setup.model.config.max_length
        if len(tokens) > limit:
            raise InputError(
                f"the text has {len(tokens)} tokens, and the model's length is {limit}"
            )
        return jnp.asarray(tokens, jnp.int32)[None]

    def _apply(self, method: Callable[..., _Result], *arguments: Array | Weights) -> _Result:
        with self.run.setup.context():
            return nn.apply(method, self.run.setup.model)({"params": self.run.params}, *arguments)


def load(
    workdir: str | PathLike,
    *,
    num_steps: int | None = None,
    scheme: str | None = None,
    checkpoint: int | None = None,
    adapters: str | PathLike | None = None,
) -> TrainedRun:
    """Loads the run of a workdir, on this machine or in a bucket, onto one device.

    Args:
      workdir: the run's workdir.
      num_steps: another number of solver steps; None for the trained one.
      scheme: another scheme; None for the trained one.
      checkpoint: optimizer step of the checkpoint; None for the newest.
      adapters: folder of adapters that another run trained for this run's weights.

    Raises:
      InputError: if the workdir holds no such run, or its weights don't exist on that grid.
    """
    folder = parse_path(str(workdir), "workdir")
    tokenizer = load_corpus(folder).tokenizer
    run = load_run(
        folder,
        tokenizer.vocab_size,
        batch_size=1,
        checkpoint=checkpoint,
        adapters=parse_path(str(adapters), "adapters") if adapters else None,
    )
    return TrainedRun(run.at_depth(num_steps, scheme), tokenizer)
