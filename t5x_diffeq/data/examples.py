"""What `config.data` makes of a corpus: the examples that train and those that validate."""

from ml_collections import ConfigDict

from t5x_diffeq.data.corpus import Corpus
from t5x_diffeq.data.packing import FirstFitRows, Windows
from t5x_diffeq.errors import InputError

PACKINGS = ("concat_then_split", "first_fit")


def check_packing(data: ConfigDict) -> None:
    """The packing is one that there is.

    Raises:
      InputError: if it isn't.
    """
    if data.packing not in PACKINGS:
        raise InputError(f"data.packing is {data.packing!r}; it can be {' or '.join(PACKINGS)}")


def train_examples(
    data: ConfigDict, corpus: Corpus, seed: int
) -> list[tuple[float, Windows | FirstFitRows]]:
    """The examples of each part of the corpus, with its weight; `seed` shuffles its documents.

    Raises:
      InputError: if a part is too short.
    """
    check_packing(data)
    end, length = corpus.tokenizer.end_of_text, data.sequence_length
    mixture = []
    for number, part in enumerate(corpus.parts):
        if data.packing == "first_fit":
            segments = not data.cross_documents
            examples = FirstFitRows(part.train, length, "train", seed + number, end, segments)
        else:
            opened_by = None if data.cross_documents else end
            examples = Windows(
                part.train, length, "train", seed=seed + number, end_of_text=opened_by
            )
        mixture.append((float(part.weight), examples))
    return mixture


def eval_examples(data: ConfigDict, corpus: Corpus) -> list[Windows]:
    """Each part's validation split, every token once, however the training data is packed.

    Raises:
      InputError: if a part is too short.
    """
    end = None if data.cross_documents else corpus.tokenizer.end_of_text
    return [
        Windows(part.validation, data.sequence_length, "validation", ragged=True, end_of_text=end)
        for part in corpus.parts
    ]
