"""Makes and compiles an optimizer step: forward, terms, backward, norm, update."""

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Float

from t5x_diffeq.checkpoints.stored import TrainState
from t5x_diffeq.config.config import TrainKeys
from t5x_diffeq.model.language_model import LanguageModel
from t5x_diffeq.model.layers.array_types import Weights
from t5x_diffeq.model.ode.weight_source import Embeddings
from t5x_diffeq.system.errors import InputError
from t5x_diffeq.training.gradient import (
    SourcesOfPasses,
    accumulate,
    gradient_norm,
    make_reader,
    make_weights,
    trained_rest,
)
from t5x_diffeq.training.objective import (
    Batch,
    BatchMetrics,
    Params,
    count_tokens,
    objective,
    passes_of,
)
from t5x_diffeq.training.optimizers.schedule import Schedule
from t5x_diffeq.training.setup import Setup
from t5x_diffeq.training.spikes import look_for_spike
from t5x_diffeq.training.teacher import Teacher
from t5x_diffeq.training.watch import watch_gradient

Metrics = dict[str, Array]  # the metrics of one optimizer step, never running means
# from the state, the batch and, with a teacher, its parameters to the next state and the metrics
TrainStep = Callable[..., tuple[TrainState, Metrics]]


class BatchGradient(NamedTuple):
    """The gradient of a batch."""

    gradient: Params  # the gradient of the parts that train
    norm: Float[Array, ""]  # its global norm
    metrics: BatchMetrics  # what is reported of the batch, by name
    # e(t) at the distinct nodes of each of the step's sources, by the name of the generated layer
    embeddings: Embeddings
    # the gradient of W(t) on the model's own grid; {} if no pass of the step was on that grid
    d_weights: Weights


def make_gradient(
    model: LanguageModel,
    trains: Callable[[str], bool],
    train_config: TrainKeys,
    depths: tuple[int, ...] | None = None,
    teacher: LanguageModel | None = None,
) -> Callable[..., BatchGradient]:
    """The function from parameters, a batch and a dropout key to a `BatchGradient`.

    Each device's rows of the batch must be divisible by the microbatches of `train_config`.

    Args:
      trains: whether a part of the parameters, given its name, trains.
      depths: the numbers of solver steps over which the loss is averaged; None: the model's own.
      teacher: the model whose predictions are distilled. Its parameters are then the function's
        fourth argument.
    """
    passes = passes_of(model, depths, train_config)
    pass_sources = SourcesOfPasses.of(passes)

    def gradient(
        params: Params, batch: Batch, key: Array, teacher_params: Params | None = None
    ) -> BatchGradient:
        # W(t) is made outside of `loss`, once for all microbatches.
        made_weights = make_weights(pass_sources.sources, params, trains)
        tokens = count_tokens(passes, batch["mask"], train_config.microbatches)
        read_teacher = make_reader(teacher, teacher_params) if teacher and teacher_params else None

        def loss(
            rest: Params, trained: list[Weights], rows: Batch, key: Array
        ) -> tuple[Array, BatchMetrics]:
            of_sources = [f | t for f, t in zip(made_weights.frozen, trained, strict=True)]
            weights = pass_sources.split(of_sources)
            teacher_outputs = read_teacher(rows) if read_teacher else None
            all_params = {**params, **rest}
            return objective(
                passes, all_params, weights, rows, tokens, train_config, key, teacher_outputs
            )

        rest = trained_rest(params, trains)
        gradient_of_rows = partial(
            jax.grad(loss, argnums=(0, 1), has_aux=True), rest, made_weights.trained
        )
        (d_rest, d_weights), metrics = accumulate(
            gradient_of_rows, batch, key, train_config.microbatches
        )
        # The sums over microbatches are float32; the pull-back takes the dtype of the weights.
        d_weights = jax.tree.map(lambda d, w: d.astype(w.dtype), d_weights, made_weights.trained)
        with jax.named_scope("pull back to P"):
            (d_makers,) = made_weights.pull_back(d_weights)
        d_params = {**d_makers, **d_rest}
        norm = gradient_norm(model, d_params, d_weights, made_weights.embeddings)
        on_model_grid = (
            d
            for each, d in zip(passes, pass_sources.split(d_weights), strict=True)
            if each.model == model
        )
        embeddings = pass_sources.distinct(made_weights.embeddings)
        return BatchGradient(d_params, norm, metrics, embeddings, next(on_model_grid, {}))

    return gradient


