"""Training at several numbers of steps, so that one model works at many.

Trained on one grid, W(t) is meaningful only at that grid's nodes. With `train.depths`, each
optimizer step takes the mean loss over a random subset of these numbers of solver steps, so that
the number of steps becomes a dial. If the subset is all of them, or includes the largest and the
smallest, this is the sandwich rule of Yu and Huang (2019) for networks of many widths.
"""

from math import comb

import numpy as np

from t5x_diffeq.runtime.config import Config
from t5x_diffeq.runtime.errors import InputError

_DRAW = 0xDE97  # distinguishes this use of the seed from others


def check_depths(config: Config) -> None:
    """Checks that `train.depths` can be drawn from.

    Raises:
      InputError: if there are too few depths, or the weights exist only on their own grid.
    """
    train = config.train
    depths = tuple(train.depths)
    if depths and train.depths_per_step > len(set(depths)):
        raise InputError(
            f"train.depths_per_step is {train.depths_per_step}; it must be from 1 to the "
            f"{len(set(depths))} different numbers in train.depths"
        )
    if depths and config.model.weights == "per_layer":
        raise InputError(
            f"train.depths={depths} draws other numbers of steps, and per-layer weights exist at "
            "their own layers alone; set model.weights to time_dependent or shared"
        )


def depths_of(config: Config, step: int) -> tuple[int, ...]:
    """The numbers of solver steps over which optimizer step `step` (from 1) takes the mean loss.

    Up to the fraction `train.depths_until` of the run, these are `train.depths_per_step` different
    ones from `train.depths`, determined by the seed and the step; after that, and without depths,
    `model.num_steps`.
    """
    train = config.train
    if not train.depths or step > train.depths_until * train.total_steps:
        return (config.model.num_steps,)
    draw = np.random.default_rng((_DRAW, config.seed, step))
    left: list[int] = list(train.depths)
    drawn: list[int] = []
    while len(drawn) < train.depths_per_step:
        drawn.append(left[int(draw.integers(len(left)))])
        left = [n for n in left if n != drawn[-1]]
    return tuple(sorted(drawn))


def depths_to_come(config: Config, start: int) -> list[tuple[int, ...]]:
    """All the different `depths_of` optimizer steps after `start`, however long the run."""
    train, last = config.train, config.train.total_steps
    if not train.depths:
        return [depths_of(config, last)]
    possible = comb(len(set(train.depths)), train.depths_per_step)
    drawn = set()
    for step in range(start + 1, int(train.depths_until * last) + 1):
        drawn.add(depths_of(config, step))
        if len(drawn) == possible:
            break
    return sorted(drawn | {depths_of(config, last)})
