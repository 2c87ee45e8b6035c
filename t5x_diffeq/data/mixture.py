"""The parts of `data.mixture`."""

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate

from ml_collections import ConfigDict

from t5x_diffeq.errors import InputError


def part_configs(data: ConfigDict) -> list[ConfigDict]:
    """`config.data` of each part of the mixture, or of the one source.

    Raises:
      InputError: if the mixture is not one.
    """
    if data.source != "mixture":
        if data.mixture:
            raise InputError(
                f"data.mixture is set, and data.source is {data.source!r}; set data.source=mixture"
            )
        return [data]
    parts = []
    for entry in data.mixture:
        if not (isinstance(entry, Sequence) and len(entry) == 3 and is_weight(entry[0])):
            raise InputError(
                f"data.mixture has {entry!r}; each part is (weight > 0, source, path), such as "
                "(0.7, 'tokens', '/shards/web')"
            )
        part = ConfigDict(data.to_dict())
        part.source, part.path = entry[1:]
        parts.append(part)
    if not parts:
        raise InputError("data.source=mixture needs data.mixture, its parts")
    return parts


def is_weight(value: object) -> bool:
    """Whether it is a positive number."""
    return isinstance(value, int | float) and 0 < value < float("inf")


class Concatenated(Sequence):
    """Sequences of documents, one behind the other."""

    def __init__(self, sequences: list[Sequence]):
        self.sequences = sequences
        self.firsts = [0, *accumulate(map(len, sequences))]

    def __len__(self) -> int:
        return self.firsts[-1]

    def __getitem__(self, number: int) -> str:
        """Document `number`."""
        place = bisect_right(self.firsts, number) - 1
        return self.sequences[place][number - self.firsts[place]]
