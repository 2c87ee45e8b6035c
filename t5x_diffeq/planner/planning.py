"""A train step compiled but not run: its memory, its communication, its estimated time."""

import re
from dataclasses import dataclass, replace

import jax
from jax.stages import Compiled

from t5x_diffeq.config.config import Config
from t5x_diffeq.model.flops import StepFlops, step_flops
from t5x_diffeq.planner.collectives import Traffic, collectives, traffic
from t5x_diffeq.planner.estimate import Links, StepTimes, step_times
from t5x_diffeq.planner.program_cost import ProgramCost, program_cost
from t5x_diffeq.planner.topology import Topology
from t5x_diffeq.system.chips import GIB, Chip
from t5x_diffeq.training.partitioning import shard_bytes
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
    """Bytes on one device."""

    parameters: int  # the model's parameters
    moments: int  # the optimizer's state
    arguments: int | None  # the compiler's count of the state and the batch, including padding
    outputs: int | None  # new state and metrics, without outputs in the memory of an argument
    temporaries: int | None  # activations, gradients, gathered weights
    program: int | None  # the code
    available: float | None  # what a program can use; None if unknown
    needed: float  # the total

    @property
    def fits(self) -> bool | None:
        """Whether a device has enough memory; None if that is unknown."""
        return None if self.available is None else self.needed <= self.available


@dataclass(frozen=True)
class Plan:
    """The plan of a train step; fields that are known only if the program fits may be None."""

    setup: Setup
    batch_size: int  # sequences in the global batch
    topology: Topology
    memory: DeviceMemory
    flops: StepFlops  # on all devices together
    cost: ProgramCost | None = None  # of one device's program
    traffic: dict[str, Traffic] | None = None  # of collectives, per device
    # The part of `traffic` in groups that span several slices or GPU nodes. Collective-permutes
    # aren't in it, because the devices of their pairs aren't read.
    between_nodes: dict[str, Traffic] | None = None
    times: StepTimes | None = None  # None also where the compiler has no estimates, as for CPUs

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
    """The setup of a config on a topology.

    Raises:
      InputError: if the config is invalid there, or needs a package that isn't installed.
    """
    slices = topology.slices * topology.nodes
    with topology.as_target():
        return make_setup(config, vocab_size, topology.devices, slices)


def plan_step(setup: Setup, batch_size: int, topology: Topology) -> Plan:
    """Compiles the train step, and reads its memory, cost and traffic."""
    flops = step_flops(setup.model.config, batch_size)
    try:
        with setup.context(), topology.as_target():
            compiled = lower_train_step(setup, batch_size).compile()
    except jax.errors.JaxRuntimeError as error:
        return Plan(setup, batch_size, topology, read_refusal(setup, error), flops)
    text = compiled.as_text()
    assert text is not None  # XLA's programs have one
    cost, moved = program_cost(text), collectives(text)
    memory = _measure_memory(setup, compiled, topology.figures)
    plan = Plan(setup, batch_size, topology, memory, flops, cost, traffic(moved))
    if topology.figures is None:
        return plan
    per_node = len(topology.devices) // topology.nodes
    links = Links(list(setup.mesh.devices.flat), topology.figures, per_node)
    return replace(
        plan,
        between_nodes=traffic(each for each in moved if links.route(each).crossed > 1),
        times=step_times(links, moved, cost, flops, setup.mesh.size),
    )


def state_bytes(setup: Setup) -> tuple[int, int]:
    """Bytes of parameters and of the optimizer's state on each device."""
    state = setup.abstract_state
    return shard_bytes(state.params), shard_bytes(state.opt_state)


def _measure_memory(setup: Setup, compiled: Compiled, figures: Chip | None) -> DeviceMemory:
    analysis = compiled.memory_analysis()
    assert analysis is not None  # XLA's programs have one
    outputs = analysis.output_size_in_bytes - analysis.alias_size_in_bytes
    parts = (
        analysis.argument_size_in_bytes,
        outputs,
        analysis.temp_size_in_bytes,
        analysis.generated_code_size_in_bytes,
    )
    available = figures.memory_bytes if figures else None
    return DeviceMemory(*state_bytes(setup), *parts, available, sum(parts))


def read_refusal(setup: Setup, error: jax.errors.JaxRuntimeError) -> DeviceMemory:
    """The memory of a step that was too large to compile, from the compiler's error message.

    Raises:
      JaxRuntimeError: `error` itself, if it isn't about memory.
    """
    sizes = next(filter(None, (re.search(p, str(error)) for p in _OUT_OF_MEMORY)), None)
    if sizes is None:
        raise error
    needed, available = (float(sizes.group(n)) * _UNITS[sizes.group(n + 1)] for n in (1, 3))
    return DeviceMemory(*state_bytes(setup), None, None, None, None, available, needed)
