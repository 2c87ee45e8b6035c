"""A collective has the links that its devices span; the estimate of a step is a range."""

import dataclasses
import itertools
from types import SimpleNamespace

import pytest

from t5x_diffeq.model.flops import StepFlops
from t5x_diffeq.planner import topology
from t5x_diffeq.planner.collectives import BETWEEN_SLICES, Collective
from t5x_diffeq.planner.estimate import Links, step_times
from t5x_diffeq.planner.hlo import shapes
from t5x_diffeq.planner.program_cost import GpuKernel, ProgramCost
from t5x_diffeq.system.chips import CHIPS


class TorusDevice:
    """A device at these coordinates of a slice."""

    platform = "tpu"

    def __init__(self, *coords, slice_index=0):
        self.coords, self.slice_index = coords, slice_index


def torus(*extents, slices=1):
    coordinates = itertools.product(range(slices), *(range(n) for n in extents))
    return [TorusDevice(*coords, slice_index=number) for number, *coords in coordinates]


def collective(kind, group, size=1_000_000):
    return Collective(kind, tuple(shapes(f"f32[{size}]")), 2, group, False)


V5P, V6E = CHIPS["TPU v5p"], CHIPS["TPU v6 lite"]


@pytest.mark.parametrize(
    ("devices", "chip", "group", "links", "hops"),
    [
        (torus(4, 4, 4), V5P, None, 6, 6),  # three rings
        (torus(4, 4, 4), V5P, range(16), 4, 4),  # two
        (torus(4, 4, 4), V5P, range(4), 2, 2),
        (torus(4, 4, 4), V5P, range(2), 1, 1),  # neighbours
        (torus(4, 4, 4), V5P, (0, 2), 1 / 2, 2),  # who share their way with the ones between
        (torus(4, 4, 4), V5P, (0, 1, 4), 1, 2),  # no box
        (torus(2, 2, 4), V5P, range(4), 1, 3),  # no whole cube: a line
        (torus(16, 16), V6E, range(16), 2, 8),
        (torus(8, 8), V6E, range(64), 2, 14),
    ],
)
def test_a_group_has_the_links_of_the_dimensions_that_it_spans(devices, chip, group, links, hops):
    route = Links(devices, chip).route(collective("all-gather", group and tuple(group)))
    assert route.bandwidth == pytest.approx(links * chip.link_bandwidth / chip.links)
    assert (route.hops, route.crossed) == (hops, 1)


def test_seconds_of_collectives():
    links = Links(torus(4, 4, 4), V5P)

    def seconds(kind, group):
        it = collective(kind, group, 150_000_000)  # twice 0.6 GB; 100 GB/s on each link
        return links.route(it).seconds(it)

    ring = (0, 1, 2, 3)
    assert seconds("all-gather", ring) == pytest.approx(1.2 * 3 / 4 / 200)
    assert seconds("all-reduce", ring) == pytest.approx(2 * 1.2 * 3 / 4 / 200)
    assert seconds("reduce-scatter", None) == pytest.approx(1.2 * 63 / 64 / 600)
    assert seconds("collective-permute", None) == pytest.approx(12e-3)  # over one link
    it = collective("all-reduce", ring)
    assert links.route(it).latency(it) == pytest.approx(2 * 2 * 2e-6)


def test_between_slices_data_takes_the_network():
    """Of a group of 2 x 4 devices each sends a fourth of the array to the other slice."""
    links = Links(torus(4, 4, 4, slices=2), V5P)
    it = collective("all-reduce", (0, 1, 2, 3, 64, 65, 66, 67), 150_000_000)
    route = links.route(it)
    assert route.crossed == 2
    within, between = 2 * 1.2 * 3 / 4 / 200, 2 * 1.2 / 4 / 2 / 6.25
    assert route.seconds(it) == pytest.approx(within + between)
    assert route.latency(it) > 4 * 2e-5


def test_hosts_exchange_over_the_network_alone():
    links = Links(torus(4, 4, 4, slices=2), V5P)
    it = dataclasses.replace(collective(BETWEEN_SLICES, None, 150_000_000), asynchronous=True)
    assert links.route(it).seconds(it) == pytest.approx(2 * 1.2 / 2 / 6.25)


