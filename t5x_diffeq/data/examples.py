"""Training and validation examples from a corpus, as `config.data` describes them."""

from t5x_diffeq.data.batches import Examples, Mixture
from t5x_diffeq.data.corpus import Corpus
from t5x_diffeq.data.encoding import encoder_of
from t5x_diffeq.data.mixture import part_configs
from t5x_diffeq.data.packing import FirstFitRows, Windows
from t5x_diffeq.data.shards import ShardedDocuments
from t5x_diffeq.data.streams import RowStreams
from t5x_diffeq.runtime.config import DataKeys
from t5x_diffeq.runtime.console import say
from t5x_diffeq.runtime.errors import InputError


def check_data(data: DataKeys) -> None:
    """Checks that the keys that say how to make examples are compatible.

    Raises:
      InputError: if `data.tokenize` doesn't go with `data.source` or `data.packing`.
    """
    in_loop = data.tokenize == "in_loop"
    if in_loop and data.source in ("tokens", "mixture"):
        raise InputError(
            f"data.tokenize=in_loop needs the documents of one source, and data.source is "
            f"{data.source}; set data.tokenize=ahead or another source"
        )
    if in_loop and data.packing == "first_fit":
        raise InputError(
            "data.packing=first_fit needs the lengths of all documents before the first step, and "
            "with data.tokenize=in_loop there are none; set data.tokenize=ahead or "
            "data.packing=concat_then_split"
        )
    part_configs(data)


def train_examples(
    data: DataKeys, corpus: Corpus, batch_size: int, seed: int
) -> Mixture | RowStreams:
    """The examples of each part of the corpus, with its weight; or its rows of documents.

    Args:
      data: `config.data`.
      corpus: the corpus that it describes.
      batch_size: rows in the global batch.
      seed: shuffles the documents.

    Raises:
      InputError: if a part is too short, or the keys don't go together.
    """
    check_data(data)
    if data.loss_on == "completion":
        _say_longer(corpus, data.sequence_length)
    end, length = corpus.tokenizer.end_of_text, data.sequence_length
    if data.tokenize == "in_loop":
        texts, cross = corpus.parts[0].train, data.cross_documents
        assert not isinstance(texts, ShardedDocuments)  # those are tokenised ahead, not in the loop
        encoder = encoder_of(corpus.tokenizer, data.loss_on == "completion")
        return RowStreams(texts, encoder, length, batch_size, seed, cross)
    mixture: list[tuple[float, Examples]] = []
    for number, part in enumerate(corpus.parts):
        assert isinstance(part.train, ShardedDocuments)  # texts are tokenised in the loop
        examples: Examples
        if data.packing == "first_fit":
            segments = not data.cross_documents
            examples = FirstFitRows(part.train, length, "train", seed + number, end, segments)
        else:
            opened_by = None if data.cross_documents else end
            examples = Windows(
                part.train, length, "train", seed=seed + number, end_of_text=opened_by
            )
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
    splits = [part.train for part in corpus.parts]
    lengths = [each.lengths for each in splits if isinstance(each, ShardedDocuments)]
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


def epochs(examples: Mixture | RowStreams, count: int) -> str:
    """How many epochs of each part so many examples are: `1.25 epochs`, `0.80, 3.10 epochs`."""
    if isinstance(examples, RowStreams):
        return "tokenised as they are needed"
    weights = sum(weight for weight, _ in examples)
    each = (f"{count * weight / weights / len(part):.2f}" for weight, part in examples)
    return f"{', '.join(each)} epochs"
