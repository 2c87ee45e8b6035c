"""Meshes fill or say why not; parameters are laid out by their logical axes."""

from dataclasses import dataclass
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.traverse_util import flatten_dict
from helpers import mesh_of, mesh_shape, rules_of, setup_of
from jax.sharding import PartitionSpec

from t5x_diffeq.config.config import Config
from t5x_diffeq.model.layers.parameter import Parameter
from t5x_diffeq.system.errors import InputError
from t5x_diffeq.training import partitioning
from t5x_diffeq.training import setup as setups
from t5x_diffeq.training.partitioning import arrange_mesh, axes_across_slices, choose_mesh_sizes
from t5x_diffeq.training.progress import describe_devices
from t5x_diffeq.training.setup import make_setup


@pytest.mark.parametrize(
    ("mesh", "batch_size", "shape"),
    [
        ({}, 8, (1, 8, 1, 1)),
        ({}, 12, (1, 4, 1, 1)),  # what divides both
        ({"tensor": 2}, 12, (1, 4, 1, 2)),
        ({"data": -1, "fsdp": 2}, 8, (4, 2, 1, 1)),
        ({"fsdp": 4}, 8, (1, 4, 1, 1)),
        ({"fsdp": 1, "context": -1}, 2, (1, 1, 8, 1)),  # whatever the batch
    ],
)
def test_filling(small, mesh, batch_size, shape):
    small.mesh.update(mesh)
    assert tuple(mesh_of(small, batch_size).shape.values()) == shape


def test_idle_devices_are_told(small):
    told = describe_devices(mesh_of(small, 12))
    assert "4 x cpu" in told
    assert "4 devices idle: the batch size is not divisible by more" in told


@pytest.mark.parametrize(
    ("kind", "told"), [("NVIDIA H100 80GB HBM3", False), ("NVIDIA H300", True)]
)
def test_a_device_of_an_unknown_kind_is_told(kind, told):
    """Its log has no MFU."""
    device = FakeDevice(0, slice_index=0, process_index=0, device_kind=kind, platform="gpu")
    mesh = jax.sharding.Mesh(np.array([device]).reshape(1, 1, 1, 1), tuple(mesh_shape()))
    line = "; the peak of this kind isn't known, so the log has no MFU"
    assert (line in describe_devices(mesh)) == told


@pytest.mark.parametrize(
    ("mesh", "message"),
    [
        ({"fsdp": 3}, "batch size 8 is not divisible by 3 devices"),
        ({"data": -1}, "mesh.data and mesh.fsdp are both -1"),
        ({"tensor": 3}, "8 devices are not divisible by the 3"),
        ({"tensor": 0}, "each must be at least 1, or -1"),
    ],
)
def test_bad_meshes(small, mesh, message):
    small.mesh.update(mesh)
    with pytest.raises(InputError, match=message):
        mesh_of(small, 8)


def test_bad_rules(small):
    small.mesh.rules = (("embed", "rows"),)
    with pytest.raises(InputError, match="'embed' goes to 'rows'; mesh axes are data, fsdp, con"):
        rules_of(small)
    small.mesh.rules = (("length", "tensor"),)
    with pytest.raises(
        InputError, match=r"\('length', 'tensor'\); leave this .* axes vocab, embed"
    ):
        rules_of(small)


def test_an_axis_that_does_not_divide_names_both_numbers(small):
    small.mesh.update(fsdp=2, tensor=4)  # and there are two heads
    with pytest.raises(InputError, match=r"'heads' of size 2 is not divisible by 4 .mesh.tensor"):
        setup_of(small)


def test_an_axis_that_does_not_exist_is_refused(small):
    setup = setup_of(small)
    leaf = Parameter(jnp.zeros(8), ("embd",), role="bias")
    with pytest.raises(InputError, match=r"w: its axis 'embd' is no logical axis; there are .*emb"):
        partitioning.shard_shapes({"w": leaf}, setup.mesh, setup.rules)


