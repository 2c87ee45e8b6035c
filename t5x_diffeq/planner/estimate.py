"""Estimates how long a compiled step may take, as a range, with all assumptions in one module.

The low end adds what can't be hidden: the compiler's cycles for its own instructions, the fused
attention kernels at the peak of the matrix units, synchronous collectives over every link that
their devices span, and the latency of each of these collectives. The high end takes attention at
half of the peak, hides no collective, and adds the cost of hosts and stragglers. Neither has been
confirmed on a TPU.

The GPU's compiler gives no times. The low end is then all FLOPs at the peak, or all bytes to and
from memory, or all collectives that run beside other work, whichever takes longest, and the
collectives that are waited for. At the high end the FLOPs are at two fifths of the peak, which is
what well-tuned GPU training reaches (or at the peak, and then all bytes, if that takes longer), and
no collective is hidden. Where virtual CPU devices stand in for GPUs, there are no bytes, and no
collective is known to be waited for.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from t5x_diffeq.planner.collectives import Collective
from t5x_diffeq.planner.links import Links
from t5x_diffeq.runtime.chips import Chip

_KERNELS_AT_WORST = 0.5  # of the peak, what fused attention reaches
_GPU_AT_WORST = 0.4  # of the peak, what a whole step reaches
_HOSTS_AND_STRAGGLERS = 0.1  # of the step
ASSUMED = (
    "step, low: the compiler's cycles; attention at the peak; synchronous collectives over all "
    "links that their devices span, with their latency; asynchronous ones hidden",
    f"step, high: attention at {_KERNELS_AT_WORST:.0%} of the peak; no collective hidden; "
    f"{_HOSTS_AND_STRAGGLERS:.0%} more for hosts and stragglers. No TPU has confirmed either",
)
ASSUMED_OF_HOSTS = (
    "host's memory: copies to the device and back take the link's full bandwidth, one after the "
    "other and beside nothing else, since layers are updated in turn once there is the gradient",
)
ASSUMED_OF_GPUS = (
    "step, low: all FLOPs at the peak, or all bytes to and from memory, or the collectives beside "
    "other work, whichever takes longest; then the collectives that are waited for (NVLink in a "
    "node; between nodes an adapter per GPU)",
    f"step, high: FLOPs at {_GPU_AT_WORST:.0%} of the peak, then all collectives, then "
    f"{_HOSTS_AND_STRAGGLERS:.0%} for hosts and stragglers. The compiler gives no times, and no "
    "GPU has confirmed either",
)
ASSUMED_OF_STAND_INS = (
    "temporaries are those of the CPU's compiler, which computes bfloat16 products in float32, so "
    "they are an upper bound; the attention kernel counts with what it reads, keeps and writes",
)


@dataclass(frozen=True)
class StepTimes:
    """Seconds of an optimizer step.

    Attributes:
      compute: the compiler's own instructions; on a GPU, all FLOPs at the peak, or all bytes to and
        from memory if they take longer.
      kernels: fused attention kernels at the peak, for which the compiler has no estimate.
      waited: synchronous collectives, during which nothing else runs.
      overlapped: asynchronous collectives, which overlap with the rest.
      latency: total latency of the synchronous collectives, until their first bytes arrive.
      crossing: copies of what lies in the host's memory, to the device and back; 0 also if the
        link's bandwidth is unknown.
      low: the whole step, in the best case.
      high: the whole step, in the worst case.
    """

    compute: float
    kernels: float
    waited: float
    overlapped: float
    latency: float
    crossing: float
    low: float
    high: float

    @property
    def middle(self) -> float:
        """The middle of the range, by which plans are ranked."""
        return (self.low + self.high) / 2


def tpu_times(
    figures: Chip,
    links: Links,
    cycles: int,
    found: Sequence[Collective],
    kernel_flops: float,
    offloaded: int,
) -> StepTimes:
    """The estimate for a TPU.

    Args:
      figures: the chip's specifications.
      links: the links between the program's devices.
      cycles: the compiler's estimate, with loops counted as often as they run.
      found: the program's collectives.
      kernel_flops: FLOPs of fused attention kernels on one device.
      offloaded: bytes of the state in the host's memory.
    """
    assert figures.clock is not None  # known for every TPU
    compute, kernels = cycles / figures.clock, kernel_flops / figures.peak_flops
    routes = [(it, links.route(it)) for it in found]
    waited = sum(route.seconds(it) for it, route in routes if not it.asynchronous)
    overlapped = sum(route.seconds(it) for it, route in routes if it.asynchronous)
    latency = sum(route.latency(it) for it, route in routes if not it.asynchronous)
    crossing = _crossing(figures, offloaded)
    low = max(compute + kernels, overlapped) + waited + latency + crossing
    high = compute + kernels / _KERNELS_AT_WORST + waited + overlapped + latency + crossing
    parts = (compute, kernels, waited, overlapped, latency, crossing)
    return StepTimes(*parts, low, high * (1 + _HOSTS_AND_STRAGGLERS))


def gpu_times(
    figures: Chip,
    links: Links,
    found: Sequence[Collective],
    flops: float,
    memory_bytes: int,
    offloaded: int,
) -> StepTimes:
    """The estimate for a GPU.

    Args:
      figures: the GPU's specifications.
      links: the links between the program's devices.
      found: the program's collectives.
      flops: all FLOPs of one device.
      memory_bytes: bytes that the program reads from and writes to memory; 0 if unknown.
      offloaded: bytes of the state in the host's memory.
    """
    at_peak, memory = flops / figures.peak_flops, memory_bytes / figures.memory_bandwidth
    seconds = [(it.asynchronous, links.route(it).seconds(it)) for it in found]
    overlapped = sum(each for beside, each in seconds if beside)
    waited = sum(each for beside, each in seconds if not beside)
    crossing = _crossing(figures, offloaded)
    compute = max(at_peak, memory)
    low = max(compute, overlapped) + waited + crossing
    high = max(at_peak / _GPU_AT_WORST, at_peak + memory) + overlapped + waited + crossing
    parts = (compute, 0.0, waited, overlapped, 0.0, crossing)
    return StepTimes(*parts, low, high * (1 + _HOSTS_AND_STRAGGLERS))


def _crossing(figures: Chip, offloaded: int) -> float:
    """Seconds for so many bytes to the device and back, one after the other."""
    return 2 * offloaded / figures.host_bandwidth if figures.host_bandwidth else 0.0
