"""Training and validation examples from a corpus, as `config.data` describes them."""

from t5x_diffeq.data.batches import Examples, Mixture
from t5x_diffeq.data.corpus import Corpus
from t5x_diffeq.data.mixture import part_configs
from t5x_diffeq.data.packing import FirstFitRows, Windows
from t5x_diffeq.runtime.config import DataKeys
from t5x_diffeq.runtime.console import say
from t5x_diffeq.runtime.errors import InputError


def check_data(data: DataKeys) -> None:
    """Checks what can be checked of the keys before the data is read.

    Raises:
      InputError: if the mixture or one of its parts is invalid.
    """
    part_configs(data)


def train_examples(data: DataKeys, corpus: Corpus, batch_size: int, seed: int) -> Mixture:
    """The examples of each part of the corpus, with its weight.

    Args:
      data: `config.data`.
      corpus: the corpus that it describes.
      batch_size: rows in the global batch.
      seed: shuffles the documents.

    Raises:
      InputError: if a part is too short.
    """
    if data.loss_on == "completion":
        _say_longer(corpus, data.sequence_length)
    end, length = corpus.tokenizer.end_of_text, data.sequence_length
    opened_by = None if data.cross_documents else end
    mixture: list[tuple[float, Examples]] = []
    for part_seed, part in enumerate(corpus.parts, seed):
        examples: Examples
        if data.packing == "first_fit":
            segments = not data.cross_documents
            examples = FirstFitRows(part.train, length, "train", part_seed, end, segments)
        else:
            examples = Windows(part.train, length, "train", seed=part_seed, end_of_text=opened_by)
        mixture.append((float(part.weight), examples))
    count = sum(len(examples) for _, examples in mixture)
    if count < batch_size:
        raise InputError(
            f"the train split makes {count} examples of data.sequence_length={length}, fewer than "
            f"train.batch_size={batch_size}; give more text, a smaller batch or shorter sequences"
        )
    return mixture


def _say_longer(corpus: Corpus, length: int) -> None:
    """Prints how many conversations are cut because they are longer than a sequence."""
    lengths = [part.train.lengths for part in corpus.parts]
    longer = sum(int((each > length).sum()) for each in lengths)
    if longer:
        say(
            f"{longer} of {sum(map(len, lengths))} conversations are longer than "
            f"data.sequence_length={length} and are cut: in the later parts the assistant doesn't "
            "see what came before"
        )


def eval_examples(data: DataKeys, corpus: Corpus) -> list[Windows]:
    """Each part's validation split, with every token once, however the training data is packed.

    Raises:
      InputError: if a part is too short.
    """
    end = None if data.cross_documents else corpus.tokenizer.end_of_text
    return [
        Windows(
            part.validation,
            data.sequence_length,
            "validation",
            ragged=True,
            end_of_text=end,
            token_bytes=corpus.token_bytes,
        )
        for part in corpus.parts
    ]


def epochs(examples: Mixture, count: int) -> str:
    """How many epochs of each part so many examples are: `1.25 epochs`, `0.80, 3.10 epochs`."""
    weights = sum(weight for weight, _ in examples)
    each = (f"{count * weight / weights / len(part):.2f}" for weight, part in examples)
    return f"{', '.join(each)} epochs"
