"""Makes the device mesh, and the shardings that follow from logical axes."""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from math import gcd, prod
from typing import Any, TypeVar

import jax
from flax import linen as nn
from jax.experimental import mesh_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from t5x_diffeq.config.config import MeshKeys
from t5x_diffeq.model.layers.mesh import Rule, Rules, axes_of, spec_of
from t5x_diffeq.model.layers.parameter import Parameter, is_parameter, map_parameters
from t5x_diffeq.system.errors import InputError

_Tree = TypeVar("_Tree")
AXES = ("data", "fsdp", "context", "tensor")
_BATCH = ("data", "fsdp")  # the mesh axes that split the sequences of a batch
_UNNAMED = ("context",)  # the axes that descriptions of a mesh leave out if their size is 1
# A config can't change these: the loss is summed over `_BATCH` and `context`, attention gathers
# keys and values over `context`, and it needs whole heads.
_FIXED_RULES = {"batch": _BATCH, "length": None, "head_dim": None, "maps": None}
_LOGICAL_AXES = ("vocab", "embed", "heads", "mlp", "steps", "time_embed")


def make_mesh(
    mesh: MeshKeys,
    batch_size: int,
    devices: Sequence[jax.Device] | None = None,
    slices: int | None = None,
) -> Mesh:
    """The mesh over these devices; None: over all devices that this process sees.

    `choose_mesh_sizes` chooses its sizes.

    Raises:
      InputError: if the axes don't multiply to the number of devices, don't divide the batch, or
        can't be laid out on the network of the devices.
    """
    devices = jax.devices() if devices is None else devices
    sizes = choose_mesh_sizes(mesh, batch_size, devices, slices)
    return arrange_mesh(sizes, devices[: prod(sizes.values())])


def choose_mesh_sizes(
    mesh: MeshKeys, batch_size: int, devices: Sequence[Any], slices: int | None = None
) -> dict[str, int]:
    """The size of each mesh axis on these devices.

    An axis of -1 takes the devices that the other axes leave; on one machine, `data` and `fsdp`
    take only as many as divide the batch. `mesh.data=None` means the number of TPU slices or GPU
    nodes (`slices`, or what the devices say); where there are several and no axis is -1, it means
    what the others leave. Devices have the attributes `platform`, `process_index`, `slice_index`.

    Raises:
      InputError: if the axes don't multiply to the number of devices or don't divide the batch.
    """
    sizes = {axis: getattr(mesh, axis) for axis in AXES}
    if sizes["data"] is None:
        sizes["data"] = _default_data(sizes, len(devices), slices or num_slices(devices))
    if any(size < 1 and size != -1 for size in sizes.values()):
        raise InputError(
            f"mesh axes are {describe_mesh(sizes)}; each must be at least 1, or -1 for all "
            "remaining devices"
        )
    filled = [axis for axis, size in sizes.items() if size == -1]
    if len(filled) > 1:
        raise InputError(f"mesh.{filled[0]} and mesh.{filled[1]} are both -1; only one can be")
    if filled:
        sizes[filled[0]] = _fill_axis(sizes, filled[0], batch_size, devices)
    _check_mesh(sizes, batch_size, devices)
    return sizes


