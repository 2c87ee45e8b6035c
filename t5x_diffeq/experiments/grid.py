"""The grid of a sweep: keys of the config, each with several values, from `--grid=KEY=V1,V2`."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise, product
from math import log
from statistics import mean, pstdev
from typing import Any

from t5x_diffeq.config.config import SECTIONS, check_key, parse_value
from t5x_diffeq.system.errors import InputError

VARIANT = "variant"  # the axis of the config file's variants, which isn't a key of the config
Point = dict[str, Any]  # a value for each axis


@dataclass(frozen=True)
class Axis:
    """A key of the config (or `variant`) and the values that a sweep gives it."""

    key: str
    values: tuple[Any, ...]

    @property
    def numeric(self) -> bool:
        """Whether all values are numbers."""
        numbers = [isinstance(value, int | float) for value in self.values]
        return all(numbers) and not any(isinstance(value, bool) for value in self.values)

    @property
    def geometric(self) -> bool:
        """Whether the ratios of neighbouring values vary less than their differences."""
        if not self.numeric or min(self.values) <= 0:
            return False
        values = sorted(self.values)
        return _variation([log(value) for value in values]) <= _variation(values)


def _variation(values: Sequence[float]) -> float:
    """How much the differences of neighbours vary, relative to their mean."""
    steps = [after - before for before, after in pairwise(values)]
    return pstdev(steps) / mean(steps) if steps else 0


def parse_grid(given: Sequence[str], overrides: Mapping[str, object]) -> tuple[Axis, ...]:
    """The axes that `--grid` flags describe.

    Raises:
      InputError: if a flag is malformed, if two flags name the same key, if `--config.KEY` sets it,
        too, or if a value can't be used.
    """
    axes = tuple(map(_parse_axis, given))
    keys = [axis.key for axis in axes]
    for key in keys:
        if keys.count(key) > 1:
            raise InputError(f"--grid={key} is given twice; give all of its values at once")
        if key in overrides:
            raise InputError(f"--config.{key} and --grid={key} contradict each other; leave one")
    return axes


def points(axes: Sequence[Axis]) -> list[Point]:
    """Every combination of the axes' values; the last axis changes fastest."""
    keys = [axis.key for axis in axes]
    return [dict(zip(keys, values, strict=True)) for values in product(*(a.values for a in axes))]


def _parse_axis(given: str) -> Axis:
    key, equals, text = given.partition("=")
    if not (key and equals):
        raise InputError(f"--grid={given} is not KEY=VALUE,VALUE")
    if key == "seed":
        raise InputError(f"--grid={given}: --seeds=N runs every point with N seeds")
    if key != VARIANT:
        if key in SECTIONS:
            raise InputError(f"--grid={given}: {key} is a group of keys; name one of them")
        check_key(key)
    texts = [each.strip() for each in split_values(text)]
    if "" in texts:
        raise InputError(f"--grid={given}: a value is empty; leave it out")
    values = texts if key == VARIANT else [parse_value(key, each) for each in texts]
    for number, value in enumerate(values):
        if value in values[:number]:
            raise InputError(f"--grid={given}: the value {value!r} is given twice")
    return Axis(key, tuple(values))


def split_values(text: str) -> list[str]:
    """The values: separated by semicolons if there are any, else by commas outside parentheses."""
    return re.split(";" if ";" in text else r",(?![^(]*\))", text)
