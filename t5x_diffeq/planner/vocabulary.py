"""The vocabulary that a step is planned and timed for."""

from functools import cache

from t5x_diffeq.config.config import Config, DataKeys
from t5x_diffeq.data.corpus import find_vocab_size
from t5x_diffeq.system.console import log
from t5x_diffeq.system.errors import InputError


def planned_vocab_size(config: Config) -> int:
    """The vocabulary size of the config's model; assumed if the tokenizer can't be read here.

    A plan may be made where the data is not, so this is no error.
    """
    keys = config.model
    return keys.vocab_size or keys.embedding_rows or _vocab_size_of_data(config.data)


@cache  # because a sweep plans many steps, and the assumption is logged once
def _vocab_size_of_data(data: DataKeys) -> int:
    try:
        return find_vocab_size(data)
    except InputError as error:
        size = data.tokenizer_vocab_size
        log(
            f"note: a vocabulary of {size} is assumed (data.tokenizer_vocab_size), because the "
            f"tokenizer can't be read: {error}; or set model.vocab_size"
        )
        return size
