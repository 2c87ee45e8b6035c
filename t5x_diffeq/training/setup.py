"""What a config stands for: model, optimizer, mesh and the sharded shapes of the train state."""

import os
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import cached_property
from math import ceil, log10, prod

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding
from jaxtyping import Array

from t5x_diffeq.layers.mesh import STAGE, axes_of
from t5x_diffeq.models.block import can_split_length
from t5x_diffeq.models.config import ModelConfig
from t5x_diffeq.models.language_model import LanguageModel, nodes
from t5x_diffeq.models.sub_fields import kernels_not_quantized, make_block
from t5x_diffeq.ode.schemes import is_reversible
from t5x_diffeq.runtime.config import Config, TrainKeys
from t5x_diffeq.runtime.config_keys import REVERSIBLE
from t5x_diffeq.runtime.errors import InputError
from t5x_diffeq.runtime.plugins import is_plugin
from t5x_diffeq.training import optimizer as optimizers
from t5x_diffeq.training import partitioning
from t5x_diffeq.training.chips import GIB
from t5x_diffeq.training.depths import least_rows
from t5x_diffeq.training.host_memory import check_host_memory, is_on_host, offload, place
from t5x_diffeq.training.jitter import check_jitter
from t5x_diffeq.training.spikes import RecentSteps
from t5x_diffeq.training.state import TrainState, declared_params, init_state, trainable_parts