@pytest.mark.slow
def test_state_is_laid_out_as_its_axes_say(small):
    small.mesh.update(data=2, fsdp=2, tensor=2)
    setup = setup_of(small)
    params = flatten_dict(setup.abstract_state.params, sep="/")
    expected = {
        "source/attention.qkv/kernel": PartitionSpec(None, "fsdp", None, "tensor", None),
        "source/attention.qkv/kernel_base": PartitionSpec("fsdp", None, "tensor", None),
        "source/mlp.down/kernel": PartitionSpec(None, "tensor", "fsdp"),
        "source/mlp.up/time_embedding/output_kernel": PartitionSpec(None, None),
        "token_embedding/table": PartitionSpec("tensor", "fsdp"),
    }
    with setup.context():
        made = flatten_dict(setup.init_state().params, sep="/")
    for name, spec in expected.items():
        assert params[name].sharding.spec == spec, name
        assert made[name].sharding.is_equivalent_to(params[name].sharding, made[name].ndim), name
    moments = [x for x in jax.tree.leaves(setup.abstract_state.opt_state) if x.ndim == 5]
    assert {x.sharding.spec for x in moments} == {expected["source/attention.qkv/kernel"]}


@dataclass(frozen=True)
class FakeDevice:
    """A device of a multi-slice system, as far as a mesh asks."""

    id: int
    slice_index: int
    process_index: int
    device_kind: str = "fake"
    platform: str = "gpu"


def test_slices_are_crossed_by_data_then_fsdp():
    devices = [FakeDevice(n, slice_index=n // 4, process_index=n // 4) for n in range(16)]
    sizes = mesh_shape(data=2, fsdp=4, tensor=2)
    assert axes_across_slices(sizes, devices) == mesh_shape(data=2, fsdp=2)
    assert axes_across_slices(sizes, devices[:4]) == mesh_shape()
    mesh = arrange_mesh(mesh_shape(data=4, fsdp=2, tensor=2), devices)
    for n in range(4):  # each slice is one place of the data axis
        assert {device.slice_index for device in mesh.devices[n].flat} == {n}
    with pytest.raises(InputError, match=r"4 slices don't divide .* set mesh.data=4"):
        axes_across_slices(mesh_shape(fsdp=2, tensor=8), devices)


def test_weights_stay_within_a_node_by_default(small):
    """Unless the mesh says otherwise, or a GPU has too little memory for its part of the state."""
    devices = [FakeDevice(n, slice_index=n // 4, process_index=n // 4) for n in range(16)]
    small.mesh.fsdp = -1

    def sizes(**given):
        small.mesh.update(given)
        return choose_mesh_sizes(Config.of(small).mesh, 16, devices)

    assert sizes() == mesh_shape(data=4, fsdp=4)
    assert sizes(tensor=2) == mesh_shape(data=4, fsdp=2, tensor=2)
    assert sizes(fsdp=16, tensor=1) == mesh_shape(fsdp=16)
    assert sizes(fsdp=2) == mesh_shape(data=8, fsdp=2)
    assert sizes(data=1, fsdp=-1) == mesh_shape(fsdp=16)


def test_weights_cross_nodes_where_a_gpu_has_too_little_memory(small, monkeypatch):
    small.mesh.fsdp, small.train.batch_size = -1, 8
    config = Config.of(small)
    setup = make_setup(config, 256, slices=2)
    assert (setup.mesh.shape["data"], setup.mesh.shape["fsdp"]) == (2, 4)
    told = {}
    gpu = SimpleNamespace(platform="gpu", device_kind="an unknown", memory_stats=lambda: told)
    assert setups.fits_on_gpu([gpu], setup.abstract_state)
    gpu.device_kind = "NVIDIA H100 80GB HBM3"
    assert setups.fits_on_gpu([gpu], setup.abstract_state)
    told["bytes_limit"] = 10_000  # the device knows better than the data sheet of its kind
    assert not setups.fits_on_gpu([gpu], setup.abstract_state)
    monkeypatch.setattr(setups, "fits_on_gpu", lambda devices, state: False)
    setup = make_setup(config, 256, slices=2)
    assert (setup.mesh.shape["data"], setup.mesh.shape["fsdp"]) == (1, 8)
    assert setup.config.mesh.data == 1  # from which the log knows why
