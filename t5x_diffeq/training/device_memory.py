"""The least memory that training needs on a device."""

import os
from collections.abc import Sequence

import jax

from t5x_diffeq.system.chips import GIB
from t5x_diffeq.system.errors import InputError
from t5x_diffeq.training import partitioning
from t5x_diffeq.training.setup import Setup


def check_fits(setup: Setup, batch_size: int) -> None:
    """Checks that a device has enough memory for the least that training needs; allocates nothing.

    This is its part of the train state, of the gradient, of the batch and of one state of the
    residual stream. An optimizer step needs more: `plan` says how much.

    Raises:
      InputError: if it doesn't; gives both numbers.
    """
    c, needed = setup.model.config, least_memory(setup, batch_size)
    there = _device_memory(setup.mesh.local_devices)
    if there is not None and needed > there:
        raise InputError(
            f"training needs at least {needed / GIB:,.0f} GiB on each device, which has "
            f"{there / GIB:,.0f}: model.embed_dim={c.embed_dim}, model.num_steps={c.num_steps}, "
            f"data.sequence_length={c.max_length}, train.batch_size={batch_size} on "
            f"{setup.mesh.size} devices; make one of them smaller, or take more devices"
        )


def least_memory(setup: Setup, batch_size: int) -> int:
    """The bytes that `check_fits` adds up, for a global batch of so many sequences."""
    c, shards = setup.model.config, partitioning.batch_shards(setup.mesh.shape)
    gradient = setup.abstract_state.params
    arrays = setup.abstract_state, setup.abstract_batch(batch_size), gradient
    rows = max(1, batch_size // shards // setup.config.train.microbatches)
    length = c.max_length // setup.mesh.shape["context"]
    stream = rows * length * c.embed_dim * c.compute_dtype.itemsize
    return stream + partitioning.shard_bytes(arrays)


def _device_memory(devices: Sequence[jax.Device]) -> int | None:
    """Bytes that one of these devices can hold; for a CPU, its share of the machine's memory."""
    if devices[0].platform == "cpu":
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // len(devices)
    return (devices[0].memory_stats() or {}).get("bytes_limit")