_LOST_DIGITS = 3  # of the seven of a reconstructed float32 state, at most


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

    def with_exits(self, tolerance: float) -> "Setup":
        """The same model, in which tokens stop early; see `ModelConfig.with_exits`."""
        return replace(self, model=LanguageModel(self.model.config.with_exits(tolerance)))

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
    config: Config, vocab_size: int, devices: Sequence[jax.Device] | None = None
) -> Setup:
    """The setup of `config`, for a tokenizer with `vocab_size` tokens.

    Args:
      config: the run's config.
      vocab_size: the vocabulary size of its tokenizer.
      devices: the devices to run on; None: those that this process sees.

    Raises:
      InputError: if any values of the config can't be used, alone or together.
    """
    mesh = partitioning.make_mesh(config.mesh, config.train.batch_size, devices)
    check_microbatches(config.train, mesh)
    check_stages(config, mesh)
    model_config, attention_reason = ModelConfig.of(
        config.model, vocab_size, config.data.sequence_length
    ).with_attention_for(
        mesh.devices.flat[0].platform,
        segments=not config.data.cross_documents,
        shards=mesh.shape["context"],
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
    _check_grid(config)
    num_nodes = len({*nodes(model_config).tolist()})
    optimizer = optimizers.make_optimizer(config.optimizer, training, schedule, num_nodes)
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


def _check_grid(config: Config) -> None:
    """Checks that all steps have the nodes at which the optimizer keeps gradients."""
    if config.optimizer.moments == "factored" and config.train.depths:
        raise InputError(
            f"optimizer.moments=factored keeps gradients at the nodes of model.num_steps="
            f"{config.model.num_steps}, and train.depths={config.train.depths} has other grids; "
            "take int8, or leave train.depths out"
        )


def check_new(config: Config) -> None:
    """Checks that the keys of a new run don't contradict each other.

    Runs that began before this check existed may continue.

    Raises:
      InputError: if they do; gives both values.
    """
    model = config.model
    name, _, every = model.remat.partition(":")
    if name == "every" and int(every) > model.num_steps:
        raise InputError(
            f"model.remat={model.remat} keeps no state of model.num_steps={model.num_steps} steps; "
            f"give every:k with k of at most {model.num_steps}, or another one"
        )
    if model.scan_unroll > model.num_steps:
        raise InputError(
            f"model.scan_unroll={model.scan_unroll} is more than model.num_steps="
            f"{model.num_steps}; give at most {model.num_steps}"
        )
    steps = max(model.num_steps, *config.train.depths, 1)
    if model.scheme.startswith(REVERSIBLE) and model.remat == "full":
        _check_reconstruction(model.reversibility, steps)
    if model.adapter_rank > model.embed_dim:
        raise InputError(
            f"model.adapter_rank={model.adapter_rank} is more than model.embed_dim="
            f"{model.embed_dim}, the rank that a kernel can have; lower it"
        )
    _check_moments(config)
    check_jitter(config)


def _check_moments(config: Config) -> None:
    """Checks that there are parameters whose moments `optimizer.moments` is for."""
    coded = ("time_dependent", "per_layer")
    weights = {"factored": ("time_dependent",), "int8": coded, "int4": coded}
    moments, trainable = config.optimizer.moments, config.train.trainable
    if moments not in weights or is_plugin(config.optimizer.name):
        return
    if config.model.weights not in weights[moments]:
        raise InputError(
            f"optimizer.moments={moments} is for model.weights={' or '.join(weights[moments])}, "
            f"and model.weights is {config.model.weights}; take bfloat16"
        )
    if trainable and "source" not in trainable:
        raise InputError(
            f"optimizer.moments={moments} is for the kernels of the source, and train.trainable="
            f"{trainable} leaves it out; take bfloat16"
        )


def check_context(model: ModelConfig, mesh: Mesh) -> None:
    """Checks that sequences can be split over `mesh.context`.

    Raises:
      InputError: if they can't; names the block, or gives both numbers.
    """
    shards = mesh.shape["context"]
    if shards == 1:
        return
    if not can_split_length(type(make_block(model))):
        raise InputError(
            f"mesh.context={shards} splits sequences, and the block of model.block={model.block} "
            "needs whole ones (it doesn't say `splits_length = True`); set mesh.context=1"
        )
    if model.max_length % (2 * shards):
        raise InputError(
            f"data.sequence_length={model.max_length} is not divisible by {2 * shards}, the number "
            f"of chunks into which mesh.context={shards} cuts a sequence; change one of them"
        )


def _check_reconstruction(coupling: float, steps: int) -> None:
    """Checks that the states come back in float32 with at least four digits."""
    growth = -steps * log10(coupling)  # of rounding errors, in digits
    if growth > _LOST_DIGITS:
        raise InputError(
            f"model.reversibility={coupling} with {steps} solver steps magnifies rounding errors "
            f"of the reconstructed states up to 10^{growth:.0f} times; raise it to at least "
            f"{ceil(1e5 * 10 ** (-_LOST_DIGITS / steps)) / 1e5}, or set model.remat=none, which "
            "stores the states"
        )


def check_fits(setup: Setup, batch_size: int) -> None:
    """Checks that a device has enough memory for the least that training needs; allocates nothing.

    This is its part of the train state, of the gradient, of the batch and of one state of the
    residual stream. An optimizer step needs more: `plan` says how much.

    Raises:
      InputError: if it hasn't; gives both numbers.
    """
    c, devices = setup.model.config, setup.mesh.local_devices
    needed = least_memory(setup, batch_size, of_host=devices[0].platform == "cpu")
    there = _device_memory(devices)
    if there is not None and needed > there:
        raise InputError(
            f"training needs at least {needed / GIB:,.0f} GiB on each device, which has "
            f"{there / GIB:,.0f}: model.embed_dim={c.embed_dim}, model.num_steps={c.num_steps}, "
            f"data.sequence_length={c.max_length}, train.batch_size={batch_size} on "
            f"{setup.mesh.size} devices; make one of them smaller, or take more devices"
        )


def least_memory(setup: Setup, batch_size: int, of_host: bool) -> int:
    """The bytes that `check_fits` adds up.

    Args:
      setup: the setup.
      batch_size: sequences in a global batch.
      of_host: whether the host's memory is the device's, too.
    """
    c, shards = setup.model.config, partitioning.batch_shards(setup.mesh.shape)
    arrays = [*jax.tree.leaves(setup.abstract_state), *setup.abstract_batch(batch_size).values()]
    arrays += jax.tree.leaves(setup.abstract_state.params)  # the gradient
    there = [x for x in arrays if of_host or not is_on_host(x)]
    rows = max(1, batch_size // shards // setup.config.train.microbatches)
    length = c.max_length // setup.mesh.shape["context"]
    stream = rows * length * c.embed_dim * c.compute_dtype.itemsize
    return stream + sum(prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in there)


def _device_memory(devices: Sequence[jax.Device]) -> int | None:
    """Bytes that one of these devices can hold; for a CPU, its share of the machine's memory."""
    if devices[0].platform == "cpu":
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // len(devices)
    return (devices[0].memory_stats() or {}).get("bytes_limit")


def check_microbatches(train: TrainKeys, mesh: Mesh) -> None:
    """Checks that every device's rows can be divided into the microbatches.

    Raises:
      InputError: if they can't; gives both numbers.
    """
    shards = partitioning.batch_shards(mesh.shape)
    where = f"on each of {shards} devices ({partitioning.describe_batch_axes(mesh.shape)})"
    if train.batch_size % (shards * train.microbatches):
        raise InputError(
            f"train.batch_size={train.batch_size} is not divisible by train.microbatches="
            f"{train.microbatches} {where}; change one of them"
        )
    every = _rows_of_depths(train)
    if train.batch_size % (shards * train.microbatches * every):
        raise InputError(
            f"train.batch_size={train.batch_size} is not divisible by {every} (train.depths_rows="
            f"{train.depths_rows}) in each of train.microbatches={train.microbatches} {where}; "
            "change one of them"
        )


def check_stages(config: Config, mesh: Mesh) -> None:
    """Checks that the stages of the mesh can share the solver steps and the rows of a batch.

    Raises:
      InputError: if they can't; gives both numbers.
    """
    model, train, stages = config.model, config.train, mesh.shape[STAGE]
    if stages == 1:
        return
    if mesh.shape["context"] > 1:
        raise InputError(
            f"mesh.stage={stages} and mesh.context={mesh.shape['context']}: a mesh splits the "
            "solver steps or the sequences, not both; set one of them to 1"
        )
    if is_reversible(model.scheme):
        raise InputError(
            f"model.scheme={model.scheme} carries two states, and mesh.stage={stages} hands on "
            "one; take a one-step scheme, or set mesh.stage=1"
        )
    for key, steps in (("model.num_steps", model.num_steps), *_depths(train)):
        if steps % stages:
            raise InputError(
                f"{key}={steps} is not divisible by mesh.stage={stages}, each of which takes "
                "equally many solver steps; change one of them"
            )
    name, _, every = model.remat.partition(":")
    if name == "every" and int(every) > model.num_steps // stages:
        raise InputError(
            f"model.remat={model.remat}: each of mesh.stage={stages} has "
            f"{model.num_steps // stages} of model.num_steps={model.num_steps}; give every:k with "
            "k of at most that, or another one"
        )
    microbatches = partitioning.pipeline_microbatches(model.pipeline_microbatches, mesh.shape)
    if microbatches % stages:
        raise InputError(
            f"model.pipeline_microbatches={microbatches} is not divisible by mesh.stage={stages}; "
            f"set it to a multiple, or to None for {stages}"
        )
    rows = partitioning.batch_shards(mesh.shape) * train.microbatches * _rows_of_depths(train)
    if train.batch_size % (rows * microbatches):
        raise InputError(
            f"train.batch_size={train.batch_size} is not divisible by {rows * microbatches}: "
            f"{microbatches} microbatches of {stages} stages (model.pipeline_microbatches) on each "
            f"of {partitioning.batch_shards(mesh.shape)} devices "
            f"({partitioning.describe_batch_axes(mesh.shape)}), times train.microbatches="
            f"{train.microbatches}{_times_rows(train)}; change one of them"
        )


def _rows_of_depths(train: TrainKeys) -> int:
    """The number by which `train.depths_rows` divides the rows."""
    return least_rows(train.depths_rows, train.depths_per_step) if train.depths else 1


def _times_rows(train: TrainKeys) -> str:
    every = _rows_of_depths(train)
    return "" if every == 1 else f", times {every} (train.depths_rows={train.depths_rows})"


def _depths(train: TrainKeys) -> list[tuple[str, int]]:
    return [("an entry of train.depths", steps) for steps in train.depths]
