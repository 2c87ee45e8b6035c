"""The links available to a collective: in a TPU slice's torus, between slices, between GPUs.

A device has two links along each dimension of its torus. A group of devices that spans some of the
dimensions can use only these dimensions' links: all of them where the dimension closes to a ring,
half of them where it is an open line, whose ends have one neighbour. Devices that are not
neighbours share the links between them with other groups.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from t5x_diffeq.planner.collectives import BETWEEN_SLICES, Collective
from t5x_diffeq.system.chips import Chip

_TWICE = ("all-reduce", BETWEEN_SLICES)  # sums are reduce-scattered, then gathered
_HOP_SECONDS = 1e-6  # from a TPU to its neighbour
_NETWORK_SECONDS = 2e-5  # from one slice or node to another
# A slice's dimension closes to a ring if its size is a multiple of this (v4, v5p, TPU7x: in slices
# of whole cubes of 4x4x4; v5e, v6e: in a whole pod of 16x16). docs.cloud.google.com/tpu/docs
_CUBE, _POD = 4, 16


@dataclass(frozen=True)
class Route:
    """How a group's data travels.

    Attributes:
      size: number of devices in the group.
      bandwidth: bytes/s that a device sends to others in its slice or node.
      hops: number of hops between neighbours, once around the ring or along the line.
      crossed: number of slices or nodes that the group spans.
      network: bytes/s that a device sends to other slices or nodes.
    """

    size: int
    bandwidth: float
    hops: int
    crossed: int
    network: float

    def seconds(self, it: Collective) -> float:
        """Seconds of all executions of a collective, at full bandwidth and without latency."""
        rounds = 2 if it.kind in _TWICE else 1
        near = self.size // self.crossed
        within = rounds * it.bytes * (near - 1) / near / self.bandwidth
        # Each device exchanges its own part of its slice's data with the other slices.
        between = rounds * it.bytes / near * (self.crossed - 1) / self.crossed / self.network
        return within + between

    def latency(self, it: Collective) -> float:
        """Seconds until the first bytes have travelled all the way, for all executions."""
        rounds = 2 if it.kind in _TWICE else 1
        network = _NETWORK_SECONDS if self.crossed > 1 else 0
        return it.executions * rounds * (self.hops * _HOP_SECONDS + network)


class Links:
    """The links between the devices of a mesh.

    Args:
      devices: `jax.Device`s, in the program's order.
      figures: the specifications of each device.
      per_node: the number of GPUs in a node.
    """

    def __init__(self, devices: Sequence[Any], figures: Chip, per_node: int = 8):
        self.figures = figures
        self.coordinates = [_coordinates_of(device, per_node) for device in devices]
        own = [coords for part, coords in self.coordinates if part == self.coordinates[0][0]]
        self.extents = tuple(len(set(column)) for column in zip(*own, strict=True))
        self.rings = rings(self.extents)

    def route(self, it: Collective) -> Route:
        """The route of a collective's first group; those of the others are alike."""
        if it.kind == BETWEEN_SLICES:
            slices = len({part for part, _ in self.coordinates})
            return Route(
                slices, self.figures.link_bandwidth, 0, slices, self.figures.network_bandwidth
            )
        if it.kind == "collective-permute":
            return Route(2**30, self.figures.link_bandwidth / self.figures.links, 1, 1, 1)
        group = range(len(self.coordinates)) if it.group is None else it.group
        coordinates = [self.coordinates[number] for number in group]
        crossed = len({part for part, _ in coordinates})
        near = [coords for part, coords in coordinates if part == coordinates[0][0]]
        links, hops = self.links(near)
        per_link = self.figures.link_bandwidth / self.figures.links
        return Route(
            len(coordinates), links * per_link, hops, crossed, self.figures.network_bandwidth
        )

    def links(self, near: Sequence[tuple[int, ...]]) -> tuple[float, int]:
        """A device's links to those at these coordinates of its slice; and hops among them all."""
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


def rings(extents: Sequence[int]) -> tuple[bool, ...]:
    """Whether each dimension of a TPU slice closes to a ring."""
    if len([n for n in extents if n > 1]) > 2:
        return (all(n % _CUBE == 0 for n in extents),) * len(extents)
    return tuple(n == _POD for n in extents)


def _coordinates_of(device: Any, per_node: int) -> tuple[int, tuple[int, ...]]:
    """The slice or node of a device, and where it is in that."""
    if device.platform != "tpu":  # a GPU, or a virtual device
        return device.id // per_node, (device.id % per_node,)
    return getattr(device, "slice_index", None) or 0, tuple(device.coords)
