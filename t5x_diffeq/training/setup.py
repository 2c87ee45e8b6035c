"""What a config stands for: model, optimizer, mesh and the sharded shapes of the train state."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding
from jaxtyping import Array

from t5x_diffeq.layers.mesh import STAGE, axes_of
from t5x_diffeq.models.config import ModelConfig
from t5x_diffeq.models.language_model import LanguageModel
from t5x_diffeq.models.sub_fields import kernels_not_quantized
from t5x_diffeq.runtime.config import Config
from t5x_diffeq.training import optimizer as optimizers
from t5x_diffeq.training import partitioning
from t5x_diffeq.training.chips import chip
from t5x_diffeq.training.host_memory import check_host_memory, is_on_host, offload, place
from t5x_diffeq.training.mesh_checks import check_context, check_microbatches, check_stages
from t5x_diffeq.training.spikes import RecentSteps
from t5x_diffeq.training.state import TrainState, declared_params, init_state, trainable_parts

_SHARE_OF_STATE = 0.75  # of a GPU's memory, with the gradient; activations need the rest


@dataclass(frozen=True, eq=False)
class Setup:
    """Everything about a run that is known before a single array exists.

    Attributes:
      config: the run's config.
      model: the language model.
      optimizer: the optimizer of the parameters that train.
      trains: whether a part of the parameters, given its name, trains.
      schedule: the learning rate schedule.
      mesh: the device mesh.
      rules: the rules from logical to mesh axes.
      batch_sharding: the sharding of a batch: its rows, and their tokens, over devices.
      abstract_state: shape, dtype and sharding of each array of the train state.
      init_key: determines the initial parameters.
      dropout_key: determines dropout, together with the optimizer step.
      attention_reason: why this attention kernel was chosen.
    """

    config: Config
    model: LanguageModel
    optimizer: optax.GradientTransformation
    trains: Callable[[str], bool]
    schedule: optax.Schedule
    mesh: Mesh
    rules: partitioning.Rules
    batch_sharding: NamedSharding
    abstract_state: TrainState
    init_key: Array
    dropout_key: Array
    attention_reason: str

    @property
    def pipeline_microbatches(self) -> int:
        """The parts into which stages cut the rows that they get at once; 1 without stages."""
        given = self.config.model.pipeline_microbatches
        return partitioning.pipeline_microbatches(given, self.mesh.shape)

    @property
    def pipeline_ticks(self) -> int:
        """M + S - 1: how often each of S stages takes its steps in a pass of M microbatches."""
        return self.pipeline_microbatches + self.mesh.shape[STAGE] - 1

    @property
    def pipeline_slowdown(self) -> float:
        """How many times as long as its work a pass through the stages takes."""
        return self.pipeline_ticks / self.pipeline_microbatches

    def at_depth(self, num_steps: int | None, scheme: str | None = None) -> "Setup":
        """The same model, with the same parameters, on another grid; see `ModelConfig.at_depth`."""
        model = self.model.at_depth(num_steps, scheme)
        grid = {"model.num_steps": model.config.num_steps, "model.scheme": model.config.scheme}
        return replace(self, model=model, config=self.config.with_values(grid))

    def with_whole_rows(self) -> "Setup":
        """The same setup, with batches whose rows no mesh axis splits; `context` splits the batch.

        Text is generated and scored so, since a single new token can't be split.
        """
        if self.mesh.shape["context"] == 1:
            return self
        rules = partitioning.whole_row_rules(self.rules)
        return replace(
            self, rules=rules, batch_sharding=partitioning.batch_sharding(self.mesh, rules)
        )

    def context(self) -> AbstractContextManager:
        """A context in which arrays are sharded over the mesh by the rules."""
        return partitioning.mesh_context(self.mesh, self.rules)

    def init_state(self) -> TrainState:
        """A new state, each array created with its sharding; call within `context`."""
        return self.compiled_init(self.init_key)

    @cached_property
    def compiled_init(self) -> Callable[[Array], TrainState]:
        """The function from a key to a new state."""
        shardings = jax.tree.map(lambda x: x.sharding, self.abstract_state)

        def init(key: Array) -> TrainState:
            keys = self.config.train
            state = init_state(self.model, self.optimizer, self.trains, keys, key)
            return partitioning.unbox(state)

        # It runs once, and most of its time is compilation. On CPUs, LLVM's level 1 takes 0.4 times
        # the time of XLA's default and gives the same parameters bit for bit; level 0 does not.
        on_cpu = self.mesh.devices.flat[0].platform == "cpu"
        options = {"xla_backend_optimization_level": 1} if on_cpu else None
        return jax.jit(init, out_shardings=shardings, compiler_options=options)

    def complete(self, state: TrainState) -> TrainState:
        """The state with the parts that the config asks for and an older checkpoint lacks.

        Averages begin as the parameters are; the window of recent steps begins empty.
        """
        wanted = self.abstract_state
        if wanted.averages is not None and state.averages is None:
            averages = jax.tree.map(
                lambda x, param: place(jnp.copy(param), x.sharding),
                wanted.averages,
                {name: state.params[name] for name in wanted.averages},
            )
            state = replace(state, averages=averages)
        if wanted.recent is not None and state.recent is None:
            shardings = jax.tree.map(lambda x: x.sharding, wanted.recent)
            new = jax.jit(
                lambda: RecentSteps.new(self.config.train.spike_window), out_shardings=shardings
            )
            state = replace(state, recent=new())
        return state

    def abstract_batch(self, batch_size: int) -> dict[str, jax.ShapeDtypeStruct]:
        """Shape, dtype and sharding of a global batch."""
        shape = (batch_size, self.model.config.max_length)
        dtypes = {"inputs": jnp.int32, "targets": jnp.int32, "mask": jnp.float32}
        if not self.config.data.cross_documents:
            dtypes |= {"segments": jnp.int32, "positions": jnp.int32}
        return {
            name: jax.ShapeDtypeStruct(shape, dtype, sharding=self.batch_sharding)
            for name, dtype in dtypes.items()
        }

    def eval_batch_size(self, batch_size: int) -> int:
        """`batch_size` rounded up to a number that the devices and stages share equally.

        Padding rows are masked.
        """
        rows = axes_of(self.batch_sharding.spec[0])
        shards = prod(self.mesh.shape[axis] for axis in rows) * self.pipeline_microbatches
        return -(-batch_size // shards) * shards


def expected_vocab_size(config: Config) -> int:
    """The vocabulary size that the config's tokenizer will have, before there is one."""
    of_tokenizer = 256 if config.data.tokenizer == "bytes" else config.data.tokenizer_vocab_size
    return config.model.vocab_size or of_tokenizer


