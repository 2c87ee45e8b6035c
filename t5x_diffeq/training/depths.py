"""Training at several numbers of steps, so that one model works at many.

Trained on one grid, W(t) is meaningful only at that grid's nodes. With `train.depths`, each
optimizer step takes the mean loss over a random subset of these numbers of solver steps, so that
the number of steps becomes a dial. If the subset is all of them, or includes the largest and the
smallest, this is the sandwich rule of Yu and Huang (2019) for networks of many widths.
"""

from math import comb

import numpy as np

from t5x_diffeq.ode.schemes import grid
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
    if train.growth == "copy":
        _check_growth(config)


def _check_growth(config: Config) -> None:
    """Checks that W(t) of a coarse grid can be copied to that of `model.num_steps`."""
    model, train, optimizer = config.model, config.train, config.optimizer
    faults = {
        f"train.depths={train.depths}; give one number below model.num_steps={model.num_steps}": (
            len(set(train.depths)) != 1 or max(train.depths) >= model.num_steps
        ),
        f"train.depths_until={train.depths_until}; give the fraction of the run at which it grows, "
        "above 0 and below 1": not 0 < train.depths_until < 1,
        f"model.weights={model.weights}; take time_dependent": model.weights != "time_dependent",
        f"train.trainable={train.trainable}; name source among them": (
            bool(train.trainable) and "source" not in train.trainable
        ),
        f"optimizer.name={optimizer.name}; take adam": optimizer.name != "adam",
        f"model.scheme={model.scheme}, which reads W several times a step; take euler, lie_trotter "
        "or strang": grid(model.scheme, 1).size > 1,
        f"model.time_embed_dim={model.time_embed_dim}; raise it to at least model.num_steps="
        f"{model.num_steps}, or set train.growth=jump": model.time_embed_dim < model.num_steps,
    }
    if fault := next((what for what, there in faults.items() if there), None):
        raise InputError(f"train.growth=copy can't be used with {fault}")


def growth_step(config: Config) -> int | None:
    """The first optimizer step on the grid that a run grows to; None if it doesn't, or jumps."""
    train = config.train
    return int(train.depths_until * train.total_steps) + 1 if train.growth == "copy" else None


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
