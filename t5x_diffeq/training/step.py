"""The train step (one optimizer step) and the eval step."""

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from clu import metrics as clu_metrics
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Float

from t5x_diffeq.models.language_model import LanguageModel
from t5x_diffeq.runtime.errors import InputError
from t5x_diffeq.training.gradient import BatchGradient, make_gradient
from t5x_diffeq.training.objective import Batch, batch_losses
from t5x_diffeq.training.setup import Setup
from t5x_diffeq.training.spikes import RecentSteps
from t5x_diffeq.training.state import TrainState
from t5x_diffeq.training.update import update_unless
from t5x_diffeq.training.watch import watch_gradient

Metrics = dict[str, Array]  # of an optimizer step, never a running mean


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

    With a teacher, its third argument is the teacher's parameters. The metrics are scalars; with
    `train.watch_every`, also the norms of the gradient of W(t) (`watch.watch_gradient`).

    Args:
      setup: the model, the optimizer and what belongs to them.
      depths: numbers of solver steps over which the loss is the mean; None is the model's own.
      teacher: the model whose predictions are distilled, if any.
    """
    keys = setup.config.train

    def train_step(
        state: TrainState, batch: Batch, *teacher_params: dict
    ) -> tuple[TrainState, Metrics]:
        dropout_key = jax.random.fold_in(setup.dropout_key, state.step)
        watch = watch_gradient(state.step + 1, keys.watch_every)
        of_batch = make_gradient(setup.model, setup.trains, keys, depths, teacher, watch)
        found = of_batch(state.params, batch, dropout_key, *teacher_params)
        rejected, recent, of_spikes = _look_for_spike(state, found, keys.spike_deviations)
        with jax.named_scope("optimizer"):
            updated = update_unless(rejected, state, found, setup)
        after = replace(updated, step=state.step + 1, recent=recent)
        values = {"grad_norm": found.norm, "learning_rate": setup.schedule(state.step)}
        return after, {**found.means, **values, **of_spikes, **found.curves}

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
    step = jax.jit(
        _make_train_step(setup, depths, teacher.model if teacher else None),
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


def make_eval_step(setup: Setup) -> Callable[[dict, Batch], EvalMetrics]:
    """The jitted function from parameters and a batch to the batch's summed loss."""
    return partial(_eval_step, setup.model, setup.config.train.loss_chunk)


@partial(jax.jit, static_argnums=(0, 1))
def _eval_step(model: LanguageModel, chunk: int, params: dict, batch: Batch) -> EvalMetrics:
    return EvalMetrics.of(batch_losses(model, params, batch, chunk).losses, batch)