def make_setup(
    config: Config,
    vocab_size: int,
    devices: Sequence[jax.Device] | None = None,
    slices: int | None = None,
) -> Setup:
    """The setup of `config`, for a tokenizer with `vocab_size` tokens.

    If the config leaves `mesh.data` open, weights don't leave a node of GPUs. Where a GPU has too
    little memory for that, the setup's config has `mesh.data=1`: all nodes share the weights.

    Args:
      config: the run's config.
      vocab_size: the vocabulary size of its tokenizer.
      devices: the devices to run on; None: those that this process sees.
      slices: the number of TPU slices or GPU nodes; None: what the devices say.

    Raises:
      InputError: if any values of the config can't be used, alone or together.
    """
    mesh = partitioning.make_mesh(config.mesh, config.train.batch_size, devices, slices)
    setup = _setup_on(mesh, config, vocab_size)
    if config.mesh.data is not None or mesh.shape["data"] == 1:
        return setup
    if fits_on_gpu(mesh.devices.flat[0], setup.abstract_state):
        return setup
    return make_setup(config.with_values({"mesh.data": 1}), vocab_size, devices, slices)


def fits_on_gpu(device: Any, state: TrainState) -> bool:
    """Whether a GPU has memory for its part of the state and the gradient; true of other devices,
    and of GPUs whose memory isn't known.
    """
    figures = chip(device.device_kind) if device.platform == "gpu" else None
    arrays = [*jax.tree.leaves(state), *jax.tree.leaves(state.params)]
    needed = partitioning.shard_bytes([x for x in arrays if not is_on_host(x)])
    return figures is None or needed < _SHARE_OF_STATE * figures.memory_bytes


def _setup_on(mesh: Mesh, config: Config, vocab_size: int) -> Setup:
    check_microbatches(config.train, mesh)
    check_stages(config, mesh)
    device = mesh.devices.flat[0]
    model_config, attention_reason = ModelConfig.of(
        config.model, vocab_size, config.data.sequence_length
    ).with_attention_for(
        device.platform,
        segments=not config.data.cross_documents,
        shards=mesh.shape["context"],
        capability=getattr(device, "compute_capability", None),
    )
    if model_config.quantization != "none":
        kernels_not_quantized(model_config)  # refuses a block that has no others
    check_context(model_config, mesh)
    model = LanguageModel(model_config)
    rules = partitioning.logical_rules(config.mesh)
    schedule = optimizers.learning_rate_schedule(config.optimizer, config.train.total_steps)
    declared = declared_params(model)
    trains = trainable_parts(config.train.trainable, declared)
    training = {name: part for name, part in declared.items() if trains(name)}
    optimizer = optimizers.make_optimizer(config.optimizer, training, schedule)
    init_key, dropout_key = jax.random.split(jax.random.key(config.seed))
    boxed = jax.eval_shape(
        lambda key: init_state(model, optimizer, trains, config.train, key), init_key
    )
    return Setup(
        config=config,
        model=model,
        optimizer=optimizer,
        trains=trains,
        schedule=schedule,
        mesh=mesh,
        rules=rules,
        batch_sharding=partitioning.batch_sharding(mesh, rules),
        abstract_state=_place_state(config, partitioning.shard_shapes(boxed, mesh, rules)),
        init_key=init_key,
        dropout_key=dropout_key,
        attention_reason=attention_reason,
    )


def _place_state(config: Config, state: TrainState) -> TrainState:
    """The state's shapes with its shardings, some of them in the host's memory."""
    if not config.optimizer.offload:
        return state
    check_host_memory(state.step.sharding.mesh.devices.flat[0])
    return replace(state, opt_state=offload(state.opt_state), averages=offload(state.averages))
