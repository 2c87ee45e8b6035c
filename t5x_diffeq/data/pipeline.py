"""The Grain pipeline: the batch of a step as a pure function of seed and step.

Global batch s consists of examples s*B .. s*B + B - 1 of a shuffled, endlessly repeated epoch; each
process reads its own rows of it. So the state of the data is one number, the step, whatever the
number of processes.
"""

from collections.abc import Iterable, Iterator
from itertools import islice

import grain
import jax
import numpy as np
from jax.sharding import NamedSharding

from t5x_diffeq.data.packing import Example, Windows

PREFETCHED_BATCHES = 8


def own_rows(sharding: NamedSharding, batch_size: int) -> range:
    """The rows of a global batch that this process's devices hold."""
    slices = sharding.addressable_devices_indices_map((batch_size,)).values()
    bounds = [index.indices(batch_size) for (index,) in slices]
    return range(min(start for start, _, _ in bounds), max(stop for _, stop, _ in bounds))


def train_dataset(windows: Windows, batch_size: int, seed: int, rows: range) -> grain.MapDataset:
    """Element s is this process's `rows` of the global batch of step s.

    Args:
      windows: the examples.
      batch_size: rows of the global batch.
      seed: decides the order of examples.
      rows: this process's rows: an equal part of the batch, as long as each other's.
    """
    parts = batch_size // len(rows)
    examples = grain.MapDataset.source(windows).seed(seed).shuffle().repeat(None)
    return examples.batch(len(rows))[rows.start // len(rows) :: parts]


def train_batches(
    windows: Windows, batch_size: int, seed: int, start_step: int, sharding: NamedSharding
) -> Iterator[dict[str, jax.Array]]:
    """Global batches of steps `start_step`, `start_step` + 1, ..., one ahead of their use."""
    rows = own_rows(sharding, batch_size)
    dataset = train_dataset(windows, batch_size, seed, rows)[start_step:]
    options = grain.ReadOptions(num_threads=1, prefetch_buffer_size=PREFETCHED_BATCHES)
    return prefetch(to_devices(dataset.to_iter_dataset(options), batch_size, sharding))


def eval_batches(
    windows: Windows, batch_size: int, sharding: NamedSharding, limit: int | None = None
) -> Iterator[dict[str, jax.Array]]:
    """Every window once, in order; the last batch is filled up with masked rows.

    Args:
      windows: the examples.
      batch_size: rows of a global batch.
      sharding: of the batches.
      limit: at most so many batches.
    """
    rows = own_rows(sharding, batch_size)
    blank = jax.tree.map(np.zeros_like, windows[0])

    def local_batches() -> Iterator[Example]:
        for first in range(0, len(windows), batch_size):
            numbers = range(first + rows.start, first + rows.stop)
            examples = [windows[k] if k < len(windows) else blank for k in numbers]
            yield jax.tree.map(lambda *leaves: np.stack(leaves), *examples)

    return prefetch(to_devices(islice(local_batches(), limit), batch_size, sharding))


def to_devices(
    batches: Iterable[Example], batch_size: int, sharding: NamedSharding
) -> Iterator[dict[str, jax.Array]]:
    """Global arrays from each process's rows."""
    for batch in batches:
        yield {
            name: jax.make_array_from_process_local_data(
                sharding, leaf, (batch_size, *leaf.shape[1:])
            )
            for name, leaf in batch.items()
        }


def prefetch(batches: Iterator[dict[str, jax.Array]]) -> Iterator[dict[str, jax.Array]]:
    """Keeps one batch on its way to the devices while the one before is used."""
    ahead = next(batches, None)
    while ahead is not None:
        batch, ahead = ahead, next(batches, None)
        yield batch
