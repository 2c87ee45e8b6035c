"""The Grain pipeline: the batch of a step as a pure function of seed and step.

Global batch s consists of examples s*B .. s*B + B - 1 of a shuffled, endlessly repeated epoch; each
process reads its own rows of it. So the state of the data is one number, the step, whatever the
number of processes. (Of documents that are tokenised in the loop, it is `streams.Places`.)
"""

from collections.abc import Iterator, Sequence
from itertools import islice
from typing import TypeVar

import grain
import jax
import numpy as np
from jax.sharding import NamedSharding

from t5x_diffeq.data.packing import Example, FirstFitRows, Windows
from t5x_diffeq.data.streams import Places, RowStreams

PREFETCHED_BATCHES = 8
Examples = Windows | FirstFitRows
Mixture = Sequence[tuple[float, Examples]]  # weights and what they weigh
Item = TypeVar("Item")


def own_rows(sharding: NamedSharding, batch_size: int) -> range:
    """The rows of a global batch that this process's devices hold."""
    slices = sharding.addressable_devices_indices_map((batch_size,)).values()
    bounds = [index.indices(batch_size) for (index,) in slices]
    return range(min(start for start, _, _ in bounds), max(stop for _, stop, _ in bounds))


def train_dataset(mixture: Mixture, batch_size: int, seed: int, rows: range) -> grain.MapDataset:
    """Element s is this process's `rows` of the global batch of step s.

    Args:
      mixture: the examples of each part, and its share of all examples.
      batch_size: rows of the global batch.
      seed: decides the order of examples.
      rows: this process's rows: an equal part of the batch, as long as each other's.
    """
    each = [
        grain.MapDataset.source(examples).seed(seed + number).shuffle().repeat(None)
        for number, (_, examples) in enumerate(mixture)
    ]
    weights = [weight for weight, _ in mixture]
    examples = grain.MapDataset.mix(each, weights) if len(each) > 1 else each[0]
    parts = batch_size // len(rows)
    return examples.batch(len(rows))[rows.start // len(rows) :: parts]


def host_batches(dataset: grain.MapDataset, start_step: int, threads: int) -> Iterator[Example]:
    """This process's rows of steps `start_step`, `start_step` + 1, ..., read ahead.

    Args:
      dataset: as `train_dataset` makes it.
      start_step: the first.
      threads: that read; the order does not depend on them.
    """
    options = grain.ReadOptions(num_threads=threads, prefetch_buffer_size=PREFETCHED_BATCHES)
    return iter(dataset[start_step:].to_iter_dataset(options))


def train_batches(
    examples: Mixture | RowStreams,
    batch_size: int,
    seed: int,
    start_step: int,
    sharding: NamedSharding,
    threads: int = 1,
    places: list | None = None,
) -> Iterator[tuple[dict[str, jax.Array], Places | None]]:
    """Global batches of steps `start_step`, `start_step` + 1, ..., one ahead of their use.

    Args:
      examples: what they are made of.
      batch_size: rows of the global batch.
      seed: decides the order of a mixture's examples.
      start_step: the first.
      sharding: of the batches.
      threads: that read a mixture.
      places: where rows that are streams stood after step `start_step` - 1.

    Yields:
      A batch, and where the streams stand after it.
    """
    rows = own_rows(sharding, batch_size)
    if isinstance(examples, RowStreams):
        local = examples.batches(rows, start_step, places)
    else:
        dataset = train_dataset(examples, batch_size, seed, rows)
        local = ((batch, None) for batch in host_batches(dataset, start_step, threads))
    return prefetch((to_devices(batch, batch_size, sharding), after) for batch, after in local)


def eval_batches(
    parts: Sequence[Windows], batch_size: int, sharding: NamedSharding, limit: int | None = None
) -> Iterator[dict[str, jax.Array]]:
    """Every window of every part once, in order; the last batch is filled with masked rows.

    Args:
      parts: the examples of each part.
      batch_size: rows of a global batch.
      sharding: of the batches.
      limit: at most so many batches.
    """
    rows = own_rows(sharding, batch_size)
    windows = grain.MapDataset.concatenate([grain.MapDataset.source(part) for part in parts])
    blank = jax.tree.map(np.zeros_like, windows[0])

    def local_batches() -> Iterator[Example]:
        for first in range(0, len(windows), batch_size):
            numbers = range(first + rows.start, first + rows.stop)
            examples = [windows[k] if k < len(windows) else blank for k in numbers]
            yield jax.tree.map(lambda *leaves: np.stack(leaves), *examples)

    local = islice(local_batches(), limit)
    return prefetch(to_devices(batch, batch_size, sharding) for batch in local)


def to_devices(batch: Example, batch_size: int, sharding: NamedSharding) -> dict[str, jax.Array]:
    """Global arrays from each process's rows."""
    return {
        name: jax.make_array_from_process_local_data(sharding, leaf, (batch_size, *leaf.shape[1:]))
        for name, leaf in batch.items()
    }


def prefetch(batches: Iterator[Item]) -> Iterator[Item]:
    """Keeps one batch on its way to the devices while the one before is used."""
    ahead = next(batches, None)
    while ahead is not None:
        batch, ahead = ahead, next(batches, None)
        yield batch