def arrange_mesh(sizes: dict[str, int], devices: Sequence[Any]) -> Mesh:
    """A mesh whose neighbours are near each other on the network of the devices.

    On a TPU a mesh axis may use part of a dimension of the torus: `fsdp=16` on 4x4x4 chips uses
    two whole dimensions, `fsdp=8` one and a half.

    Raises:
      InputError: if the devices can't be laid out as this mesh.
    """
    across = axes_across_slices(sizes, devices)
    within = tuple(size // across[axis] for axis, size in sizes.items())
    try:
        if prod(across.values()) == 1:
            array = mesh_utils.create_device_mesh(within, devices, allow_split_physical_axes=True)
        else:
            array = mesh_utils.create_hybrid_device_mesh(
                within, tuple(across.values()), devices, allow_split_physical_axes=True
            )
    except (NotImplementedError, ValueError, AssertionError) as error:
        raise InputError(
            f"mesh {describe_mesh(sizes)} can't be laid out on the network of {len(devices)} "
            f"devices of kind {devices[0].device_kind} ({error}); change mesh.data, mesh.fsdp or "
            "mesh.tensor"
        ) from error
    # Explicit axes, the default of `jax.make_mesh`, break Linen's constraints.
    automatic = (jax.sharding.AxisType.Auto,) * len(AXES)
    return Mesh(array, AXES, axis_types=automatic)


def num_slices(devices: Sequence[Any]) -> int:
    """The number of slices that the devices belong to; a GPU's slice is its node.

    Fast links (ICI of TPUs, NVLink of GPUs) join the devices of a slice; the slower data-centre
    network (DCN) joins the slices.
    """
    return len({getattr(device, "slice_index", 0) for device in devices})


def _default_data(sizes: Mapping[str, int | None], num_devices: int, slices: int) -> int:
    """The size of `data` where the config leaves it open, by which weights don't cross slices."""
    fixed = [size for axis, size in sizes.items() if axis != "data" and size is not None]
    others = prod(fixed)
    if slices > 1 and min(fixed) > 0 and num_devices % others == 0:
        return num_devices // others
    return slices


def axes_across_slices(sizes: dict[str, int], devices: Sequence[Any]) -> dict[str, int]:
    """The number of slices along each mesh axis.

    `data` crosses slices first, because it communicates once per step, and then `fsdp`. No other
    axis crosses slices.

    Raises:
      InputError: if the slices don't divide data x fsdp; gives the numbers.
    """
    slices = num_slices(devices)
    data = gcd(sizes["data"], slices)
    fsdp = gcd(sizes["fsdp"], slices // data)
    if data * fsdp != slices:
        raise InputError(
            f"mesh {describe_mesh(sizes)}: {slices} slices don't divide mesh.data x mesh.fsdp, and "
            f"the other axes must stay within one; set mesh.data={slices}"
        )
    return {**dict.fromkeys(sizes, 1), "data": data, "fsdp": fsdp}


def _fill_axis(sizes: dict[str, int], axis: str, batch_size: int, devices: Sequence[Any]) -> int:
    """The size of the axis that fills the mesh.

    It is the number of devices that the other axes leave. On one machine, an axis that splits the
    batch has the largest divisor of this number by which the batch is divisible, if there is one.
    Only divisors will do, because a TPU's chips form a box, and few numbers divide a model's sizes.
    """
    others = prod(size for size in sizes.values() if size != -1)
    size = len(devices) // others
    if others > len(devices):  # the same error as if this axis were 1
        _check_mesh({**sizes, axis: 1}, batch_size, devices)
    if len(devices) % others:
        raise InputError(
            f"mesh {describe_mesh({**sizes, axis: size})}: {len(devices)} devices are not "
            f"divisible by the {others} of all axes but {axis}; change one of them"
        )
    if axis not in _BATCH or _on_many_machines(devices):
        return size
    rest = prod(sizes[a] for a in _BATCH if a != axis)
    usable = (n for n in range(size, 0, -1) if size % n == 0)
    return next((n for n in usable if batch_size % (n * rest) == 0), size)


def _on_many_machines(devices: Sequence[Any]) -> bool:
    """Whether the devices belong to several processes, each of which must take part."""
    return len({device.process_index for device in devices}) > 1


def _check_mesh(sizes: dict[str, int], batch_size: int, devices: Sequence[Any]) -> None:
    needed, present = prod(sizes.values()), len(devices)
    if needed > present or (needed < present and _on_many_machines(devices)):
        raise InputError(
            f"mesh {describe_mesh(sizes)} needs {needed} devices, and JAX finds {present}; make "
            "an axis smaller, or set one to -1, which takes what the others leave"
        )
    shards = batch_shards(sizes)
    if batch_size % shards:
        raise InputError(
            f"batch size {batch_size} is not divisible by {shards} devices "
            f"({describe_batch_axes(sizes)}); change one of them"
        )


def batch_shards(sizes: Mapping[str, int]) -> int:
    """The number of parts that a batch is divided into, given the sizes of the mesh axes."""
    return prod(sizes[axis] for axis in _BATCH)


def describe_batch_axes(sizes: Mapping[str, int]) -> str:
    """`mesh.data 1 x mesh.fsdp 8`: the axes that split a batch."""
    return " x ".join(f"mesh.{axis} {sizes[axis]}" for axis in _BATCH)


def describe_mesh(sizes: dict[str, int]) -> str:
    """`data 1 x fsdp 4 x tensor 2`; some axes are named only where they split something."""
    named = {axis: size for axis, size in sizes.items() if axis not in _UNNAMED or size != 1}
    return " x ".join(f"{axis} {size}" for axis, size in named.items())


def logical_rules(mesh: MeshKeys) -> Rules:
    """The fixed rules and the table of `config.mesh.rules`, as Linen takes them.

    Raises:
      InputError: if an entry isn't a rule, or names an axis that does not exist or is fixed.
    """
    fixed = _FIXED_RULES if mesh.context == 1 else {**_FIXED_RULES, "length": "context"}
    rules: list[Rule] = [*fixed.items()]
    for rule in mesh.rules:
        if not _is_rule(rule):
            raise InputError(
                f"mesh.rules has {rule!r}; each rule is a logical axis and a mesh axis, a tuple of "
                "different ones, or None"
            )
        logical, target = rule
        if logical not in _LOGICAL_AXES:
            raise InputError(
                f"mesh.rules has {rule!r}; leave this rule out: only the logical axes "
                f"{', '.join(_LOGICAL_AXES)} can be set"
            )
        for axis in axes_of(target):
            if axis not in AXES:
                raise InputError(
                    f"mesh.rules: {logical!r} goes to {axis!r}; mesh axes are {', '.join(AXES)}"
                )
        rules.append((logical, target))
    return tuple(rules)


def whole_row_rules(rules: Rules) -> Rules:
    """The rules with whole rows on each device: axes that split rows split the batch instead."""
    targets = {logical: axes_of(target) for logical, target in rules}
    row_rules = {"batch": (*targets["batch"], *targets["length"]), "length": None}
    return (*row_rules.items(), *(rule for rule in rules if rule[0] not in row_rules))


def _is_rule(rule: object) -> bool:
    """Whether `rule` is a logical axis with None, a mesh axis or several different mesh axes."""
    if not (isinstance(rule, list | tuple) and len(rule) == 2 and isinstance(rule[0], str)):
        return False
    target = rule[1]
    if isinstance(target, list | tuple):
        return all(isinstance(axis, str) for axis in target) and len({*target}) == len(target)
    return isinstance(target, str | None)


@contextlib.contextmanager
def mesh_context(mesh: Mesh, rules: Rules) -> Iterator[None]:
    """A context in which logical axes stand for mesh axes.

    It is not `with mesh:`, under which every Linen constraint is silently ignored.
    """
    with jax.set_mesh(mesh), nn.logical_axis_rules(rules):
        yield


def batch_sharding(mesh: Mesh, rules: Rules) -> NamedSharding:
    """Sharding of a batch's rows and, on a mesh with `context`, of their tokens."""
    rows, length = spec_of(("batch", "length"), rules)
    return NamedSharding(mesh, PartitionSpec(rows, length) if length else PartitionSpec(rows))


def _is_reduced(path: tuple, leaf: Parameter) -> bool:
    """Whether a part of the optimizer's state has another shape than its parameter.

    An example are optax's factors of a second moment (Shazeer and Stern 2018).
    """
    is_optimizer_state = jax.tree_util.keystr(path[:1], simple=True) == "opt_state"
    shape = leaf.value.shape
    return is_optimizer_state and (len(shape) != len(leaf.names) or 1 in shape)


def _spec_of_reduced(leaf: Parameter, rules: Rules) -> PartitionSpec:
    """The spec of an array of which some of the parameter's dimensions are 1, or are missing.

    Dimensions of size 1 are not sharded. If some are missing, it is unclear which ones are left,
    so no dimension is sharded.
    """
    shape = leaf.value.shape
    if len(shape) != len(leaf.names):
        return PartitionSpec()
    spec = spec_of(leaf.names, rules)
    return PartitionSpec(*(None if n == 1 else axes for n, axes in zip(shape, spec, strict=True)))


def _check_divides(path: str, leaf: Parameter, spec: PartitionSpec, mesh: Mesh) -> None:
    """Checks that every sharded dimension of `leaf` is a multiple of its mesh axes."""
    for size, logical, target in zip(leaf.value.shape, leaf.names, spec, strict=True):
        axes = axes_of(target)
        shards = prod(mesh.shape[axis] for axis in axes)
        if size % shards:
            raise InputError(
                f"{path}: its axis {logical!r} of size {size} is not divisible by {shards} "
                f"(mesh.{' x mesh.'.join(axes)}); change the model's size, the mesh or mesh.rules"
            )


def shard_shapes(boxed: Any, mesh: Mesh, rules: Rules) -> Any:
    """Shape, dtype and sharding of each array of a tree; arrays without a box are replicated.

    Raises:
      InputError: if a dimension isn't divisible by its mesh axes, giving both numbers; or if a
        parameter declares an axis that doesn't exist.
    """
    known = sorted({logical for logical, _ in rules})

    def shard(path: tuple, leaf: Any) -> jax.ShapeDtypeStruct:
        x, spec = leaf, PartitionSpec()
        if isinstance(leaf, Parameter):
            name = jax.tree_util.keystr(path, simple=True, separator="/")
            for logical in leaf.names:
                if logical is not None and logical not in known:
                    raise InputError(
                        f"{name}: its axis {logical!r} is no logical axis; there are "
                        f"{', '.join(known)}, and None for an axis that no device splits"
                    )
            reduced = _is_reduced(path, leaf)
            spec = _spec_of_reduced(leaf, rules) if reduced else spec_of(leaf.names, rules)
            _check_divides(name, leaf, spec, mesh)
            x = leaf.value
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, spec))

    return jax.tree_util.tree_map_with_path(shard, boxed, is_leaf=is_parameter)


def shard_bytes(arrays: Any) -> int:
    """Bytes of one device's parts of a tree of arrays, or of their shapes with shardings."""
    return sum(
        prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in jax.tree.leaves(arrays)
    )


def unbox(tree: _Tree) -> _Tree:
    """The tree with its parameters unboxed."""
    return map_parameters(lambda leaf: leaf.value if is_parameter(leaf) else leaf, tree)
