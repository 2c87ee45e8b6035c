"""How long a compiled step may take: a range, and what it assumes, in one place.

The low end adds what nothing can hide: the compiler's cycles for its own instructions, the fused
attention kernels at the peak of the matrix units, collectives during which nothing else runs over
every link that their devices span, and each of these collectives' latency. The high end takes
attention at half of the peak, hides no collective, and adds what hosts and stragglers cost. No TPU
has confirmed either.

Of GPUs the compiler says nothing here. The low end is then all FLOPs at the peak, or all
collectives over NVLink and the network, whichever takes longer; the high end both, one after the
other, with the FLOPs at two fifths of the peak, which is what well-tuned GPU training reaches.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from t5x_diffeq.planner.collectives import Collective
from t5x_diffeq.planner.links import Links
from t5x_diffeq.training.chips import Chip
from t5x_diffeq.training.flops import StepFlops

KERNELS_AT_WORST = 0.5  # of the peak, what fused attention reaches
GPU_AT_WORST = 0.4  # of the peak, what a whole step reaches
HOSTS_AND_STRAGGLERS = 0.1  # of the step
ASSUMED = (
    "step, low: the compiler's cycles; attention at the peak; synchronous collectives over all "
    "links that their devices span, with their latency; asynchronous ones hidden",
    f"step, high: attention at {KERNELS_AT_WORST:.0%} of the peak; no collective hidden; "
    f"{HOSTS_AND_STRAGGLERS:.0%} more for hosts and stragglers. No TPU has confirmed either",
)
ASSUMED_OF_GPUS = (
    "step, low: all FLOPs at the peak, or all collectives over NVLink (machines of 8; between them "
    "an adapter per GPU), whichever takes longer",
    f"step, high: FLOPs at {GPU_AT_WORST:.0%} of the peak, then the collectives, then "
    f"{HOSTS_AND_STRAGGLERS:.0%} for hosts and stragglers. No GPU has confirmed either",
    "temporaries are those of the CPU's compiler, which computes bfloat16 products in float32, so "
    "they are an upper bound; the attention kernel counts with what it reads, keeps and writes",
)


@dataclass(frozen=True)
class Times:
    """Seconds of a step.

    Attributes:
      compute: of the compiler's own instructions; of a GPU, all FLOPs at the peak.
      kernels: of fused attention kernels at the peak, for which the compiler has no estimate.
      waited: of collectives during which nothing else runs.
      overlapped: of collectives that run beside the rest.
      latency: until the first bytes of the collectives waited for have arrived, of all.
      low: the step, if all goes well.
      high: the step, if little does.
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
        """Halfway: what plans are ranked by."""
        return (self.low + self.high) / 2


def tpu_times(
    figures: Chip, links: Links, cycles: int, found: Sequence[Collective], kernel_flops: float
) -> Times:
    """The estimate for a TPU.

    Args:
      figures: of the chip.
      links: between the program's devices.
      cycles: that the compiler estimates, loops counted as often as they run.
      found: the program's collectives.
      kernel_flops: of fused attention kernels, of one device.
    """
    assert figures.clock is not None  # every TPU's is known
    compute, kernels = cycles / figures.clock, kernel_flops / figures.peak_flops
    routes = [(it, links.route(it)) for it in found]
    waited = sum(route.seconds(it) for it, route in routes if not it.asynchronous)
    overlapped = sum(route.seconds(it) for it, route in routes if it.asynchronous)
    latency = sum(route.latency(it) for it, route in routes if not it.asynchronous)
    low = max(compute + kernels, overlapped) + waited + latency
    high = compute + kernels / KERNELS_AT_WORST + waited + overlapped + latency
    parts = (compute, kernels, waited, overlapped, latency)
    return Times(*parts, low, high * (1 + HOSTS_AND_STRAGGLERS))


def gpu_times(
    figures: Chip, links: Links, found: Sequence[Collective], flops: StepFlops, devices: int
) -> Times:
    """The estimate for a GPU; arguments as above, FLOPs of all devices."""
    compute = flops.total / devices / figures.peak_flops
    moved = sum(links.route(it).seconds(it) for it in found)
    high = compute / GPU_AT_WORST + moved
    return Times(compute, 0, 0, moved, 0, max(compute, moved), high * (1 + HOSTS_AND_STRAGGLERS))
