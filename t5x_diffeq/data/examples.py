"""Training and validation examples from a corpus, as `config.data` describes them."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import jax
from jax.sharding import NamedSharding

from t5x_diffeq.config.config import Config, DataKeys
from t5x_diffeq.data.batches import Examples, Mixture, train_batches
from t5x_diffeq.data.corpus import Corpus
from t5x_diffeq.data.encoding import encoder_of
from t5x_diffeq.data.packing import FirstFitRows, Windows
from t5x_diffeq.data.sources import STREAM
from t5x_diffeq.data.stream import Stream
from t5x_diffeq.data.stream_files import open_stream
from t5x_diffeq.system.console import log
from t5x_diffeq.system.errors import InputError


@runtime_checkable
class TrainingData(Protocol):
    """Batches to train on, from any position."""

    def batches(
        self, sharding: NamedSharding, consumed: int, position: dict | None
    ) -> Iterator[dict[str, jax.Array]]:
        """Global batches `consumed`, `consumed` + 1, ..., prefetched.

        `position` is what the method `position` returned after `consumed` batches or fewer; it is
        None if no batch was drawn.
        """

    def position(self) -> dict | None:
        """The state that a checkpoint keeps as JSON, or None; all processes must call this."""

    def size(self) -> str:
        """The size as text, such as `1.23M tokens`."""

    def epochs(self, count: int) -> str:
        """The number of epochs that `count` examples make, as text."""


@dataclass(frozen=True)
class ShuffledExamples:
    """The examples of tokenised documents; each can be read by its number alone."""

    mixture: Mixture
    corpus: Corpus
    batch_size: int
    seed: int
    threads: int

    def batches(
        self, sharding: NamedSharding, consumed: int, position: dict | None
    ) -> Iterator[dict[str, jax.Array]]:
        """Batches that are a function of seed and number."""
        return train_batches(
            self.mixture, self.batch_size, self.seed, consumed, sharding, self.threads
        )

    def position(self) -> None:
        """None: the number of batches drawn is enough to resume."""

    def size(self) -> str:
        """The tokens of all parts."""
        return self.corpus.amount("train")

    def epochs(self, count: int) -> str:
        """Epochs of each part in `count` examples: `1.25 epochs`, `0.80, 3.10 epochs`."""
        weights = sum(weight for weight, _ in self.mixture)
        each = (f"{count * weight / weights / len(part):.2f}" for weight, part in self.mixture)
        return f"{', '.join(each)} epochs"


def training_data(config: Config, corpus: Corpus) -> TrainingData:
    """The data of `config.data`; an InputError if it can't be opened, or a part is too short."""
    data, batch_size, seed = config.data, config.train.batch_size, config.seed
    if data.source != STREAM:
        mixture = train_examples(data, corpus, batch_size, seed)
        return ShuffledExamples(mixture, corpus, batch_size, seed, data.read_threads)
    encoder = encoder_of(corpus.tokenizer, data.loss_on == "completion")
    length, across = data.sequence_length, data.cross_documents
    return Stream(open_stream(data), encoder, length, batch_size, seed, across)


def train_examples(data: DataKeys, corpus: Corpus, batch_size: int, seed: int) -> Mixture:
    """Each part's weight and examples; an InputError if a part, or the sum of all, is too short."""
    if data.loss_on == "completion":
        _log_longer(corpus, data.sequence_length)
    border, length = corpus.tokenizer.border, data.sequence_length
    segments = not data.cross_documents
    pack = FirstFitRows if data.packing == "first_fit" else Windows
    mixture: list[tuple[float, Examples]] = []
    for part_seed, part in enumerate(corpus.parts, seed):
        examples = pack(part.train, length, "train", border, seed=part_seed, segments=segments)
        mixture.append((float(part.weight), examples))
    count = sum(len(examples) for _, examples in mixture)
    if count < batch_size:
        raise InputError(
            f"the train split makes {count} examples of data.sequence_length={length}, fewer than "
            f"train.batch_size={batch_size}; give more text, a smaller batch or shorter sequences"
        )
    return mixture


def _log_longer(corpus: Corpus, length: int) -> None:
    """Logs how many conversations are cut because they are longer than a sequence."""
    lengths = [part.train.lengths for part in corpus.parts]
    longer = sum(int((each > length).sum()) for each in lengths)
    if longer:
        log(
            f"{longer} of {sum(map(len, lengths))} conversations are longer than "
            f"data.sequence_length={length} and are cut; the later parts are trained on without "
            "their context"
        )


def eval_examples(data: DataKeys, corpus: Corpus) -> list[Windows]:
    """The windows of each part's validation split; they predict every token once."""
    return [
        Windows(
            part.validation,
            data.sequence_length,
            "validation",
            corpus.tokenizer.border,
            ragged=True,
            segments=not data.cross_documents,
            token_bytes=corpus.token_bytes,
        )
        for part in corpus.parts
    ]
