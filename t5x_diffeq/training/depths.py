"""Training at several numbers of steps: each training step draws how many the solver takes.

Trained on one grid, W(t) means something at that grid's nodes alone. Drawn anew at each training
step, the number of steps becomes a dial: the model works at those drawn and at those between them.
"""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
from ml_collections import ConfigDict

from t5x_diffeq.errors import InputError
from t5x_diffeq.models.language_model import LanguageModel
from t5x_diffeq.training.setup import Setup
from t5x_diffeq.training.step import compile_train_step

DRAW = 0xDE97  # tells this use of the seed from others


def check_depths(config: ConfigDict) -> None:
    """`train.depths` can be drawn from.

    Raises:
      InputError: if a number is not positive, or the weights exist on their own grid alone.
    """
    depths, until = config.train.depths, config.train.depths_until
    if not all(isinstance(n, int) and n >= 1 for n in depths):
        raise InputError(
            f"train.depths is {tuple(depths)}; it is a tuple of numbers of steps of at least 1, or "
            "() to train at model.num_steps alone"
        )
    if not 0 <= until <= 1:
        raise InputError(f"train.depths_until is {until}; it must be in [0, 1]")
    if depths and config.model.weights == "per_layer":
        raise InputError(
            f"train.depths={tuple(depths)} draws other numbers of steps, and per-layer weights "
            "exist at their own layers alone; set model.weights to time_dependent or shared"
        )


def depth_of(config: ConfigDict, step: int) -> int:
    """The number of solver steps that training step `step` (from 1) takes.

    Drawn from `train.depths` by the seed and the step alone, up to the fraction
    `train.depths_until` of the run; from there on, and without depths, `model.num_steps`.
    """
    train = config.train
    if not train.depths or step > train.depths_until * train.total_steps:
        return config.model.num_steps
    draw = np.random.default_rng((DRAW, config.seed, step))
    return int(draw.choice(np.asarray(train.depths)))


def depths_to_come(config: ConfigDict, start: int) -> list[int]:
    """Every number of steps that training steps after `start` will take, ascending."""
    return sorted({depth_of(config, n) for n in range(start + 1, config.train.total_steps + 1)})


def at_depth(setup: Setup, num_steps: int) -> Setup:
    """The same run, its model integrated in `num_steps` steps."""
    if num_steps == setup.model.config.num_steps:
        return setup
    model = LanguageModel(replace(setup.model.config, num_steps=num_steps))
    return replace(setup, model=model)


def compile_train_steps(
    setup: Setup, batch_size: int, depths: list[int]
) -> dict[int, Callable[..., tuple]]:
    """A compiled train step per number of solver steps."""
    return {n: compile_train_step(at_depth(setup, n), batch_size) for n in depths}
