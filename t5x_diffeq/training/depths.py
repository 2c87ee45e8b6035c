"""Training at several numbers of solver steps, so that one model works at many numbers.

Trained on one grid, W(t) is meaningful only at that grid's nodes. With `train.depths`, each
optimizer step takes the mean loss over a random subset of these numbers of solver steps, so that
the number of steps becomes a dial. With `train.depths_distill`, the smaller depths learn what the
largest predicts, as Yu and Huang (2019) train networks of many widths. `train.depths_rows` says
which rows of a batch each depth reads, and so determines the cost.
"""

from math import comb
from typing import NamedTuple

import numpy as np
from jax import Array

from t5x_diffeq.config.config import Config

_DRAW = 0xDE97  # distinguishes this use of the seed from others


class DepthRows(NamedTuple):
    """Every k-th row of a batch."""

    first: int  # the number of the first of these rows
    every: int  # k, by which the rows of each device are divisible

    def take(self, x: Array) -> Array:
        """These rows of x, `[B, ...]`, as `[B / k, ...]`; every device keeps its own rows."""
        if self.every == 1:
            return x
        return x.reshape(-1, self.every, *x.shape[1:])[:, self.first]


def rows_of_depths(rule: str, count: int) -> list[DepthRows]:
    """The rows that each of `count` depths reads, the largest last; `rule`: train.depths_rows."""
    if rule == "parts":
        return [DepthRows(i, count) for i in range(count)]
    every = least_rows(rule, count)
    return [DepthRows(i % every, every) for i in range(count - 1)] + [DepthRows(0, 1)]


def least_rows(rule: str, count: int) -> int:
    """The number by which each device's rows must be divisible for `rows_of_depths`."""
    if count == 1 or rule == "all":
        return 1
    return count if rule == "parts" else int(rule.removeprefix("every:"))


def full_grid_from(config: Config) -> int | None:
    """The first optimizer step after the steps with `train.depths`; None if there is none."""
    train = config.train
    first = int(train.depths_until * train.total_steps) + 1
    return first if train.depths and first <= train.total_steps else None


def depths_of(config: Config, step: int) -> tuple[int, ...]:
    """The numbers of solver steps over which optimizer step `step` (from 1) takes the mean loss.

    Up to the fraction `train.depths_until` of the run, these are `train.depths_per_step` different
    numbers from `train.depths`, determined by seed and step. After that, and without depths, it is
    `model.num_steps` alone.
    """
    train = config.train
    if not train.depths or step > train.depths_until * train.total_steps:
        return (config.model.num_steps,)
    draw = np.random.default_rng((_DRAW, config.seed, step))
    sampled: list[int] = []
    left = list(train.depths)
    while len(sampled) < train.depths_per_step:
        sampled.append(left[int(draw.integers(len(left)))])
        # A number that `train.depths` has twice is likelier, but a step takes it only once.
        left = [n for n in left if n != sampled[-1]]
    return tuple(sorted(sampled))


def depths_to_come(config: Config, start: int) -> list[tuple[int, ...]]:
    """All different values that `depths_of` takes in the optimizer steps after `start`, sorted."""
    train, last = config.train, config.train.total_steps
    if not train.depths:
        return [depths_of(config, last)]
    possible = comb(len(set(train.depths)), train.depths_per_step)
    sampled = set()
    for step in range(start + 1, int(train.depths_until * last) + 1):
        sampled.add(depths_of(config, step))
        if len(sampled) == possible:
            break
    return sorted(sampled | {depths_of(config, last)})
