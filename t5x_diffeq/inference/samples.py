"""Samples of text while a model trains: `train.sample_every` and `train.sample_prompts`."""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from t5x_diffeq.data.tokenizer import Tokenizer
from t5x_diffeq.inference.continuation import Continuation, grow
from t5x_diffeq.inference.sampling import Sampling, generate
from t5x_diffeq.models.config import ModelConfig
from t5x_diffeq.models.sub_fields import need_hooks
from t5x_diffeq.runtime.config import TrainKeys
from t5x_diffeq.runtime.errors import InputError
from t5x_diffeq.training.setup import Setup

_TOKENS = 64  # of a continuation
SAMPLING = Sampling(temperature=0.8)
_SEED = 0  # the same draws at every step, so that samples differ by the model alone


def check_samples(train: TrainKeys, model: ModelConfig) -> None:
    """Checks that the model's block can generate, if the config asks for samples.

    Raises:
      InputError: if it can't, naming the method that it lacks.
    """
    if train.sample_every is not None:
        need_hooks(model, ("extend", "empty_cache"))


class Samples:
    """Continues the prompts of a config; falsy if it asks for none.

    Args:
      train: `config.train`.
      setup: the run's setup.
      tokenizer: the run's tokenizer. An empty prompt is the start of a document.

    Raises:
      InputError: if a prompt is too long for the model, or there is none.
    """

    def __init__(self, train: TrainKeys, setup: Setup, tokenizer: Tokenizer):
        self.every, self.tokenizer = train.sample_every, tokenizer
        self.setup = setup.with_whole_rows()
        if not self:
            return
        if not train.sample_prompts:
            raise InputError('train.sample_prompts is empty; give ("",) to begin documents')
        room = setup.model.config.max_length
        self.texts = train.sample_prompts
        self.prompts = [self._encode(text, room) for text in self.texts]
        self.limit = min(_TOKENS, room - max(map(len, self.prompts)))

    def __bool__(self) -> bool:
        return self.every is not None

    def _encode(self, text: str, room: int) -> list[int]:
        """The prompt's tokens, at least one."""
        (tokens,) = self.tokenizer.encode([text])
        if len(tokens) >= room:
            raise InputError(
                f"train.sample_prompts has a text of {len(tokens)} tokens, and the model's length "
                f"is {room}; shorten it: {text[:40]!r}"
            )
        return tokens.tolist() or [self.tokenizer.end_of_text]

    def keys(self) -> jax.Array:
        """A key for each row, the same however many rows there are."""
        key = jax.random.key(_SEED)
        return jnp.stack([jax.random.fold_in(key, n) for n in range(self._rows)])

    @property
    def _rows(self) -> int:
        return self.setup.eval_batch_size(len(self.prompts))  # the devices share the rows equally

    def run(self, params: dict, interruptible: Callable = iter) -> dict[str, str]:
        """`sample/0` and so on: each prompt with what follows it. All processes must call it.

        Args:
          params: the model's parameters.
          interruptible: yields the tokens that it is given, or raises (see `StopSignals`).
        """
        prompts = [self.prompts[n % len(self.prompts)] for n in range(self._rows)]
        rows = [Continuation(self.tokenizer, each) for each in self.prompts]
        drawn = generate(self.setup.model, params, prompts, self.limit, SAMPLING, self.keys())
        with self.setup.context():
            for _ in interruptible(grow(rows, drawn)):
                pass
        texts = [prompt + row.completion() for prompt, row in zip(self.texts, rows, strict=True)]
        return {f"sample/{n}": text for n, text in enumerate(texts)}
