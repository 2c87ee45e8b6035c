"""A training step compiled but not run: whether it fits, what it moves, how long it may take."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import jax
from jax.stages import Compiled

from t5x_diffeq.training.chips import GIB, Chip, chip
from t5x_diffeq.training.collectives import Collective, Traffic, collectives, traffic
from t5x_diffeq.training.flops import StepFlops, mfu, step_flops
from t5x_diffeq.training.program_cost import ProgramCost, program_cost
from t5x_diffeq.training.setup import Setup
from t5x_diffeq.training.step import compile_train_step

# How the TPU's compiler says that a program doesn't fit: what is needed, and what there is.
OUT_OF_MEMORY = (
    r"\(([\d.]+)([KMG])\) exceeds available HBM \(([\d.]+)([KMG])\)",
    r"[Uu]sed ([\d.]+)([KMG]) of ([\d.]+)([KMG]) hbm",
)
UNITS = {"K": 2**10, "M": 2**20, "G": GIB}


@dataclass(frozen=True)
class Memory:
    """Bytes of one device.

    Attributes:
      parameters: of the model.
      moments: of the optimizer's state.
      arguments: the compiler's count of the state and the batch, padding included.
      outputs: new state and metrics, without what takes the place of an argument.
      temporaries: activations, gradients, gathered weights.
      program: the code.
      available: what a program can have; None if it isn't known.
      needed: in all.
    """

    parameters: int
    moments: int
    arguments: int | None
    outputs: int | None
    temporaries: int | None
    program: int | None
    available: float | None
    needed: float

    @property
    def fits(self) -> bool | None:
        """Whether a device has as much; None if that isn't known."""
        return None if self.available is None else self.needed <= self.available


@dataclass(frozen=True)
class Times:
    """Seconds of a step, estimated.

    Attributes:
      compute: the compiler's estimates for its own instructions, loops counted as they run.
      kernels: fused attention kernels, for which it has none: their FLOPs at the peak.
      waited: collectives during which nothing else runs, over all links at once.
      overlapped: collectives that run beside the rest.
    """

    compute: float
    kernels: float
    waited: float
    overlapped: float

    @property
    def step(self) -> float:
        """The whole step."""
        return max(self.compute + self.kernels, self.overlapped) + self.waited


@dataclass(frozen=True)
class Plan:
    """What is known of a training step; None for what only a program that fits can tell.

    Attributes:
      setup: what was compiled.
      batch_size: global sequences.
      memory: of one device.
      flops: of the step, all devices together.
      cost: of one device's program.
      traffic: of collectives, per device.
      times: None also where the compiler estimates none, as for CPUs.
      optimal_seconds: XLA's own `optimal_seconds`, in which every loop runs once.
    """

    setup: Setup
    batch_size: int
    memory: Memory
    flops: StepFlops
    cost: ProgramCost | None = None
    traffic: dict[str, Traffic] | None = None
    times: Times | None = None
    optimal_seconds: float | None = None

    @property
    def tokens_per_second(self) -> float | None:
        """By the estimate, of all devices together."""
        tokens = self.batch_size * self.setup.model.config.max_length
        return tokens / self.times.step if self.times else None

    @property
    def mfu(self) -> float | None:
        """Model FLOPs utilisation that the estimate implies, of 1."""
        if self.times is None:
            return None
        devices = self.setup.mesh.devices
        kind = devices.flat[0].device_kind
        return mfu(self.flops.model, self.times.step, devices.size, kind)


def plan_step(setup: Setup, batch_size: int) -> Plan:
    """Compiles the train step and reads what the compiler and its program say."""
    flops = step_flops(setup.model.config, batch_size)
    try:
        with setup.context():  # not cached: a sweep compiles many, each once
            compiled = compile_train_step.__wrapped__(setup, batch_size)
    except jax.errors.JaxRuntimeError as error:
        return Plan(setup, batch_size, refused(setup, error), flops)
    text = compiled.as_text()
    cost, found = program_cost(text), collectives(text)
    return Plan(
        setup,
        batch_size,
        measured(setup, compiled),
        flops,
        cost,
        traffic(found),
        times(setup, cost, found, flops),
        (compiled.cost_analysis() or {}).get("optimal_seconds"),
    )


def device_chip(setup: Setup) -> Chip | None:
    """Figures of the setup's devices, if known."""
    return chip(setup.mesh.devices.flat[0].device_kind)


def bytes_per_device(arrays: object) -> int:
    """Bytes of a tree of sharded shapes on each device."""
    return sum(
        prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in jax.tree.leaves(arrays)
    )


def state_bytes(setup: Setup) -> tuple[int, int]:
    """Bytes of parameters and of the optimizer's state on each device."""
    state = setup.abstract_state
    return bytes_per_device(state.params), bytes_per_device(state.opt_state)


def measured(setup: Setup, compiled: Compiled) -> Memory:
    """The memory of a compiled step."""
    figures, analysis = device_chip(setup), compiled.memory_analysis()
    outputs = analysis.output_size_in_bytes - analysis.alias_size_in_bytes
    parts = (
        analysis.argument_size_in_bytes,
        outputs,
        analysis.temp_size_in_bytes,
        analysis.generated_code_size_in_bytes,
    )
    available = figures.memory_bytes if figures else None
    return Memory(*state_bytes(setup), *parts, available, sum(parts))


def refused(setup: Setup, error: jax.errors.JaxRuntimeError) -> Memory:
    """The memory of a step that the compiler refused, from what it says.

    Raises:
      JaxRuntimeError: the same, if it isn't about memory.
    """
    found = next(filter(None, (re.search(p, str(error)) for p in OUT_OF_MEMORY)), None)
    if found is None:
        raise error
    needed, available = (float(found.group(n)) * UNITS[found.group(n + 1)] for n in (1, 3))
    return Memory(*state_bytes(setup), None, None, None, None, available, needed)


def times(
    setup: Setup, cost: ProgramCost, found: Sequence[Collective], flops: StepFlops
) -> Times | None:
    """The estimate, where the compiler makes one."""
    figures = device_chip(setup)
    if figures is None or figures.clock is None or cost.cycles is None:
        return None
    fused = setup.model.config.attention != "xla"
    kernels = flops.attention_kernels / setup.mesh.size if fused else 0
    waited = [c for c in found if not c.asynchronous]
    overlapped = [c for c in found if c.asynchronous]
    return Times(
        cost.cycles / figures.clock,
        kernels / figures.peak_flops,
        *(
            sum(link_seconds(c, figures, setup.mesh.size) for c in part)
            for part in (waited, overlapped)
        ),
    )


def link_seconds(it: Collective, figures: Chip, num_devices: int) -> float:
    """Seconds that a collective takes on rings over all links, however often it runs.

    A permute to a neighbour has one link.
    """
    if it.kind == "collective-permute":
        return it.bytes * figures.links / figures.link_bandwidth
    devices = it.devices or num_devices
    sent = it.bytes * (devices - 1) / devices * (2 if it.kind == "all-reduce" else 1)
    return sent / figures.link_bandwidth
