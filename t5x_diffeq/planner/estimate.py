"""Estimates how long a compiled step may take, as a range, with all assumptions in one module.

`ASSUMED` and `ASSUMED_OF_GPUS` say what the low and the high end assume, and are printed beside
every estimate. Collectives travel over the links of a TPU slice's torus, between slices, or between
GPUs.

A device has two links along each dimension of its torus. A group of devices that spans some of the
dimensions can use only these dimensions' links: all of them where the dimension closes to a ring,
half of them where it is an open line, whose ends have one neighbour. Devices that are not
neighbours share the links between them with other groups.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from t5x_diffeq.model.flops import StepFlops
from t5x_diffeq.planner.collectives import BETWEEN_SLICES, Collective
from t5x_diffeq.planner.program_cost import GpuKernel, ProgramCost
from t5x_diffeq.planner.topology import rings
from t5x_diffeq.system.chips import Chip

_TWICE = ("all-reduce", BETWEEN_SLICES)  # sums are reduce-scattered, then gathered
_HOP_SECONDS = 1e-6  # from a TPU to its neighbour
_NETWORK_SECONDS = 2e-5  # from one slice or node to another


@dataclass(frozen=True)
class Route:
    """How a group's data travels."""

    size: int  # number of devices in the group
    bandwidth: float  # bytes/s that a device sends to others in its slice or node
    hops: int  # number of hops between neighbours, once around the ring or along the line
    crossed: int  # number of slices or nodes that the group spans
    network: float  # bytes/s that a device sends to other slices or nodes

    def seconds(self, collective: Collective) -> float:
        """Seconds of all executions of a collective, at full bandwidth and without latency."""
        rounds = 2 if collective.kind in _TWICE else 1
        near = self.size // self.crossed
        within = rounds * collective.bytes * (near - 1) / near / self.bandwidth
        # Each device exchanges its own part of its slice's data with the other slices.
        between = (
            rounds * collective.bytes / near * (self.crossed - 1) / self.crossed / self.network
        )
        return within + between

    def latency(self, collective: Collective) -> float:
        """Seconds until the first bytes have travelled all the way, for all executions."""
        rounds = 2 if collective.kind in _TWICE else 1
        network = _NETWORK_SECONDS if self.crossed > 1 else 0
        return collective.executions * rounds * (self.hops * _HOP_SECONDS + network)


class Links:
    """The links between the devices of a mesh, which are given in the program's order."""

    def __init__(self, devices: Sequence[Any], figures: Chip, per_node: int = 8):
        self.figures = figures
        self.coordinates = [_coordinates_of(device, per_node) for device in devices]
        first_slice = [
            coords for part, coords in self.coordinates if part == self.coordinates[0][0]
        ]
        self.extents = tuple(len(set(column)) for column in zip(*first_slice, strict=True))
        self.rings = rings(self.extents)

    def route(self, collective: Collective) -> Route:
        """The route of a collective's first group; the routes of its other groups are alike."""
        network = self.figures.network_bandwidth
        per_link = self.figures.link_bandwidth / self.figures.links
        if collective.kind == BETWEEN_SLICES:
            slices = len({part for part, _ in self.coordinates})
            return Route(slices, self.figures.link_bandwidth, 0, slices, network)
        if collective.kind == "collective-permute":
            return Route(2**30, per_link, 1, 1, 1)
        group = range(len(self.coordinates)) if collective.group is None else collective.group
        coordinates = [self.coordinates[number] for number in group]
        crossed = len({part for part, _ in coordinates})
        near = [coords for part, coords in coordinates if part == coordinates[0][0]]
        links, hops = self.links(near)
        return Route(len(coordinates), links * per_link, hops, crossed, network)

    def links(self, near: Sequence[tuple[int, ...]]) -> tuple[float, int]:
        """A device's links to its group, at these coordinates of a slice, and the group's hops."""
        if self.figures.links == 1:
            return 1, 1
        spans = [sorted(set(column)) for column in zip(*near, strict=True)]
        if prod(map(len, spans)) != len(set(near)) or len(near) == 1:
            return 1, max(len(near) - 1, 0)
        parts = zip(spans, self.extents, self.rings, strict=True)
        each = [_links_along(span, extent, ring) for span, extent, ring in parts if len(span) > 1]
        return sum(links for links, _ in each), sum(hops for _, hops in each)


