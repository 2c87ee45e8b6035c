"""Estimates how long a compiled step may take, as a range, with all assumptions in one module.

`ASSUMED` and its like say what the two ends are, and are printed beside every estimate.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from t5x_diffeq.planner.collectives import Collective
from t5x_diffeq.planner.flops import StepFlops
from t5x_diffeq.planner.links import Links
from t5x_diffeq.planner.program_cost import ProgramCost

_KERNELS_AT_WORST = 0.5  # of the peak, what fused attention reaches
_GPU_AT_WORST = 1.3  # times the seconds of FLOPs and bytes at their peaks
_HOSTS_AND_STRAGGLERS = 0.1  # of the step
ASSUMED = (
    "step, low: the compiler's cycles, and the memory's bandwidth where it has none; attention at "
    "peak FLOP/s; synchronous collectives over all links that their devices span, with their "
    "latency; asynchronous ones hidden",
    f"step, high: attention at {_KERNELS_AT_WORST:.0%} of the peak; no collective hidden; "
    f"{_HOSTS_AND_STRAGGLERS:.0%} more for hosts and stragglers. No TPU has confirmed either",
)
ASSUMED_OF_GPUS = (
    "step, low: all FLOPs at the peak plus all bytes at the memory's bandwidth, as if no kernel "
    "computed while it reads or writes; or the collectives beside them, if they take longer; then "
    "the collectives that are waited for (NVLink in a node; between nodes an adapter per GPU)",
    f"step, high: {_GPU_AT_WORST} times the FLOPs and bytes, then all collectives, then "
    f"{_HOSTS_AND_STRAGGLERS:.0%} for hosts and stragglers. The compiler gives no times; one "
    "H100 took 1.17 to 1.20 of the low end (docs/lab/h100.md)",
)


@dataclass(frozen=True)
class StepTimes:
    """Seconds of an optimizer step.

    Attributes:
      compute: the compiler's own instructions; on a GPU, all FLOPs at the peak and all bytes to and
        from memory.
      kernels: fused attention kernels at the peak, for which the compiler has no estimate.
      waited: synchronous collectives, during which nothing else runs.
      overlapped: asynchronous collectives, which overlap with the rest.
      latency: total latency of the synchronous collectives, until their first bytes arrive.
      low: the whole step, in the best case.
      high: the whole step, in the worst case.
    """

    compute: float
    kernels: float
    waited: float
    overlapped: float
    latency: float
    low: float
    high: float

    @property
    def middle(self) -> float:
        """The middle of the range, by which plans are ranked."""
        return (self.low + self.high) / 2


def step_times(
    links: Links,
    moved: Sequence[Collective],
    cost: ProgramCost,
    flops: StepFlops,
    devices: int,
) -> StepTimes:
    """The estimate for a TPU, whose compiler gives cycles, or a GPU.

    Args:
      links: the links between the program's devices.
      moved: the program's collectives.
      cost: the cost of one device's program.
      flops: FLOPs of the step on all devices.
      devices: how many there are.
    """
    figures = links.figures
    routes = [(it, links.route(it)) for it in moved]
    waited = sum(route.seconds(it) for it, route in routes if not it.asynchronous)
    overlapped = sum(route.seconds(it) for it, route in routes if it.asynchronous)
    if figures.clock:
        latency = sum(route.latency(it) for it, route in routes if not it.asynchronous)
        compute = (cost.cycles or 0) / figures.clock
        compute += cost.unestimated_bytes / figures.memory_bandwidth
        kernels = flops.attention_kernels / devices / figures.peak_flops
        at_best, at_worst = compute + kernels, compute + kernels / _KERNELS_AT_WORST
    else:
        at_peak = flops.total / devices / figures.peak_flops
        memory = cost.memory_bytes / figures.memory_bandwidth
        latency = kernels = 0.0
        compute = at_best = at_peak + memory
        at_worst = _GPU_AT_WORST * compute
    low = max(at_best, overlapped) + waited + latency
    high = (at_worst + overlapped + waited + latency) * (1 + _HOSTS_AND_STRAGGLERS)
    return StepTimes(compute, kernels, waited, overlapped, latency, low, high)
