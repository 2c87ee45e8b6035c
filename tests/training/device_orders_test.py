"""A run is the same whatever the order of devices on the mesh, and on every TPU topology.

On a TPU pod no process holds neighbouring rows of the batch.
"""

import importlib.util
from itertools import product
from math import prod

import numpy as np
import pytest
from helpers import mesh_of, mesh_shape, rules_of
from process_runs import read_reports, run, write_text

from configs import default
from t5x_diffeq.data.batches import local_rows
from t5x_diffeq.planner.topology import make_topology
from t5x_diffeq.system.errors import InputError
from t5x_diffeq.training.partitioning import arrange_mesh, axes_across_slices, batch_sharding

LIBTPU = importlib.util.find_spec("libtpu") is not None
needs_libtpu = pytest.mark.skipif(not LIBTPU, reason="needs libtpu: pip install -e '.[tpu]'")
# A small and a large shape of each kind (cloud.google.com/tpu/docs).
TOPOLOGIES = {
    "v2": ("2x2", "16x16"),
    "v3": ("2x2", "8x16"),
    "v4": ("2x2x1", "8x8x8"),
    "v5e": ("2x4", "16x16"),
    "v5p": ("2x2x2", "4x4x12"),
    "v6e": ("2x2", "8x16"),
    "tpu7x": ("2x2x1", "4x8x8"),
}
NAMES = [f"{kind}:{shape}" for kind, shapes in TOPOLOGIES.items() for shape in shapes]


def meshes(num_devices, slices=1):
    """Every mesh of powers of two, data taking the rest."""
    powers = [2**n for n in range(num_devices.bit_length())]
    for fsdp, tensor in product(powers, powers):
        if num_devices % (slices * fsdp * tensor) == 0:
            data = num_devices // (fsdp * tensor)
            yield mesh_shape(data=data, fsdp=fsdp, tensor=tensor)


def check_rows(devices, sizes, batch_size):
    """Each row is held by as many devices as share it, and by the processes of these alone."""
    mesh = arrange_mesh(sizes, devices)
    assert sorted(d.id for d in mesh.devices.flat) == sorted(d.id for d in devices)
    sharding = batch_sharding(mesh, rules_of(default.get_config()))
    where = np.vectorize(lambda device: device.process_index)(mesh.devices)
    shards = where.reshape(-1, sizes["tensor"])  # the processes that hold each part of the batch
    size = batch_size // len(shards)
    for process in {device.process_index for device in devices}:
        rows = local_rows(sharding, batch_size, process)
        assert np.all(np.diff(rows) > 0)
        expected = np.flatnonzero((shards == process).any(1).repeat(size))
        np.testing.assert_array_equal(rows, expected)


@pytest.mark.slow
@needs_libtpu
@pytest.mark.parametrize("name", NAMES)
def test_rows_on_every_topology(name):
    """Every mesh can be made, and processes partition the batch."""
    devices = make_topology(name).devices
    all_sizes = list(meshes(len(devices)))
    assert len(all_sizes) > 2
    for sizes in all_sizes:
        arrange_mesh(sizes, devices)
    some = [sizes for sizes in all_sizes if sizes["fsdp"] in (1, 16, len(devices))]
    for sizes in some if len(devices) > 64 else all_sizes:
        check_rows(devices, sizes, batch_size=2 * len(devices))


@needs_libtpu
@pytest.mark.parametrize("name", ["v5p:4x4x4", "v6e:4x8"])
def test_two_slices(name):
    """By default data crosses the slices, and fsdp fills each."""
    devices = make_topology(name, slices=2).devices
    mesh = mesh_of(default.get_config(), 2 * len(devices), devices)
    assert dict(mesh.shape) == mesh_shape(data=2, fsdp=len(devices) // 2)
    for half in mesh.devices:
        assert len({device.slice_index for device in half.flat}) == 1
    for sizes in meshes(len(devices), slices=2):
        assert prod(axes_across_slices(sizes, devices).values()) == 2
        check_rows(devices, sizes, batch_size=len(devices))


@needs_libtpu
def test_a_mesh_that_the_torus_cannot_hold():
    devices = make_topology("v5p:2x2x2").devices[:7]  # no box of chips
    with pytest.raises(InputError, match=r"mesh data 7 .* can't be laid out on the network of 7 d"):
        arrange_mesh(mesh_shape(data=7), devices)


SHORT = ("--config.train.total_steps=8", "--config.train.eval_every=4")


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    return write_text(tmp_path_factory.mktemp("text"))


@pytest.fixture(scope="module")
def single_process_run(text, tmp_path_factory):
    """The workdir of one process of four devices in their own order."""
    workdir = tmp_path_factory.mktemp("alone")
    run(text, workdir, 1, 4, *SHORT)
    return workdir


ARRANGEMENTS = (
    (2, "interleaved", ()),
    (2, "reversed", ()),
    (4, "interleaved", ("--config.mesh.data=2",)),
    (4, "random", ("--config.mesh.tensor=2",)),  # rows that several processes hold
)


@pytest.mark.slow
@pytest.mark.in_turns("whole programs")
def test_losses_equal_those_of_one_process(single_process_run, text, tmp_path, sample):
    for processes, order, mesh in sample(ARRANGEMENTS, most=1):
        workdir = tmp_path / f"{processes}-{order}"
        run(text, workdir, processes, 4 // processes, *SHORT, *mesh, order=order)
        for name in ("train/loss", "eval/loss"):
            expected = read_reports(single_process_run, name)
            assert len(expected) == {"train/loss": 8, "eval/loss": 3}[name]
            np.testing.assert_allclose(read_reports(workdir, name), expected, rtol=1e-5)
