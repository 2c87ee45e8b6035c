"""Which mesh axes a logical axis lies on, and functions that see one device's part of an array."""

from collections.abc import Callable, Mapping, Sequence
from math import prod

import jax
from flax import linen as nn
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float

Rule = tuple[str, str | tuple[str, ...] | None]  # from a logical axis to mesh axes
Rules = tuple[Rule, ...]
STAGE = "stage"  # the mesh axis that splits the solver steps (ode/stages.py)


def axes_of(entry: str | Sequence[str] | None) -> tuple[str, ...]:
    """The mesh axes that an entry of a partition spec, or of the rules, names."""
    return (entry,) if isinstance(entry, str) else tuple(entry or ())


def spec_of(logical: Sequence[str | None], rules: Rules | None = None) -> PartitionSpec:
    """The partition spec of an array with these logical axes; by default by the context's rules."""
    return PartitionSpec(*(nn.logical_to_mesh_axes(tuple(logical), rules) or ()))


def mesh_axes(logical: str) -> tuple[str, ...]:
    """The mesh axes of a logical axis, under the rules of the context; none without a mesh."""
    if not mesh_sizes():
        return ()
    return tuple(axis for entry in spec_of((logical,)) for axis in axes_of(entry))


def mesh_sizes() -> Mapping[str, int]:
    """The sizes of the context's mesh axes; empty without a mesh."""
    return jax.sharding.get_abstract_mesh().shape


def num_stages() -> int:
    """The number of stages of the context's mesh; 1 without a mesh."""
    return mesh_sizes().get(STAGE, 1)


def axes_of_last_rows(num_rows: int) -> tuple[str, ...]:
    """The mesh axes that split the rows of states at t = 1, from which losses are computed.

    They are those of a batch, and the stages too if there are enough rows: every other step of a
    model is one stage's, but the head would be computed by all.
    """
    axes = mesh_axes("batch")
    shards = shards_over(axes) * num_stages()
    return (*axes, STAGE) if num_stages() > 1 and num_rows % shards == 0 else axes


def on_shards(
    function: Callable,
    in_specs: tuple,
    out_specs: PartitionSpec | tuple[PartitionSpec, ...],
    check_vma: bool = True,
) -> Callable:
    """The function under `jax.shard_map`; without a mesh, the function itself.

    `in_specs` has a partition spec, or a tree of them, for each argument. Where arrays are already
    one stage's, the function sees one device's part of that.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        return function
    return jax.shard_map(
        function,
        in_specs=in_specs,
        out_specs=out_specs,
        axis_names={*mesh.axis_names} - {*mesh.manual_axes},
        check_vma=check_vma,
    )


def shards_over(axes: Sequence[str]) -> int:
    """How many parts these axes of the context's mesh make; 1 without a mesh."""
    return prod(mesh_sizes()[axis] for axis in axes)


def sum_shards(
    x: Float[Array, "v D"], over: Sequence[str], width: Sequence[str]
) -> Float[Array, "v _"]:
    """One device's part of the sum of all devices' x, in a function under `on_shards`.

    The sum over the axes that split the width is scattered first, so that what travels over the
    others, such as those between slices or nodes, are shards.

    Args:
      x: the summand of each device.
      over: the mesh axes over which x varies and is summed.
      width: the mesh axes that split the second axis of the result.
    """
    for axis in width:
        if axis in over:
            x = jax.lax.psum_scatter(x, axis, scatter_dimension=1, tiled=True)
        else:  # x is the same on all devices of this axis
            size = x.shape[1] // shards_over((axis,))
            x = jax.lax.dynamic_slice_in_dim(x, jax.lax.axis_index(axis) * size, size, 1)
    return jax.lax.psum(x, tuple(axis for axis in over if axis not in width))
