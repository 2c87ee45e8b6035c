"""Host memory for arrays that only the optimizer's update needs: `optimizer.offload`.

The moments of the optimizer and the averages of the parameters are read and written once in a
step, after the gradient is known. With the key they lie in the host's memory for the rest of it, so
the forward and backward pass have their memory on the device. Step, counters and other scalars stay
where they are: they have 4 bytes each, and their copies would only wait.

On CPUs, losses are equal bit for bit with and without the key; elsewhere but for rounding
(`update`).
"""

from importlib import metadata
from typing import Any, TypeVar

import jax
from jax.sharding import Sharding, SingleDeviceSharding

from t5x_diffeq.runtime.errors import InputError

Tree = TypeVar("Tree")
HOST = "pinned_host"  # JAX's name for the memory of a host from which its devices copy themselves
# On GPUs, their XLA reads wrong offsets of a host array that a loop traverses backward:
# github.com/openxla/xla/pull/46231 (found) and 46308 (mended).
_WRONG_ON_GPU = ("0.11.0",)


def check_host_memory(device: Any, version: str = metadata.version("jaxlib")) -> None:
    """Checks that `optimizer.offload` can be used on devices of this kind.

    Args:
      device: a `jax.Device`; it need not be there, if programs are only compiled for it.
      version: of jaxlib.

    Raises:
      InputError: if they have no such memory, or if this version is known to compute wrongly.
    """
    kinds = [memory.kind for memory in device.addressable_memories()]
    if HOST not in kinds:
        raise InputError(
            f"optimizer.offload needs memory of kind {HOST}, and {device.device_kind} has "
            f"{', '.join(kinds) or 'none that JAX knows without the device'}; leave the key out"
        )
    if device.platform == "gpu" and version in _WRONG_ON_GPU:
        raise InputError(
            f"optimizer.offload: jaxlib {version} computes wrong gradients on GPUs with arrays in "
            "the host's memory; install another version, or leave the key out"
        )


def is_on_host(array: Any) -> bool:
    """Whether an array, or its abstract shape with a sharding, is in the host's memory."""
    return array.sharding.memory_kind == HOST


def shares_memory(array: jax.Array) -> bool:
    """Whether `np.asarray` of the array would share its memory: on a CPU, or in a host's memory."""
    return is_on_host(array) or next(iter(array.devices())).platform == "cpu"


def place(array: jax.Array, sharding: Sharding) -> jax.Array:
    """The array with this sharding, from which its own differs in the kind of memory at most.

    Shard by shard: for an array of several processes, that needs no program and no other process.
    """
    if array.sharding.memory_kind == sharding.memory_kind:
        return array
    kind = sharding.memory_kind
    shards = [
        jax.device_put(shard.data, SingleDeviceSharding(shard.device, memory_kind=kind))
        for shard in array.addressable_shards
    ]
    return jax.make_array_from_single_device_arrays(array.shape, sharding, shards)


def on_device(arrays: Tree) -> Tree:
    """The arrays in the devices' memory, for a program that knows no other."""
    return jax.tree.map(lambda x: place(x, x.sharding.with_memory_kind("device")), arrays)


def offload(shapes: Tree) -> Tree:
    """The same shapes, dtypes and shardings in the host's memory; scalars stay on the device."""

    def move(x: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        sharding = x.sharding.with_memory_kind(HOST)
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding) if x.ndim else x

    return jax.tree.map(move, shapes)


def fetch(arrays: Tree, shapes: Tree) -> Tree:
    """The arrays on the device, from where `shapes` says; within a compiled function."""
    return jax.tree.map(
        lambda x, shape: jax.device_put(x, jax.memory.Space.Device) if is_on_host(shape) else x,
        arrays,
        shapes,
    )


def store(arrays: Tree, shapes: Tree) -> Tree:
    """The arrays where `shapes` says, from the device; within a compiled function."""
    return jax.tree.map(
        lambda x, shape: jax.device_put(x, jax.memory.Space.Host) if is_on_host(shape) else x,
        arrays,
        shapes,
    )