def _links_along(span: Sequence[int], extent: int, ring: bool) -> tuple[float, int]:
    """A device's links along one dimension, for a group at these coordinates; and hops."""
    if len(span) == extent:
        return (2, extent // 2) if ring else (1, extent - 1)
    stride = (span[-1] - span[0]) // (len(span) - 1)
    return 1 / stride, span[-1] - span[0]


def _coordinates_of(device: Any, per_node: int) -> tuple[int, tuple[int, ...]]:
    """The slice or node of a device, and the coordinates of the device in it."""
    if device.platform != "tpu":  # a GPU, or a virtual device
        return device.id // per_node, (device.id % per_node,)
    return getattr(device, "slice_index", None) or 0, tuple(device.coords)


_KERNELS_AT_WORST = 0.5  # the part of the peak that fused attention reaches
_HOSTS_AND_STRAGGLERS = 0.1  # of the step
ASSUMED = (
    "step, low: the compiler's cycles, and the memory's bandwidth where it has none; attention at "
    "peak FLOP/s; synchronous collectives over all links that their devices span, with their "
    "latency; asynchronous ones hidden",
    f"step, high: attention at {_KERNELS_AT_WORST:.0%} of the peak; no collective hidden; "
    f"{_HOSTS_AND_STRAGGLERS:.0%} more for hosts and stragglers. No TPU has confirmed either",
)

# The parts of its peaks that an H100 sustained (docs/lab/h100.md). Other GPUs are assumed to
# sustain the same parts of theirs.
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
    """Seconds of an optimizer step."""

    compute: float  # the compiler's own instructions; on a GPU, all kernels but attention's
    kernels: float  # fused attention kernels, for which the compiler has no estimate
    waited: float  # synchronous collectives, during which nothing else runs
    overlapped: float  # asynchronous collectives, which overlap with the rest
    latency: float  # total latency of the synchronous collectives, until their first bytes arrive
    low: float  # the whole step, in the best case
    high: float  # the whole step, in the worst case

    @property
    def middle(self) -> float:
        """The middle of the range, by which plans are ranked."""
        return (self.low + self.high) / 2


def step_times(
    links: Links, moved: Sequence[Collective], cost: ProgramCost, flops: StepFlops, devices: int
) -> StepTimes:
    """The estimate for a TPU, whose compiler gives cycles, or a GPU."""
    figures = links.figures
    routes = [(each, links.route(each)) for each in moved]
    waited = sum(route.seconds(each) for each, route in routes if not each.asynchronous)
    overlapped = sum(route.seconds(each) for each, route in routes if each.asynchronous)
    attention = flops.attention_kernels / devices / figures.peak_flops
    latency = 0.0
    if figures.clock:
        latency = sum(route.latency(each) for each, route in routes if not each.asynchronous)
        compute = (cost.cycles or 0) / figures.clock
        compute += cost.unestimated_bytes / figures.memory_bandwidth
        at_best, at_worst = compute + attention, compute + attention / _KERNELS_AT_WORST
    else:
        compute = sum(kernel.times * _kernel_seconds(kernel, figures) for kernel in cost.kernels)
        attention /= _attention_reaches(flops.head_width)
        at_best, at_worst = compute + attention, _GPU_AT_WORST * (compute + attention)
    low = max(at_best, overlapped) + waited + latency
    high = (at_worst + overlapped + waited + latency) * (1 + _HOSTS_AND_STRAGGLERS)
    return StepTimes(compute, attention, waited, overlapped, latency, low, high)


def _kernel_seconds(kernel: GpuKernel, figures: Chip) -> float:
    """Seconds of one run of a GPU's kernel: products, memory traffic and the rest overlap."""
    # Operands of half the width are multiplied at twice the rate, of twice the width at half of it.
    rate = figures.peak_flops * 16 / (kernel.operand_bits or 16)
    reached = _FP8_PRODUCTS_REACH if kernel.operand_bits == 8 else _PRODUCTS_REACH
    products = kernel.product_flops / (reached * rate)
    memory = kernel.memory_bytes / (_MEMORY_REACHES * figures.memory_bandwidth)
    elements = kernel.lane_operations / figures.integer_operations
    return max(products, memory, elements) + _LAUNCH


def _attention_reaches(head_width: int) -> float:
    """The part of the peak that cuDNN's attention reaches, forward and backward.

    It computes a softmax beside the products. On an H100 it reaches 0.23 with heads of 64 and 0.36
    with heads of 128. The formula is linear in the width up to 128.
    """
    return 0.10 + 0.13 * min(head_width, 128) / 64
