"""Estimates how long a compiled step may take, as a range, with all assumptions in one module.

`ASSUMED` and its like say what the two ends are, and are printed beside every estimate.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from t5x_diffeq.model.flops import StepFlops
from t5x_diffeq.planner.collectives import Collective
from t5x_diffeq.planner.kernels import Kernel
from t5x_diffeq.planner.links import Links
from t5x_diffeq.planner.program_cost import ProgramCost
from t5x_diffeq.system.chips import Chip

_KERNELS_AT_WORST = 0.5  # of the peak, what fused attention reaches
_HOSTS_AND_STRAGGLERS = 0.1  # of the step
ASSUMED = (
    "step, low: the compiler's cycles, and the memory's bandwidth where it has none; attention at "
    "peak FLOP/s; synchronous collectives over all links that their devices span, with their "
    "latency; asynchronous ones hidden",
    f"step, high: attention at {_KERNELS_AT_WORST:.0%} of the peak; no collective hidden; "
    f"{_HOSTS_AND_STRAGGLERS:.0%} more for hosts and stragglers. No TPU has confirmed either",
)

# What an H100 sustained (docs/lab/h100.md), as parts of its peaks; other GPUs are taken to do so.
_PRODUCTS_REACH = 0.73
_FP8_PRODUCTS_REACH = 0.66  # of twice the peak
_MEMORY_REACHES = 0.9
_LAUNCH = 3e-6  # seconds between kernels
_GPU_AT_WORST = 1.2
ASSUMED_OF_GPUS = (
    "step, low: for each kernel the longest of its products, its bytes and its operations on "
    f"elements, at what an H100 sustained ({_PRODUCTS_REACH:.0%} of the peak of products, "
    f"{_MEMORY_REACHES:.0%} of the memory's bandwidth), and {1e6 * _LAUNCH:.0f} microseconds; or "
    "the collectives beside them, if they take longer; then the collectives that are waited for "
    "(NVLink in a node; between nodes an adapter per GPU)",
    f"step, high: {_GPU_AT_WORST} times the kernels, then all collectives, then "
    f"{_HOSTS_AND_STRAGGLERS:.0%} for hosts and stragglers. Steps of one H100 took 1.02 to 1.03 "
    "of the low end (docs/lab/h100.md)",
)


@dataclass(frozen=True)
class StepTimes:
    """Seconds of an optimizer step.

    Attributes:
      compute: the compiler's own instructions; on a GPU, all kernels but attention's.
      kernels: fused attention kernels, for which the compiler has no estimate.
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
    attention = flops.attention_kernels / devices / figures.peak_flops
    latency = 0.0
    if figures.clock:
        latency = sum(route.latency(it) for it, route in routes if not it.asynchronous)
        compute = (cost.cycles or 0) / figures.clock
        compute += cost.unestimated_bytes / figures.memory_bandwidth
        at_best, at_worst = compute + attention, compute + attention / _KERNELS_AT_WORST
    else:
        compute = sum(it.times * _kernel_seconds(it, figures) for it in cost.kernels)
        attention /= _attention_reaches(flops.head_width)
        at_best, at_worst = compute + attention, _GPU_AT_WORST * (compute + attention)
    low = max(at_best, overlapped) + waited + latency
    high = (at_worst + overlapped + waited + latency) * (1 + _HOSTS_AND_STRAGGLERS)
    return StepTimes(compute, attention, waited, overlapped, latency, low, high)


def _kernel_seconds(kernel: Kernel, figures: Chip) -> float:
    """What one run of a GPU's kernel takes: its products, bytes and the rest overlap."""
    # Operands of half the width are multiplied at twice the rate, of twice the width at half of it.
    rate = figures.peak_flops * 16 / (kernel.operand_bits or 16)
    reached = _FP8_PRODUCTS_REACH if kernel.operand_bits == 8 else _PRODUCTS_REACH
    products = kernel.product_flops / (reached * rate)
    memory = kernel.memory_bytes / (_MEMORY_REACHES * figures.memory_bandwidth)
    elements = kernel.lane_operations / figures.integer_operations
    return max(products, memory, elements) + _LAUNCH


def _attention_reaches(head_width: int) -> float:
    """Of the peak, forward and backward: cuDNN's kernels compute a softmax beside the products.

    On an H100 0.23 with heads of 64 and 0.36 with heads of 128; between them by the width.
    """
    return 0.10 + 0.13 * min(head_width, 128) / 64
