"""The train step (one optimizer step) and the eval step."""

from collections.abc import Callable
from functools import partial
from math import isfinite

import jax
import optax
from clu import metrics as clu_metrics
from flax import struct

from t5x_diffeq.models.language_model import LanguageModel
from t5x_diffeq.runtime.errors import RunError
from t5x_diffeq.training.gradient import Batch, batch_losses, make_gradient
from t5x_diffeq.training.setup import Setup
from t5x_diffeq.training.state import TrainState


# clu's fields are annotated with classes that a call returns, which mypy doesn't accept as types.
@struct.dataclass
class TrainMetrics(clu_metrics.Collection):
    """The metrics of a single optimizer step, never a running mean."""

    loss: clu_metrics.LastValue.from_output("loss")  # type: ignore[valid-type]
    grad_norm: clu_metrics.LastValue.from_output("grad_norm")  # type: ignore[valid-type]
    learning_rate: clu_metrics.LastValue.from_output("learning_rate")  # type: ignore[valid-type]


@struct.dataclass
class EvalMetrics(clu_metrics.Collection):
    """The sum of token losses and the number of tokens of a batch."""

    loss: clu_metrics.Average.from_output("loss")  # type: ignore[valid-type]


def _make_train_step(
    setup: Setup, depths: tuple[int, ...] | None = None
) -> Callable[[TrainState, Batch], tuple[TrainState, TrainMetrics]]:
    """The function from a state and a batch to the next state and the step's metrics.

    Args:
      setup: the model, the optimizer and what belongs to them.
      depths: numbers of solver steps over which the loss is the mean; None is the model's own.
    """
    of_batch = make_gradient(setup.model, setup.trains, setup.config.train, depths)

    def train_step(state: TrainState, batch: Batch) -> tuple[TrainState, TrainMetrics]:
        dropout_key = jax.random.fold_in(setup.dropout_key, state.step)
        gradient, norm, loss = of_batch(state.params, batch, dropout_key)
        training = {name: state.params[name] for name in gradient}
        updates, opt_state = setup.optimizer.update(gradient, state.opt_state, training, norm=norm)
        metrics = TrainMetrics.single_from_model_output(
            loss=loss, grad_norm=norm, learning_rate=setup.schedule(state.step)
        )
        params = {**state.params, **optax.apply_updates(training, updates)}
        return TrainState(state.step + 1, params, opt_state), metrics

    return train_step


def lower_train_step(
    setup: Setup, batch_size: int, depths: tuple[int, ...] | None = None
) -> jax.stages.Lowered:
    """The train step as a program for the setup's shardings; it donates the state."""
    shardings = jax.tree.map(lambda x: x.sharding, setup.abstract_state)
    step = jax.jit(
        _make_train_step(setup, depths), donate_argnums=0, out_shardings=(shardings, None)
    )
    return step.lower(setup.abstract_state, setup.abstract_batch(batch_size))


def compile_train_step(
    setup: Setup, batch_size: int, depths: tuple[int, ...] | None = None
) -> jax.stages.Compiled:
    """The compiled train step; takes the arguments of `lower_train_step`."""
    return lower_train_step(setup, batch_size, depths).compile()


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
