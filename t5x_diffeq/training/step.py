"""The train step (one optimizer step) and the eval step."""

from collections.abc import Callable
from functools import partial
from math import isfinite
from typing import NamedTuple, TypeAlias

import jax
import optax
from clu import metrics as clu_metrics
from flax import struct

from t5x_diffeq.models.language_model import LanguageModel
from t5x_diffeq.runtime.errors import InputError, RunError
from t5x_diffeq.training.gradient import Batch, Means, batch_losses, make_gradient
from t5x_diffeq.training.setup import Setup
from t5x_diffeq.training.state import TrainState


# clu's fields are annotated with classes that a call returns, which mypy doesn't accept as types.
@struct.dataclass
class TrainMetrics(clu_metrics.Collection):
    """The metrics of a single optimizer step, never a running mean."""

    loss: clu_metrics.LastValue.from_output("loss")  # type: ignore[valid-type]
    grad_norm: clu_metrics.LastValue.from_output("grad_norm")  # type: ignore[valid-type]
    learning_rate: clu_metrics.LastValue.from_output("learning_rate")  # type: ignore[valid-type]


StepMetrics: TypeAlias = clu_metrics.Collection  # these and perhaps more


def _metrics_of(means: Means, **values: jax.Array) -> StepMetrics:
    """The metrics of a step: also the KL divergence from a teacher, and the running cost."""
    # Of a subclass, clu would compute only its own fields.
    further = {name: clu_metrics.LastValue.from_output(name) for name in means if name != "loss"}
    kind = clu_metrics.Collection.create(**TrainMetrics.__annotations__, **further)
    return (kind if further else TrainMetrics).single_from_model_output(**means, **values)


@struct.dataclass
class EvalMetrics(clu_metrics.Collection):
    """The sum of token losses and the number of tokens of a batch."""

    loss: clu_metrics.Average.from_output("loss")  # type: ignore[valid-type]


class Teacher(NamedTuple):
    """The frozen model whose predictions a run distils.

    Attributes:
      model: the model, on its own grid.
      params: its parameters, sharded over the run's mesh.
    """

    model: LanguageModel
    params: dict


def _make_train_step(
    setup: Setup, depths: tuple[int, ...] | None = None, teacher: LanguageModel | None = None
) -> Callable[..., tuple[TrainState, StepMetrics]]:
    """The function from a state and a batch to the next state and the step's metrics.

    With a teacher, its third argument is the teacher's parameters.

    Args:
      setup: the model, the optimizer and what belongs to them.
      depths: numbers of solver steps over which the loss is the mean; None is the model's own.
      teacher: the model whose predictions are distilled, if any.
    """
    of_batch = make_gradient(setup.model, setup.trains, setup.config.train, depths, teacher)

    def train_step(
        state: TrainState, batch: Batch, *teacher_params: dict
    ) -> tuple[TrainState, StepMetrics]:
        dropout_key = jax.random.fold_in(setup.dropout_key, state.step)
        gradient, norm, means = of_batch(state.params, batch, dropout_key, *teacher_params)
        training = {name: state.params[name] for name in gradient}
        updates, opt_state = setup.optimizer.update(gradient, state.opt_state, training, norm=norm)
        metrics = _metrics_of(means, grad_norm=norm, learning_rate=setup.schedule(state.step))
        params = {**state.params, **optax.apply_updates(training, updates)}
        return TrainState(state.step + 1, params, opt_state), metrics

    return train_step


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
    step = jax.jit(
        _make_train_step(setup, depths, teacher.model if teacher else None),
        donate_argnums=0,
        out_shardings=(shardings, None),
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


def make_eval_step(setup: Setup) -> Callable[[dict, Batch], EvalMetrics]:
    """The jitted function from parameters and a batch to the batch's summed loss."""
    return partial(_eval_step, setup.model, setup.config.train.loss_chunk)


@partial(jax.jit, static_argnums=(0, 1))
def _eval_step(model: LanguageModel, chunk: int, params: dict, batch: Batch) -> EvalMetrics:
    losses, *_ = batch_losses(model, params, batch, chunk)
    return EvalMetrics.single_from_model_output(loss=losses, mask=batch["mask"])


def check_finite(
    step: int, values: dict[str, float], last_checkpoint: int | None, start: int = 0
) -> None:
    """Stops a run whose values are no longer finite.

    Args:
      step: the optimizer step that the values belong to.
      values: the loss and other metrics.
      last_checkpoint: the newest checkpoint that was saved, if any.
      start: the checkpoint that the run was resumed from; 0 for a new run.

    Raises:
      RunError: if a value is not finite; names the step, the last good checkpoint, and what to try.
    """
    bad = [f"{name} is {value}" for name, value in values.items() if not isfinite(value)]
    if not bad:
        return
    what = f"at step {step} {' and '.join(bad)}"
    if start and step == start + 1:
        raise RunError(
            f"{what}, the first step after checkpoint {start} was restored: that checkpoint is "
            f"suspect; move checkpoints/{start} away, and the same command continues from an older "
            "one"
        )
    good = (
        "no checkpoint was saved yet"
        if last_checkpoint is None
        else f"the last good checkpoint is {last_checkpoint}"
    )
    raise RunError(
        f"{what}; {good}, and this state was not saved; try a "
        "lower optimizer.learning_rate, a longer optimizer.warmup_fraction or a smaller "
        "optimizer.max_grad_norm in a new --workdir"
    )
