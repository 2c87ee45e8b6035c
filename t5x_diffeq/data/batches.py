"""The Grain pipeline: the batch of a step as a pure function of seed and step.

Row r of global batch s is example s*B + r of a shuffled, endlessly repeated epoch. Each process
reads the rows that its devices hold. On a TPU pod, these rows are not contiguous, because a mesh
follows the torus of chips. The state of the data is one number, the step, for any number of
processes and any order of devices.
"""

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import groupby
from sys import maxsize
from typing import Any, NamedTuple, TypeVar

import grain
import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Integer

from t5x_diffeq.data.packing import Example, FirstFitRows, Windows
from t5x_diffeq.system.console import track

_PREFETCHED_BATCHES = 8
Examples = Windows | FirstFitRows
Mixture = Sequence[tuple[float, Examples]]  # pairs of weight and examples
_Item = TypeVar("_Item")
Rows = Integer[np.ndarray, " rows"]  # row numbers in the global batch, ascending


class _Place(NamedTuple):
    """Where an example is: the part of the mixture, and the example's number in it."""

    part: int
    number: int


def local_rows(sharding: NamedSharding, batch_size: int, process: int | None = None) -> Rows:
    """The rows of a global batch that a process's devices hold; None: this process's devices."""
    process = jax.process_index() if process is None else process
    is_local = np.zeros(batch_size, bool)
    by_row = NamedSharding(sharding.mesh, PartitionSpec(*sharding.spec[:1]))
    shares: Mapping[jax.Device, Any] = by_row.devices_indices_map((batch_size,))
    for device, (rows,) in shares.items():
        if device.process_index == process:
            is_local[rows] = True
    return np.flatnonzero(is_local)


def _read(parts: Sequence[Examples], places: Sequence[_Place]) -> Example:
    """The batch of the examples at these places; each part makes its examples in one call."""
    by_part = sorted(range(len(places)), key=lambda row: places[row].part)
    batches = [
        parts[part].batch([places[row].number for row in rows])
        for part, rows in groupby(by_part, lambda row: places[row].part)
    ]
    in_order = np.argsort(by_part)
    return jax.tree.map(lambda *leaves: np.concatenate(leaves)[in_order], *batches)


def train_dataset(mixture: Mixture, batch_size: int, seed: int, rows: Rows) -> grain.MapDataset:
    """A dataset whose element s is `rows` of the global batch of step s."""
    parts = [examples for _, examples in mixture]
    # Places are shuffled, not examples, so a process reads only the rows that it needs. Each part
    # has a seed of its own; otherwise two parts of one size would be in the same order.
    places = [
        grain.MapDataset.range(len(examples))
        .map(partial(_Place, part))
        .seed(seed + part)
        .shuffle()
        .repeat(None)
        for part, examples in enumerate(parts)
    ]
    weights = [weight for weight, _ in mixture]
    order = grain.MapDataset.mix(places, weights) if len(parts) > 1 else places[0]

    def rows_of(step: int) -> Example:
        return _read(parts, [order[row] for row in (step * batch_size + rows).tolist()])

    # This is as good as endless, and the number of the last row is still a valid index.
    return grain.MapDataset.range(maxsize // batch_size).map(rows_of)


def host_batches(dataset: grain.MapDataset, start_step: int, threads: int) -> Iterator[Example]:
    """This process's rows of steps `start_step`, `start_step` + 1, ..., read ahead.

    The order does not depend on the number of threads that read.
    """
    options = grain.ReadOptions(num_threads=threads, prefetch_buffer_size=_PREFETCHED_BATCHES)
    return iter(dataset[start_step:].to_iter_dataset(options))


def train_batches(
    examples: Mixture,
    batch_size: int,
    seed: int,
    start_step: int,
    sharding: NamedSharding,
    threads: int = 1,
) -> Iterator[dict[str, jax.Array]]:
    """Global batches of steps `start_step`, `start_step` + 1, ..., prefetched one ahead."""
    rows = local_rows(sharding, batch_size)
    local = host_batches(train_dataset(examples, batch_size, seed, rows), start_step, threads)
    return prefetch(put_on_devices(batch, rows, batch_size, sharding) for batch in local)


def eval_batches(
    parts: Sequence[Windows],
    batch_size: int,
    sharding: NamedSharding,
    limit: int | None = None,
    title: str = "evaluating",
) -> Iterator[dict[str, jax.Array]]:
    """Every window of every part once, in order; the last batch is filled with masked rows.

    Shows `title`, how many batches (at most `limit`) were taken, and the estimated time left.
    """
    rows = local_rows(sharding, batch_size)
    firsts = np.cumsum([0, *map(len, parts)])  # the number of each part's first window
    count = int(firsts[-1])
    number = min(limit or maxsize, -(-count // batch_size))

    def local_batches() -> Iterator[Example]:
        for first in range(0, number * batch_size, batch_size):
            # Rows beyond the last window repeat it, and are masked, so that batches have one shape.
            windows = np.minimum(first + rows, count - 1)
            part_of = np.searchsorted(firsts, windows, side="right") - 1
            numbers = windows - firsts[part_of]
            batch: Any = _read(parts, list(map(_Place, part_of.tolist(), numbers.tolist())))
            for leaf in batch.values():
                leaf[first + rows >= count] = 0
            yield batch

    local = (put_on_devices(batch, rows, batch_size, sharding) for batch in local_batches())
    return track(prefetch(local), title, number, "batches")


def put_on_devices(
    batch: Example, rows: Rows, batch_size: int, sharding: NamedSharding
) -> dict[str, jax.Array]:
    """The global arrays of which `batch` holds `rows`, the rows of this process.

    Where `mesh.context` splits sequences, a device takes some columns of its rows.
    """

    def to_global(leaf: np.ndarray) -> jax.Array:
        leaf_sharding = NamedSharding(sharding.mesh, PartitionSpec(*sharding.spec[: leaf.ndim]))

        def share(index: tuple[slice, ...] | None) -> np.ndarray:
            assert index is not None  # only devices of other processes have none
            numbers = np.arange(batch_size)[index[0]]
            return leaf[np.searchsorted(rows, numbers)][:, *index[1:]]

        return jax.make_array_from_callback((batch_size, *leaf.shape[1:]), leaf_sharding, share)

    return jax.tree.map(to_global, batch)


def prefetch(batches: Iterator[_Item]) -> Iterator[_Item]:
    """Transfers one batch to the devices while the previous one is used."""
    ahead = next(batches, None)
    while ahead is not None:
        batch, ahead = ahead, next(batches, None)
        yield batch
