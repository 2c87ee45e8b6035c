"""Arrays that one replica of the state reads and sends to the others over the network.

Along a mesh axis that splits none of the arrays, such as `data`, every device with the same place
on the other axes holds the same parts: a replica of the state. Of d replicas only the first is read
from storage, by the processes that hold it. The others get it in a sum over the replicas, to which
they add zeros. The sum is over the numbers' bits, as integers: so -0.0 and small integers arrive as
they were, as they don't from Orbax's `SingleReplicaArrayHandler`.
"""

from dataclasses import dataclass
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from t5x_diffeq.model.layers.mesh import axes_of


@dataclass(frozen=True)
class Replicas:
    """The replicas of a state on a mesh."""

    mesh: Mesh
    axes: tuple[str, ...]  # from one replica to the next

    @property
    def first(self) -> Mesh:
        """The mesh of the first replica, with the same axes."""
        place = (slice(1) if axis in self.axes else slice(None) for axis in self.mesh.axis_names)
        return Mesh(self.mesh.devices[*place], self.mesh.axis_names)

    @property
    def readers(self) -> set[int]:
        """The processes that hold a part of the first replica."""
        return _processes_of(self.first)

    def on_first(self, arrays: Any) -> Any:
        """Shapes, dtypes and shardings of the arrays on the first replica alone."""
        mesh = self.first
        return jax.tree.map(
            lambda x: x.update(sharding=NamedSharding(mesh, x.sharding.spec)), arrays
        )

    def broadcast(self, arrays: Any, read: Any) -> Any:
        """The arrays on all replicas; every process must call it.

        They are sent one after the other. Meanwhile a device holds, beside the state, one more copy
        of its part of the array. `read` are the arrays on the first replica, which are deleted;
        None on a process that has no part of it.
        """
        leaves, tree = jax.tree.flatten(arrays)
        sources = [None] * len(leaves) if read is None else jax.tree.leaves(read)
        sent = [self._send(*each) for each in zip(leaves, sources, strict=True)]
        return jax.tree.unflatten(tree, sent)

    def _send(self, array: jax.ShapeDtypeStruct, source: jax.Array | None) -> jax.Array:
        spec, shape = array.sharding.spec, array.sharding.shard_shape(array.shape)
        parts = {x.device: x.data for x in source.addressable_shards} if source is not None else {}
        pieces = []
        for device in self.mesh.local_devices:
            with jax.set_mesh(Mesh([device], "one")):  # instead of a mesh around the call
                piece = (
                    parts[device][None] if device in parts else jnp.zeros((1, *shape), array.dtype)
                )
                pieces.append(jax.device_put(piece, device))
        if source is not None:
            source.delete()
        by_replica = NamedSharding(self.mesh, PartitionSpec(self.axes, *spec))
        whole = (self.mesh.size // self.first.size, *array.shape)
        stacked = jax.make_array_from_single_device_arrays(whole, by_replica, pieces)
        # One at a time: all at once would need the memory of a second state.
        return jax.block_until_ready(_sum_of_bits(self.mesh, self.axes, spec)(stacked))


def replicas_of(arrays: Any) -> Replicas | None:
    """The replicas of a state, if some process holds no part of the first one; else None."""
    shardings = [leaf.sharding for leaf in jax.tree.leaves(arrays)]
    if not all(isinstance(each, NamedSharding) for each in shardings):
        return None
    meshes = {each.mesh for each in shardings}
    if len(meshes) != 1:
        return None
    (mesh,) = meshes
    splitting = {axis for each in shardings for entry in each.spec for axis in axes_of(entry)}
    axes = tuple(axis for axis in mesh.axis_names if axis not in splitting and mesh.shape[axis] > 1)
    replicas = Replicas(mesh, axes)
    return replicas if replicas.readers < _processes_of(mesh) else None


def _processes_of(mesh: Mesh) -> set[int]:
    return {device.process_index for device in mesh.devices.flat}


@cache
def _sum_of_bits(mesh: Mesh, axes: tuple[str, ...], spec: PartitionSpec) -> Any:
    """The compiled sum over the replicas, all of which are zero but one."""

    def add(stacked: jax.Array) -> jax.Array:
        value = stacked[0]
        if value.dtype == bool:
            return lax.psum(value.astype(jnp.uint32), axes).astype(bool)
        bits = lax.bitcast_convert_type(value, jnp.dtype(f"uint{8 * value.dtype.itemsize}"))
        wide = jnp.promote_types(bits.dtype, jnp.uint32)  # every backend adds these
        total = lax.psum(bits.astype(wide), axes).astype(bits.dtype)
        return lax.bitcast_convert_type(total, value.dtype)

    return jax.jit(
        jax.shard_map(add, mesh=mesh, in_specs=PartitionSpec(axes, *spec), out_specs=spec)
    )
