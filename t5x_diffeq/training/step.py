"""One step of training, and one of evaluation."""

from collections.abc import Callable
from functools import cache

import jax
import optax
from clu import metrics as clu_metrics
from flax import struct
from jaxtyping import Array

from t5x_diffeq.models.language_model import LanguageModel
from t5x_diffeq.training.losses import token_losses
from t5x_diffeq.training.setup import Setup
from t5x_diffeq.training.state import TrainState

Batch = dict[str, jax.Array]


@struct.dataclass
class TrainMetrics(clu_metrics.Collection):
    """What a step reports: of this very step, never a running mean."""

    loss: clu_metrics.LastValue.from_output("loss")
    grad_norm: clu_metrics.LastValue.from_output("grad_norm")
    learning_rate: clu_metrics.LastValue.from_output("learning_rate")


@struct.dataclass
class EvalMetrics(clu_metrics.Collection):
    """Sum of token losses and number of tokens of a batch."""

    loss: clu_metrics.Average.from_output("loss")


def make_train_step(setup: Setup) -> Callable[[TrainState, Batch], tuple[TrainState, TrainMetrics]]:
    """The function from a state and a batch to the next state and the step's metrics."""
    model, optimizer = setup.model, setup.optimizer
    deterministic = model.config.dropout_rate == 0

    def mean_loss(params: dict, batch: Batch, dropout_key: Array) -> Array:
        logits = model.apply(
            {"params": params},
            batch["inputs"],
            deterministic=deterministic,
            rngs=None if deterministic else {"dropout": dropout_key},
        )
        losses = token_losses(logits, batch["targets"]) * batch["mask"]
        return losses.sum() / batch["mask"].sum()

    def train_step(state: TrainState, batch: Batch) -> tuple[TrainState, TrainMetrics]:
        dropout_key = jax.random.fold_in(setup.dropout_key, state.step)
        loss, gradient = jax.value_and_grad(mean_loss)(state.params, batch, dropout_key)
        updates, opt_state = optimizer.update(gradient, state.opt_state, state.params)
        metrics = TrainMetrics.single_from_model_output(
            loss=loss,
            grad_norm=optax.global_norm(gradient),
            learning_rate=setup.schedule(state.step),
        )
        params = optax.apply_updates(state.params, updates)
        return TrainState(state.step + 1, params, opt_state), metrics

    return train_step


@cache
def compile_train_step(setup: Setup, batch_size: int) -> jax.stages.Compiled:
    """The train step, compiled for the setup's shardings; the state given is used up."""
    shardings = jax.tree.map(lambda x: x.sharding, setup.abstract_state)
    step = jax.jit(make_train_step(setup), donate_argnums=0, out_shardings=(shardings, None))
    return step.lower(setup.abstract_state, setup.abstract_batch(batch_size)).compile()


@cache
def make_eval_step(model: LanguageModel) -> Callable[[dict, Batch], EvalMetrics]:
    """The jitted function from parameters and a batch to the batch's summed loss."""

    @jax.jit
    def eval_step(params: dict, batch: Batch) -> EvalMetrics:
        logits = model.apply({"params": params}, batch["inputs"])
        losses = token_losses(logits, batch["targets"])
        return EvalMetrics.single_from_model_output(loss=losses, mask=batch["mask"])

    return eval_step
