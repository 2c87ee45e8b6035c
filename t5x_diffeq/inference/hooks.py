"""The hook of training that samples text (`train.sample_every`)."""

from typing import ClassVar

import jax
import jax.numpy as jnp

from t5x_diffeq.config.config import Config
from t5x_diffeq.data.corpus import Corpus
from t5x_diffeq.inference.sampling import Continuation, Sampling, generate, grow
from t5x_diffeq.model.sub_fields import need_methods
from t5x_diffeq.system.errors import InputError
from t5x_diffeq.training.hooks.hook import Hook, LoopPosition, Training
from t5x_diffeq.training.setup import Setup

_TOKENS = 64  # of a continuation
SAMPLING = Sampling(temperature=0.8)
_SEED = 0  # the same draws at every step, so that samples differ by the model alone


class Samples(Hook):
    """Continues the prompts of a config; an empty prompt is the start of a document."""

    name: ClassVar[str] = "sample"
    runs_later: ClassVar[bool] = True

    def __init__(self, training: Training):
        super().__init__(training, training.config.train.sample_every)
        self.tokenizer = training.corpus.tokenizer
        self.placed = training.setup.with_whole_rows()
        if self.every is None:
            return
        self.texts = training.config.train.sample_prompts
        room = self.placed.model.config.max_length
        self.prompts = self.read_prompts(training.config, training.setup, training.corpus)
        self.limit = min(_TOKENS, room - max(map(len, self.prompts)))

    @classmethod
    def check(cls, config: Config, setup: Setup) -> None:
        """Checks that there are prompts and that the block can generate."""
        if config.train.sample_every is None:
            return
        need_methods(setup.model.config, ("extend", "empty_cache"))
        if not config.train.sample_prompts:
            raise InputError('train.sample_prompts is empty; give ("",) to begin documents')

    @classmethod
    def check_corpus(cls, config: Config, setup: Setup, corpus: Corpus) -> None:
        """Checks that no prompt is too long."""
        if config.train.sample_every is not None:
            cls.read_prompts(config, setup, corpus)

    @staticmethod
    def read_prompts(config: Config, setup: Setup, corpus: Corpus) -> list[list[int]]:
        """The tokens of each prompt; at least one more fits."""
        limit = setup.model.config.max_length - 1
        return [
            corpus.tokenizer.read(text, "train.sample_prompts", limit)
            for text in config.train.sample_prompts
        ]

    def keys(self) -> jax.Array:
        """A random key for each row, which doesn't depend on the number of rows."""
        key = jax.random.key(_SEED)
        return jnp.stack([jax.random.fold_in(key, n) for n in range(self._rows)])

    @property
    def _rows(self) -> int:
        return self.placed.eval_batch_size(len(self.prompts))  # the devices share the rows equally

    def run(self, position: LoopPosition) -> None:
        """Writes `sample/0` and so on: each prompt with what follows it."""
        prompts = [self.prompts[n % len(self.prompts)] for n in range(self._rows)]
        rows = [Continuation(self.tokenizer, each) for each in self.prompts]
        params = position.state.params
        sampled = generate(self.placed.model, params, prompts, self.limit, SAMPLING, self.keys())
        with self.placed.context():
            for _ in self.training.stop.interruptible(grow(rows, sampled)):
                pass
        texts = [prompt + row.completion() for prompt, row in zip(self.texts, rows, strict=True)]
        named = {f"sample/{n}": text for n, text in enumerate(texts)}
        self.training.writer.write_texts(position.step, named)
