"""Finds the mesh axes of logical axes, and calls functions on each device's part of an array."""

from collections.abc import Callable, Mapping, Sequence
from math import prod

import jax
from flax import linen as nn
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float

Rule = tuple[str, str | tuple[str, ...] | None]  # a logical axis, and the mesh axes that split it
Rules = tuple[Rule, ...]


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


def on_shards(
    function: Callable,
    in_specs: tuple,
    out_specs: PartitionSpec | tuple[PartitionSpec, ...],
    check_vma: bool = True,
) -> Callable:
    """The function under `jax.shard_map`; without a mesh, the function itself.

    `in_specs` has a partition spec, or a tree of them, for each argument.
    """
    if not mesh_sizes():
        return function
    return jax.shard_map(function, in_specs=in_specs, out_specs=out_specs, check_vma=check_vma)


def shards_over(axes: Sequence[str]) -> int:
    """How many parts these axes of the context's mesh make; 1 without a mesh."""
    return prod(mesh_sizes()[axis] for axis in axes)


def sum_shards(
    x: Float[Array, "v D"], over: Sequence[str], width: Sequence[str]
) -> Float[Array, "v _"]:
    """This device's shard of the sum of all devices' x; for functions under `on_shards`.

    The sum over the axes that split the width is scattered first. The other axes, such as those
    between slices or nodes, then carry only shards.

    Args:
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
