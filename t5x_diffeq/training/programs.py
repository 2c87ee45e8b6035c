"""The train step as a program for a mesh."""

import time
from collections.abc import Sequence
from typing import NamedTuple

import jax
from jax.sharding import NamedSharding, PartitionSpec

from t5x_diffeq.model.language_model import LanguageModel
from t5x_diffeq.system.errors import InputError
from t5x_diffeq.training.setup import Setup
from t5x_diffeq.training.step import make_train_step


class Teacher(NamedTuple):
    """The frozen model whose predictions a run distils.

    Attributes:
      model: the model, on its own grid.
      params: its parameters, sharded over the run's mesh.
    """

    model: LanguageModel
    params: dict


def lower_train_step(
    setup: Setup,
    batch_size: int,
    depths: tuple[int, ...] | None = None,
    teacher: Teacher | None = None,
) -> jax.stages.Lowered:
    """The train step as a program for the setup's shardings; it donates the state.

    Its arguments are the state, the batch and, with a teacher, the teacher's parameters.

    Raises:
      InputError: if the config names a teacher, and none is given.
    """
    source = setup.config.train.distill_from
    if source and teacher is None:
        raise InputError(
            f"train.distill_from={source}: only train and finetune compile a step with a teacher; "
            "leave the key out here"
        )
    shardings = jax.tree.map(lambda x: x.sharding, setup.abstract_state)
    everywhere = NamedSharding(setup.mesh, PartitionSpec())
    step = jax.jit(
        make_train_step(setup, depths, teacher.model if teacher else None),
        donate_argnums=0,
        out_shardings=(shardings, everywhere),
    )
    arguments = setup.abstract_state, setup.abstract_batch(batch_size)
    return step.lower(*arguments, teacher.params) if teacher else step.lower(*arguments)


def compile_train_step(
    setup: Setup,
    batch_size: int,
    depths: tuple[int, ...] | None = None,
    teacher: Teacher | None = None,
) -> jax.stages.Compiled:
    """The compiled train step; takes the arguments of `lower_train_step`."""
    return lower_train_step(setup, batch_size, depths, teacher).compile()


def compile_train_steps(
    setup: Setup,
    batch_size: int,
    depths: Sequence[tuple[int, ...]],
    teacher: Teacher | None = None,
) -> tuple[dict[tuple[int, ...], jax.stages.Compiled], float]:
    """The compiled train step for each of `depths`, and the seconds that it took; for a thread."""
    began = time.perf_counter()
    with setup.context():
        steps = {each: compile_train_step(setup, batch_size, each, teacher) for each in depths}
    return steps, time.perf_counter() - began
