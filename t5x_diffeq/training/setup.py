"""Sets up what training needs besides a model on a mesh: optimizer, schedule, state's shapes."""

import os
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh
from jaxtyping import Array

from t5x_diffeq.checkpoints.stored import TrainState
from t5x_diffeq.config.config import Config, TrainKeys
from t5x_diffeq.model.language_model import LanguageModel
from t5x_diffeq.system.chips import GIB, chip
from t5x_diffeq.system.errors import InputError
from t5x_diffeq.training import partitioning
from t5x_diffeq.training.compiler_options import Options, step_options
from t5x_diffeq.training.depths import least_rows
from t5x_diffeq.training.optimizers import optimizer as optimizers
from t5x_diffeq.training.optimizers.schedule import Schedule, learning_rate_schedule
from t5x_diffeq.training.placed_model import PlacedModel, declared_params, least_batch, place_model
from t5x_diffeq.training.spikes import RecentSteps

_SHARE_OF_STATE = 0.75  # of a GPU's memory, for state and gradient; activations need the rest


@dataclass(frozen=True, eq=False)
class Setup(PlacedModel):
    """Everything about training a model that is known before a single array exists."""

    optimizer: optax.GradientTransformation  # for the parameters that train
    trains: Callable[[str], bool]  # whether a part of the parameters, given its name, trains
    schedule: Schedule  # the schedule of the learning rate
    abstract_state: TrainState  # shape, dtype and sharding of each array of the train state
    init_key: Array  # determines the initial parameters
    dropout_key: Array  # determines dropout, together with the optimizer step

    def init_state(self) -> TrainState:
        """A new state, each array created with its sharding; call within `context`."""
        return self.compiled_init(self.init_key)

    @cached_property
    def compiled_init(self) -> Callable[[Array], TrainState]:
        """The function from a key to a new state."""
        shardings = jax.tree.map(lambda x: x.sharding, self.abstract_state)

        def init(key: Array) -> TrainState:
            train_config = self.config.train
            state = _new_state(self.model, self.optimizer, self.trains, train_config, key)
            return partitioning.unbox(state)

        # It runs once, and most of its time is compilation. On CPUs, LLVM's level 1 takes 0.4 times
        # the time of XLA's default and gives the same parameters bit for bit; level 0 does not.
        on_cpus = self.mesh.devices.flat[0].platform == "cpu"
        options = {"xla_backend_optimization_level": 1} if on_cpus else None
        return jax.jit(init, out_shardings=shardings, compiler_options=options)

    @property
    def step_options(self) -> Options:
        """XLA's options for the train step."""
        device, *_ = self.mesh.local_devices or self.mesh.devices.flat
        return step_options(device)

    def complete(self, state: TrainState) -> TrainState:
        """The state with the parts that the config asks for and an older checkpoint lacks.

        Averages begin as the parameters are; the window of recent steps begins empty.
        """
        complete = self.abstract_state
        if complete.averages is not None and state.averages is None:
            trained = {name: state.params[name] for name in complete.averages}
            # Copies, because the step donates the state, and no buffer can be donated twice.
            state = replace(state, averages=jax.tree.map(jnp.copy, trained))
        if complete.recent is not None and state.recent is None:
            shardings = jax.tree.map(lambda x: x.sharding, complete.recent)
            new = jax.jit(
                lambda: RecentSteps.new(self.config.train.spike_window), out_shardings=shardings
            )
            state = replace(state, recent=new())
        return state


def expected_vocab_size(config: Config) -> int:
    """The vocabulary size that the config's tokenizer will have, before there is one."""
    tokenizer_size = 256 if config.data.tokenizer == "bytes" else config.data.tokenizer_vocab_size
    return config.model.vocab_size or config.model.embedding_rows or tokenizer_size


def make_setup(
    config: Config,
    vocab_size: int,
    devices: Sequence[jax.Device] | None = None,
    slices: int | None = None,
) -> Setup:
    """The setup of `config` on `devices`; None: on all devices that this process sees.

    If the config leaves `mesh.data` open, each node of GPUs holds all weights. If a GPU has too
    little memory for that, the setup's config has `mesh.data=1`: all nodes share the weights.
    `vocab_size` is the tokenizer's. `slices` is the number of TPU slices or GPU nodes, if the
    devices don't say it.

    Raises:
      InputError: if values of the config are invalid or contradict each other.
    """
    mesh = partitioning.make_mesh(config.mesh, config.train.batch_size, devices, slices)
    setup = _setup_on(mesh, config, vocab_size)
    if config.mesh.data is not None or mesh.shape["data"] == 1:
        return setup
    if fits_on_gpu(mesh.local_devices, setup.abstract_state):
        return setup
    return make_setup(config.with_values({"mesh.data": 1}), vocab_size, devices, slices)


def fits_on_gpu(devices: Sequence[Any], state: TrainState) -> bool:
    """Whether a GPU has memory for its part of the state and the gradient.

    True for other devices, and for GPUs whose memory isn't known.
    """
    memory = _device_memory(devices) if devices[0].platform == "gpu" else None
    needed = partitioning.shard_bytes((state, state.params))
    return memory is None or needed < _SHARE_OF_STATE * memory


