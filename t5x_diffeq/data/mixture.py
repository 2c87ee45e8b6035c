"""The parts of `data.mixture`."""

from bisect import bisect_right
from dataclasses import replace
from itertools import accumulate
from math import fsum

from t5x_diffeq.config.config import DataKeys
from t5x_diffeq.data.documents import Documents
from t5x_diffeq.system.errors import InputError

_LEAST_SHARE = 1e-6  # of the examples; with less, a run would see almost none of the part


def part_configs(data: DataKeys) -> list[DataKeys]:
    """`config.data` of each part of the mixture, or of the one source.

    Raises:
      InputError: if the mixture or one of its parts is invalid.
    """
    if data.source != "mixture":
        if data.mixture:
            raise InputError(
                f"data.mixture is set, and data.source is {data.source!r}; set data.source=mixture"
            )
        return [data]
    if not data.mixture:
        raise InputError("data.source=mixture needs data.mixture, its parts")
    total = fsum(weight for weight, *_ in filter(_is_part, data.mixture))
    for entry in data.mixture:
        if not _is_part(entry) or entry[0] < total * _LEAST_SHARE:
            raise InputError(
                f"data.mixture has {entry!r}; each part is (weight, source, path), such as (0.7, "
                f"'tokens', '/shards/web'), with at least {_LEAST_SHARE:g} of the sum of weights"
            )
    return [replace(data, source=source, path=path) for _, source, path in data.mixture]


def _is_part(entry: object) -> bool:
    """Whether `entry` is (weight, source, path), with a positive weight."""
    if not (isinstance(entry, list | tuple) and len(entry) == 3):
        return False
    weight, source, path = entry
    named = isinstance(source, str) and isinstance(path, str | None)
    return named and type(weight) in (int, float) and 0 < weight < float("inf")


class ConcatenatedDocuments(Documents):
    """The concatenation of several sequences of documents."""

    def __init__(self, sequences: list[Documents]):
        self.sequences = sequences
        self.firsts = [0, *accumulate(map(len, sequences))]

    def __len__(self) -> int:
        return self.firsts[-1]

    def __getitem__(self, number: int) -> str:
        """Document `number`."""
        index = bisect_right(self.firsts, number) - 1
        return self.sequences[index][number - self.firsts[index]]
