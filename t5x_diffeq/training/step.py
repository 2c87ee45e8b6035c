"""The train step (one optimizer step) and the eval step."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from math import isfinite
from typing import NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from clu import metrics as clu_metrics
from flax import struct
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Float

from t5x_diffeq.models.language_model import LanguageModel
from t5x_diffeq.runtime.errors import InputError, RunError
from t5x_diffeq.training.gradient import BatchGradient, make_gradient
from t5x_diffeq.training.growth import while_waiting
from t5x_diffeq.training.objective import Batch, Means, batch_losses
from t5x_diffeq.training.setup import Setup
from t5x_diffeq.training.spikes import RecentSteps
from t5x_diffeq.training.state import TrainState
from t5x_diffeq.training.update import Rule, learning_part, update_unless, with_changes
from t5x_diffeq.training.watch import watch_gradient


# clu's fields are annotated with classes that a call returns, which mypy doesn't accept as types.
@struct.dataclass
class TrainMetrics(clu_metrics.Collection):
    """The metrics of a single optimizer step, never a running mean."""

    loss: clu_metrics.LastValue.from_output("loss")  # type: ignore[valid-type]
    grad_norm: clu_metrics.LastValue.from_output("grad_norm")  # type: ignore[valid-type]
    learning_rate: clu_metrics.LastValue.from_output("learning_rate")  # type: ignore[valid-type]


StepMetrics: TypeAlias = clu_metrics.Collection  # these and perhaps more


def _metrics_of(means: Means, **values: jax.Array) -> StepMetrics:
    """The metrics of a step: also divergences, velocity, a running cost, and spikes."""
    # Of a subclass, clu would compute only its own fields.
    own = TrainMetrics.__annotations__
    further = {
        name: clu_metrics.LastValue.from_output(name)
        for name in (*means, *values)
        if name not in own
    }
    kind = clu_metrics.Collection.create(**own, **further)
    return (kind if further else TrainMetrics).single_from_model_output(**means, **values)


class EvalMetrics(NamedTuple):
    """The sums of a batch, over the tokens that its mask counts.

    Attributes:
      loss: the sum of their losses, and their number.
      bytes: the bytes of text that they stand for; None if the batch doesn't tell.
    """

    loss: clu_metrics.Average
    bytes: jax.Array | None

    @classmethod
    def of(cls, losses: Float[Array, "B L"], batch: Batch) -> "EvalMetrics":
        """The metrics of a batch whose tokens have these losses."""
        loss = clu_metrics.Average.from_model_output(losses, mask=batch["mask"])
        return cls(loss, batch["bytes"].sum() if "bytes" in batch else None)


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
) -> Callable[..., tuple]:
    """The function from a state and a batch to the next state and the step's metrics.

    With a teacher, its third argument is the teacher's parameters. With `train.watch_every`, its
    third result is the norms of the gradient of W(t) (`watch.watch_gradient`).

    Args:
      setup: the model, the optimizer and what belongs to them.
      depths: numbers of solver steps over which the loss is the mean; None is the model's own.
      teacher: the model whose predictions are distilled, if any.
    """
    keys = setup.config.train
    waiting, optimizer = while_waiting(setup, depths)

    def train_step(state: TrainState, batch: Batch, *teacher_params: dict) -> tuple:
        dropout_key = jax.random.fold_in(setup.dropout_key, state.step)
        watch = watch_gradient(state.step + 1, keys.watch_every)
        of_batch = make_gradient(setup.model, setup.trains, keys, depths, teacher, watch, waiting)
        found = of_batch(state.params, batch, dropout_key, *teacher_params)
        rejected, recent, of_spikes = _look_for_spike(state, found, keys.spike_deviations)
        learns = partial(learning_part, like=found.gradient, optimizer=optimizer, waiting=waiting)
        before, places = learns(state), learns(setup.abstract_state)
        with jax.named_scope("optimizer"):
            rule = Rule(optimizer, found, state.step, keys.ema_decay)
            changed = update_unless(rejected, before, places, rule, setup)
        after = replace(with_changes(state, changed), step=state.step + 1, recent=recent)
        values = {"grad_norm": found.norm, "learning_rate": setup.schedule(state.step)}
        metrics = _metrics_of(found.means, **values, **of_spikes)
        return (after, metrics, found.curves) if watch else (after, metrics)

    return train_step


def _look_for_spike(
    before: TrainState, found: BatchGradient, k: float
) -> tuple[Array, RecentSteps | None, dict[str, Array]]:
    """Whether a step is a spike, the window of recent steps after it, and the spikes' metrics.

    Without a window, only what isn't finite is a spike.
    """
    loss, norm = found.means["loss"], found.norm
    if before.recent is None:
        return ~(jnp.isfinite(loss) & jnp.isfinite(norm)), None, {}
    recent, is_spike = before.recent.take(before.step, loss, norm, k)
    return is_spike, recent, {"spike": is_spike, "spikes": recent.spikes}


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
    watched = (everywhere,) if setup.config.train.watch_every else ()
    step = jax.jit(
        _make_train_step(setup, depths, teacher.model if teacher else None),
        donate_argnums=0,
        out_shardings=(shardings, None, *watched),
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
    return EvalMetrics.of(batch_losses(model, params, batch, chunk).losses, batch)


def check_finite(
    step: int,
    values: dict[str, float],
    last_checkpoint: int | None,
    start: int = 0,
    find_cause: Callable[[], str | None] = lambda: None,
) -> None:
    """Stops a run whose values are no longer finite.

    Args:
      step: the optimizer step that the values belong to.
      values: the loss and other metrics.
      last_checkpoint: the newest checkpoint that was saved, if any.
      start: the checkpoint that the run was resumed from; 0 for a new run.
      find_cause: says where the first such value appears, if that can be found.

    Raises:
      RunError: if a value is not finite; names the step, the last good checkpoint, and what to try.
    """
    bad = [f"{name} is {value}" for name, value in values.items() if not isfinite(value)]
    if not bad:
        return
    what = f"at step {step} {' and '.join(bad)}"
    if cause := find_cause():
        what += f": {cause}"
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