def test_gpus_have_nvlink_in_a_machine_and_the_network_between():
    gpus = [SimpleNamespace(platform="gpu", id=number) for number in range(16)]
    links = Links(gpus, CHIPS["NVIDIA H100 80GB HBM3"])
    near, far = (links.route(collective("all-gather", g)) for g in (tuple(range(8)), (0, 8)))
    assert (near.bandwidth, near.crossed) == (450e9, 1)
    assert (far.network, far.crossed) == (50e9, 2)


def test_the_step_is_a_range():
    hidden = dataclasses.replace(collective("all-gather", None), asynchronous=True)
    moved = [collective("all-reduce", None), hidden]
    cost, flops = ProgramCost(1_000_000, 1_750_000), StepFlops(0, 0, 0, 0, 0, 0, 0, 2 * 459e9, 64)
    times = step_times(Links(torus(4, 4, 4), V5P), moved, cost, flops, devices=2)
    assert (times.compute, times.kernels) == pytest.approx((1e-3, 1e-3))
    assert times.overlapped == pytest.approx(times.waited / 2)
    assert times.low == pytest.approx(2e-3 + times.waited + times.latency)
    in_transit = times.waited + times.latency + times.overlapped
    assert times.high == pytest.approx(1.1 * (3e-3 + in_transit))


@pytest.mark.parametrize(
    ("extents", "closed"),
    [
        ((4, 4, 4), (True, True, True)),
        ((4, 4, 8), (True, True, True)),
        ((2, 2, 4), (False, False, False)),
        ((16, 16), (True, True)),
        ((8, 16), (False, True)),
        ((8, 8), (False, False)),
    ],
)
def test_whole_cubes_and_pods_close_to_rings(extents, closed):
    assert topology.rings(extents) == closed


def test_a_gpus_kernels_take_what_they_do_most():
    """By the rates that an H100 sustained, and 3 microseconds between kernels."""
    h100 = CHIPS["NVIDIA H100 80GB HBM3"]
    links = Links([SimpleNamespace(platform="gpu", id=number) for number in range(2)], h100)
    each = {
        "product": GpuKernel(0.73 * 989e9, 16, 0, 0, 1),
        "fp8 product": GpuKernel(0.66 * 2 * 989e9, 8, 0, 0, 1),
        "float32 product": GpuKernel(0.73 * 989e9 / 2, 32, 0, 0, 1),
        "bytes": GpuKernel(0, 0, int(0.9 * 3350e6), 0, 1),
        "elements": GpuKernel(0, 0, 0, 64 * 132 * 1.755e6, 1),
    }
    none, some = (StepFlops(0, 0, 0, 0, 0, 0, 0, kernel, 128) for kernel in (0, 2 * 0.36 * 989e9))
    for what, kernel in each.items():
        times = step_times(links, [], ProgramCost(0, None, 0, (kernel,)), none, devices=2)
        assert times.low == times.compute == pytest.approx(1e-3 + 3e-6), what
        assert times.high == pytest.approx(1.2 * 1.1 * times.low)
    both = each["product"]._replace(memory_bytes=each["bytes"].memory_bytes, times=5)
    times = step_times(links, [], ProgramCost(0, None, 0, (both,)), some, devices=2)
    assert (times.compute, times.kernels) == pytest.approx((5e-3 + 15e-6, 1e-3))
    assert times.low == pytest.approx(times.compute + times.kernels)


@pytest.mark.parametrize(
    ("name", "wrap"),
    [("v5p:4x4x4", (True, True, True)), ("v6e:16x16", (True, True, False)), ("v5p:2x2x1", None)],
)
def test_a_slice_is_compiled_for_with_its_rings(name, wrap, monkeypatch):
    asked = {}

    def describe(**options):
        asked.update(options)
        return SimpleNamespace(devices=[])

    monkeypatch.setattr(topology, "_need_compiler", lambda *_: None)
    monkeypatch.setattr(topology.topologies, "get_topology_desc", describe)
    topology._tpu_devices(name, name.partition(":")[0], 1)
    assert asked.get("wrap") == wrap
