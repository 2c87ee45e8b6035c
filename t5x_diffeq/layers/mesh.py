"""Which mesh axes a logical axis lies on, and functions that see one device's part of an array."""

from collections.abc import Callable, Sequence

import jax
from flax import linen as nn
from jax.sharding import PartitionSpec

Rules = tuple[tuple[str, str | tuple[str, ...] | None], ...]  # from logical to mesh axes


def axes_of(entry: str | Sequence[str] | None) -> tuple[str, ...]:
    """The mesh axes that an entry of a partition spec, or of the rules, names."""
    return (entry,) if isinstance(entry, str) else tuple(entry or ())


def spec_of(logical: Sequence[str | None], rules: Rules | None = None) -> PartitionSpec:
    """The partition spec of an array with these logical axes; by default by the context's rules."""
    return PartitionSpec(*(nn.logical_to_mesh_axes(tuple(logical), rules) or ()))


def mesh_axes(logical: str) -> tuple[str, ...]:
    """The mesh axes of a logical axis, under the rules of the context; none without a mesh."""
    if jax.sharding.get_abstract_mesh().empty:
        return ()
    return tuple(axis for entry in spec_of((logical,)) for axis in axes_of(entry))


def on_shards(
    function: Callable,
    in_specs: tuple,
    out_specs: PartitionSpec | tuple[PartitionSpec, ...],
    check_vma: bool = True,
) -> Callable:
    """The function under `jax.shard_map`; without a mesh, the function itself.

    `in_specs` has a partition spec, or a tree of them, for each argument.
    """
    if jax.sharding.get_abstract_mesh().empty:
        return function
    return jax.shard_map(function, in_specs=in_specs, out_specs=out_specs, check_vma=check_vma)