def make_train_step(
    setup: Setup, depths: tuple[int, ...] | None = None, teacher: LanguageModel | None = None
) -> Callable[..., tuple[TrainState, Metrics]]:
    """The function from a state, a batch and a schedule to the next state and the step's metrics.

    Depths and teacher are as in `make_gradient`. With a teacher, the teacher's parameters are the
    last argument. The metrics are scalars; with `train.watch_every`, also the norms of the gradient
    of W(t).
    """
    train_config = setup.train_config
    gradient_of = make_gradient(setup.model, setup.trains, train_config, depths, teacher)

    def train_step(
        state: TrainState, batch: Batch, schedule: Schedule, *teacher_params: Params
    ) -> tuple[TrainState, Metrics]:
        # The key is a function of the step, so a resumed run draws the same dropout masks.
        dropout_key = jax.random.fold_in(setup.dropout_key, state.step)
        gradient, norm, metrics, embeddings, d_weights = gradient_of(
            state.params, batch, dropout_key, *teacher_params
        )
        curves = watch_gradient(d_weights, train_config.watch_every)
        targets = batch["mask"].sum()
        rejected, recent, spike_metrics = look_for_spike(
            state.recent, state.step, metrics["loss"], norm, targets, train_config.spike_deviations
        )
        with jax.named_scope("optimizer"):
            facts = {"norm": norm, "embeddings": embeddings, "schedule": schedule}
            updated = _update(setup, state, gradient, **facts)
            # The devices decide, because the host reads the metrics only when the next step runs.
            chosen = jax.tree.map(partial(jnp.where, rejected), _pass_over(state), updated)
        after = replace(chosen, step=state.step + 1, recent=recent)
        values = {"learning_rate": schedule(state.step), "targets": targets}
        return after, {**metrics, "grad_norm": norm, **values, **spike_metrics, **curves}

    return train_step


def _update(setup: Setup, state: TrainState, gradient: Params, **facts: Any) -> TrainState:
    """The state after the optimizer's update, which is given the gradient and `facts`."""
    params = {name: part for name, part in state.params.items() if setup.trains(name)}
    updates, opt_state = setup.optimizer.update(gradient, state.opt_state, params, **facts)
    params = optax.apply_updates(params, updates)
    averages = state.averages
    if averages is not None:  # in a run's first steps, old parameters are forgotten faster
        d = jnp.minimum(setup.config.train.ema_decay, (1.0 + state.step) / (10.0 + state.step))
        averages = jax.tree.map(lambda a, p: d * a + (1 - d) * p, averages, params)
    return replace(state, params={**state.params, **params}, opt_state=opt_state, averages=averages)


def _pass_over(state: TrainState) -> TrainState:
    """The state after a rejected step: unchanged, except that the schedule counts the step.

    Otherwise the learning rate would lag behind the run's step.
    """

    def counts_steps(node: object) -> bool:
        return isinstance(node, optax.ScaleByScheduleState)

    def keep(node: Any) -> Any:
        return optax.ScaleByScheduleState(node.count + 1) if counts_steps(node) else node

    return replace(state, opt_state=jax.tree.map(keep, state.opt_state, is_leaf=counts_steps))


# ------------------------------------------------------------------------------ as a program


def lower_train_step(
    setup: Setup,
    batch_size: int,
    depths: tuple[int, ...] | None = None,
    teacher: Teacher | None = None,
) -> jax.stages.Lowered:
    """The train step as a program for the setup's shardings; it donates the state.

    Its arguments are the state, the batch, `setup.schedule` and, with a teacher, the teacher's
    parameters.

    Raises:
      InputError: if the config names a teacher and none is given.
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
        # The new state has the shardings of the old one, in whose memory it is written.
        out_shardings=(shardings, everywhere),
        compiler_options=setup.step_options,
    )
    arguments = setup.abstract_state, setup.abstract_batch(batch_size), setup.schedule
    return step.lower(*arguments, teacher.params) if teacher else step.lower(*arguments)


def compile_train_steps(
    setup: Setup,
    batch_size: int,
    depths: Sequence[tuple[int, ...]],
    teacher: Teacher | None = None,
) -> tuple[dict[tuple[int, ...], TrainStep], float]:
    """The compiled train step for each of `depths`, and how many seconds the compilation took.

    Another thread can call this function: it enters the setup's context itself.
    """
    began = time.perf_counter()
    with setup.context():
        programs = {
            each: lower_train_step(setup, batch_size, each, teacher).compile() for each in depths
        }
    schedule = _on_every_device(setup.schedule, setup.mesh)

    def with_schedule(program: jax.stages.Compiled) -> TrainStep:
        return lambda state, batch, *rest: program(state, batch, schedule, *rest)

    steps = {each: with_schedule(program) for each, program in programs.items()}
    return steps, time.perf_counter() - began


def _on_every_device(schedule: Schedule, mesh: Mesh) -> Schedule:
    """The schedule's numbers, placed once, so that no step waits for them."""
    everywhere = NamedSharding(mesh, PartitionSpec())

    def place(number: np.generic) -> Array:
        return jax.make_array_from_callback((), everywhere, lambda _: np.asarray(number))

    return jax.tree.map(place, schedule)
