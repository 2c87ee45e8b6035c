"""The parts of `data.mixture`."""

from bisect import bisect_right
from dataclasses import replace
from itertools import accumulate
from math import fsum

from t5x_diffeq.data.documents import Documents
from t5x_diffeq.runtime.config import DataKeys
from t5x_diffeq.runtime.errors import InputError

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
    parts = []
    for entry in data.mixture:
        if not _is_part(entry):
            raise InputError(
                f"data.mixture has {entry!r}; each part is (weight > 0, source, path), such as "
                "(0.7, 'tokens', '/shards/web')"
            )
        share = entry[0] / fsum(weight for weight, *_ in filter(_is_part, data.mixture))
        if share < _LEAST_SHARE:
            raise InputError(
                f"data.mixture has {entry!r}, whose share of the examples is {share:.3g}; it must "
                f"be at least {_LEAST_SHARE:g}: raise its weight, or leave the part out"
            )
        _, source, path = entry
        parts.append(replace(data, source=source, path=path))
    if not parts:
        raise InputError("data.source=mixture needs data.mixture, its parts")
    return parts


def _is_part(entry: object) -> bool:
    """Whether `entry` is (weight, source, path), with a positive weight."""
    if not (isinstance(entry, list | tuple) and len(entry) == 3):
        return False
    weight, source, path = entry
    is_number = isinstance(weight, int | float) and not isinstance(weight, bool)
    return (
        is_number
        and 0 < weight < float("inf")
        and isinstance(source, str)
        and isinstance(path, str | None)
    )


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