def _setup_on(mesh: Mesh, config: Config, vocab_size: int) -> Setup:
    _check_microbatches(config.train, mesh)
    placed = place_model(config, vocab_size, mesh)
    model, train_config = placed.model, config.train
    schedule = learning_rate_schedule(config.optimizer, train_config.total_steps)
    declared = declared_params(model)
    trains = _trainable_parts(train_config.trainable, declared)
    training = {name: part for name, part in declared.items() if trains(name)}
    optimizer = optimizers.make_optimizer(config.optimizer, training)
    init_key, dropout_key = jax.random.split(jax.random.key(config.seed))
    boxed = jax.eval_shape(
        lambda key: _new_state(model, optimizer, trains, train_config, key), init_key
    )
    return Setup(
        **vars(placed),
        optimizer=optimizer,
        trains=trains,
        schedule=schedule,
        abstract_state=partitioning.shard_shapes(boxed, mesh, placed.rules),
        init_key=init_key,
        dropout_key=dropout_key,
    )


def _check_microbatches(train: TrainKeys, mesh: Mesh) -> None:
    """Checks that every device's rows can be divided into the microbatches."""
    shards = partitioning.batch_shards(mesh.shape)
    where = f"on each of {shards} devices ({partitioning.describe_batch_axes(mesh.shape)})"
    if train.batch_size % (shards * train.microbatches):
        raise InputError(
            f"train.batch_size={train.batch_size} is not divisible by train.microbatches="
            f"{train.microbatches} {where}; change one of them"
        )
    every = least_rows(train.depths_rows, train.depths_per_step) if train.depths else 1
    if train.batch_size % (shards * train.microbatches * every):
        raise InputError(
            f"train.batch_size={train.batch_size} is not divisible by {every} (train.depths_rows="
            f"{train.depths_rows}) in each of train.microbatches={train.microbatches} {where}; "
            "change one of them"
        )


def _trainable_parts(names: Sequence[str], parts: Collection[str]) -> Callable[[str], bool]:
    """`config.train.trainable` as a function from a part's name to whether it trains.

    "embeddings" stands for the embeddings of tokens and of positions; without names, all parts
    train.
    """
    kinds = {part: "embeddings" if part.endswith("_embedding") else part for part in parts}
    for name in names:
        if name not in kinds.values():
            known = ", ".join(sorted({*kinds.values()}))
            hint = "; model.adapter_rank makes adapters" if name == "adapters" else ""
            raise InputError(f"train.trainable names {name!r}; this model has {known}{hint}")
    return lambda part: not names or kinds[part] in names


def _new_state(
    model: LanguageModel,
    optimizer: optax.GradientTransformation,
    trains: Callable[[str], bool],
    train_config: TrainKeys,
    key: Array,
) -> TrainState:
    """A new state, its parameters boxed (for `partitioning.shard_shapes` and `unbox`)."""
    params = model.init(key, jnp.zeros(least_batch(model), jnp.int32))["params"]
    training = {name: part for name, part in params.items() if trains(name)}
    return TrainState(
        jnp.zeros((), jnp.int32),
        params,
        optimizer.init(training),
        averages=training if train_config.ema_decay else None,
        recent=None
        if train_config.on_spike == "nothing"
        else RecentSteps.new(train_config.spike_window),
    )


def check_fits(setup: Setup) -> None:
    """Checks that a device has enough memory for the least that training needs; allocates nothing.

    The least is the device's part of the train state, of the gradient, of the batch and of one
    state of the residual stream. An optimizer step needs more: `plan` says how much.
    """
    c, needed = setup.model.config, least_memory(setup)
    batch_size = setup.config.train.batch_size
    memory = _device_memory(setup.mesh.local_devices)
    if memory is not None and needed > memory:
        raise InputError(
            f"training needs at least {needed / GIB:,.0f} GiB on each device, which has "
            f"{memory / GIB:,.0f}: model.embed_dim={c.embed_dim}, model.num_steps={c.num_steps}, "
            f"data.sequence_length={c.max_length}, train.batch_size={batch_size} on "
            f"{setup.mesh.size} devices; make one of them smaller, or take more devices"
        )


def least_memory(setup: Setup) -> int:
    """The bytes that `check_fits` adds up."""
    c, shards = setup.model.config, partitioning.batch_shards(setup.mesh.shape)
    batch_size, microbatches = setup.config.train.batch_size, setup.config.train.microbatches
    gradient = setup.abstract_state.params
    arrays = setup.abstract_state, setup.abstract_batch(batch_size), gradient
    rows = max(1, batch_size // shards // microbatches)
    length = c.max_length // setup.mesh.shape["context"]
    stream = rows * length * c.embed_dim * c.compute_dtype.itemsize
    return stream + partitioning.shard_bytes(arrays)


def _device_memory(devices: Sequence[Any]) -> float | None:
    """Bytes that one of these devices can hold; for a CPU, its share of the machine's memory.

    If programs are only compiled for the device, it is the memory in the data sheet of its kind.
    """
    if devices[0].platform == "cpu":
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // len(devices)
    figures = chip(devices[0].device_kind)
    try:
        stats = devices[0].memory_stats() or {}
    except jax.errors.JaxRuntimeError:  # the device isn't there
        stats = {}
    return stats.get("bytes_limit", figures and figures.memory_bytes)
