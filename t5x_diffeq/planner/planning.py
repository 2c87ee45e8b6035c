"""A train step compiled but not run: whether it fits, what it moves, how long it may take."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod

import jax
from jax.stages import Compiled

from t5x_diffeq.layers.attention_kernels import STAND_IN, choose
from t5x_diffeq.models.language_model import LanguageModel
from t5x_diffeq.planner.collectives import Collective, Traffic, collectives, traffic
from t5x_diffeq.planner.estimate import StepTimes, gpu_times, tpu_times
from t5x_diffeq.planner.links import Links
from t5x_diffeq.planner.program_cost import ProgramCost, program_cost
from t5x_diffeq.planner.topology import Topology
from t5x_diffeq.runtime.config import Config
from t5x_diffeq.training.chips import GIB, Chip
from t5x_diffeq.training.flops import StepFlops, step_flops
from t5x_diffeq.training.host_memory import is_on_host
from t5x_diffeq.training.setup import Setup, make_setup
from t5x_diffeq.training.step import lower_train_step

# The TPU compiler's message for a program that doesn't fit: memory needed, and available.
_OUT_OF_MEMORY = (
    r"\(([\d.]+)([KMG])\) exceeds available HBM \(([\d.]+)([KMG])\)",
    r"[Uu]sed ([\d.]+)([KMG]) of ([\d.]+)([KMG]) hbm",
)
_UNITS = {"K": 2**10, "M": 2**20, "G": GIB}


@dataclass(frozen=True)
class DeviceMemory:
    """Bytes on one device.

    Attributes:
      parameters: the model's parameters.
      moments: the optimizer's state, without what lies in the host's memory.
      offloaded: the part of the state in the host's memory, which is not in `needed`.
      arguments: the compiler's count of the state and the batch, including padding.
      outputs: new state and metrics, except those that reuse the memory of an argument.
      temporaries: activations, gradients, gathered weights.
      program: the code.
      available: what a program can use; None if unknown.
      needed: the total.
    """

    parameters: int
    moments: int
    offloaded: int
    arguments: int | None
    outputs: int | None
    temporaries: int | None
    program: int | None
    available: float | None
    needed: float

    @property
    def fits(self) -> bool | None:
        """Whether a device has enough memory; None if that is unknown."""
        return None if self.available is None else self.needed <= self.available


@dataclass(frozen=True)
class Plan:
    """What is known about a train step; None for what is known only if the program fits.

    Attributes:
      setup: the setup that was compiled.
      batch_size: sequences in the global batch.
      topology: the topology that it was compiled for.
      memory: the memory of one device.
      flops: the step's FLOPs, on all devices together.
      cost: the cost of one device's program.
      traffic: the traffic of collectives, per device.
      times: the estimated times; None also where the compiler has no estimates, as for CPUs.
    """

    setup: Setup
    batch_size: int
    topology: Topology
    memory: DeviceMemory
    flops: StepFlops
    cost: ProgramCost | None = None
    traffic: dict[str, Traffic] | None = None
    times: StepTimes | None = None

    @property
    def tokens_per_second(self) -> tuple[float, float] | None:
        """Estimated tokens per second of all devices together, worst and best case."""
        tokens, t = self.batch_size * self.setup.model.config.max_length, self.times
        return None if t is None else (tokens / t.high, tokens / t.low)

    @property
    def mfu(self) -> tuple[float, float] | None:
        """Model FLOPs utilisation (of 1) implied by the estimate, worst and best case."""
        figures = self.topology.figures
        if self.times is None or figures is None:
            return None
        ideal = self.flops.model / self.setup.mesh.size / figures.peak_flops
        return ideal / self.times.high, ideal / self.times.low


def plan_setup(config: Config, vocab_size: int, topology: Topology) -> Setup:
    """The setup of a config on a topology; for GPUs with a stand-in for their kernels."""
    setup = make_setup(config, vocab_size, topology.devices)
    own = setup.model.config
    shapes = (own.dtype, own.head_width, own.max_length)
    shards = setup.mesh.shape["context"]
    if not topology.gpus or choose("gpu", *shapes, shards=shards)[0] == "xla":
        return setup
    return replace(setup, model=LanguageModel(replace(own, attention=STAND_IN)))


def plan_step(setup: Setup, batch_size: int, topology: Topology) -> Plan:
    """Compiles the train step and reads what the compiler and the program tell about it."""
    flops = step_flops(setup.model.config, batch_size)
    try:
        with setup.context():
            compiled = lower_train_step(setup, batch_size).compile()
    except jax.errors.JaxRuntimeError as error:
        return Plan(setup, batch_size, topology, read_refusal(setup, error), flops)
    text = compiled.as_text()
    assert text is not None  # XLA's programs have one
    cost, found = program_cost(text), collectives(text)
    return Plan(
        setup,
        batch_size,
        topology,
        _measure_memory(setup, compiled, topology.figures),
        flops,
        cost,
        traffic(found),
        _estimate_times(setup, topology, cost, found, flops),
    )


def _bytes_per_device(arrays: object) -> int:
    return sum(
        prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in jax.tree.leaves(arrays)
    )


def state_bytes(setup: Setup) -> tuple[int, int, int]:
    """Bytes of parameters, of the optimizer's state, and of what lies in the host's memory.

    All are those of each device.
    """
    state = setup.abstract_state
    arrays = jax.tree.leaves(state)
    offloaded = _bytes_per_device([x for x in arrays if is_on_host(x)])
    moments = _bytes_per_device([x for x in jax.tree.leaves(state.opt_state) if not is_on_host(x)])
    return _bytes_per_device(state.params), moments, offloaded


def _measure_memory(setup: Setup, compiled: Compiled, figures: Chip | None) -> DeviceMemory:
    analysis = compiled.memory_analysis()
    assert analysis is not None  # XLA's programs have one
    outputs = analysis.output_size_in_bytes - analysis.alias_size_in_bytes
    sizes = state_bytes(setup)
    # Programs for CPUs count all memory as the device's.
    on_host = sizes[-1] if setup.mesh.devices.flat[0].platform == "cpu" else 0
    parts = (
        analysis.argument_size_in_bytes - on_host,
        outputs,
        analysis.temp_size_in_bytes,
        analysis.generated_code_size_in_bytes,
    )
    available = figures.memory_bytes if figures else None
    return DeviceMemory(*sizes, *parts, available, sum(parts))


def read_refusal(setup: Setup, error: jax.errors.JaxRuntimeError) -> DeviceMemory:
    """The memory of a step that the compiler refused, from its error message.

    Raises:
      JaxRuntimeError: `error` itself, if it isn't about memory.
    """
    found = next(filter(None, (re.search(p, str(error)) for p in _OUT_OF_MEMORY)), None)
    if found is None:
        raise error
    needed, available = (float(found.group(n)) * _UNITS[found.group(n + 1)] for n in (1, 3))
    return DeviceMemory(*state_bytes(setup), None, None, None, None, available, needed)


def _estimate_times(
    setup: Setup,
    topology: Topology,
    cost: ProgramCost,
    found: Sequence[Collective],
    flops: StepFlops,
) -> StepTimes | None:
    figures, devices = topology.figures, setup.mesh.devices
    if figures is None:
        return None
    links = Links(list(devices.flat), figures)
    # Stages also compute while they wait for a microbatch, so their devices count for less.
    at_work = devices.size / setup.pipeline_slowdown
    offloaded = state_bytes(setup)[-1]
    if topology.gpus:
        return gpu_times(figures, links, found, flops.total / at_work, offloaded)
    fused = setup.model.config.attention != "xla"
    kernels = flops.attention_kernels / at_work if fused else 0
    assert cost.cycles is not None  # the TPU compiler gives them
    return tpu_times(figures, links, cost.cycles, found, kernels, offloaded)
