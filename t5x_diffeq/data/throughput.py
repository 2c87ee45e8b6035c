"""How fast batches are made on the host, against plain Grain doing the same work."""

import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import cycle
from pathlib import Path

import grain
import numpy as np
from ml_collections import ConfigDict

from t5x_diffeq.data.corpus import Corpus, prepare_corpus
from t5x_diffeq.data.examples import train_examples
from t5x_diffeq.data.pipeline import host_batches, train_dataset
from t5x_diffeq.data.preparation import tokenised
from t5x_diffeq.data.shards import ShardedDocuments
from t5x_diffeq.data.sources import load_source

SECONDS = 1.0  # of each in a round
WARM_UP = 10  # batches
Work = Iterator[int]  # numbers of tokens, as they are ready


def measure(data: ConfigDict, batch_size: int, seed: int, folder: Path, rounds: int) -> dict:
    """Tokens per second, the median of rounds in which all take turns.

    Args:
      data: `config.data`.
      batch_size: rows of a batch.
      seed: of the order.
      folder: where the corpus is prepared.
      rounds: turns of each.

    Returns:
      By name: `pipeline` (batches from token shards), `plain_grain` (likewise, by Grain's own
      shuffle and packing), and `tokenising` (documents to tokens) unless the data is shards.
    """
    corpus = prepare_corpus(data, folder, new=True)
    dataset = train_dataset(train_examples(data, corpus, seed), batch_size, seed, range(batch_size))
    works = {
        "pipeline": from_batches(host_batches(dataset, 0, data.read_threads)),
        "plain_grain": plain_grain(corpus.parts[0].train, data, batch_size, seed),
    }
    if data.source not in ("tokens", "mixture"):
        works["tokenising"] = tokenising(data, corpus)
    for work in works.values():
        for _ in range(WARM_UP):
            next(work)
    rates: dict[str, list[float]] = {name: [] for name in works}
    for _ in range(rounds):
        for name, work in works.items():
            rates[name].append(rate(work))
    return {name: statistics.median(each) for name, each in rates.items()}


def rate(work: Work) -> float:
    """Tokens per second over about `SECONDS`."""
    begun, tokens = time.perf_counter(), 0
    while time.perf_counter() - begun < SECONDS:
        tokens += next(work)
    return tokens / (time.perf_counter() - begun)


def from_batches(batches: Iterator[dict]) -> Work:
    """The tokens of each batch."""
    for batch in batches:
        yield batch["inputs"].size


def plain_grain(documents: ShardedDocuments, data: ConfigDict, batch_size: int, seed: int) -> Work:
    """Documents shuffled, decoded, concatenated, split and batched by Grain alone."""

    def shifted(record: bytes) -> dict[str, np.ndarray]:
        tokens = np.frombuffer(record, documents.dtype).astype(np.int32)
        return {"inputs": tokens[:-1], "targets": tokens[1:]}

    lengths = {"inputs": data.sequence_length, "targets": data.sequence_length}
    read: Callable = grain.MapDataset.source(documents.records).seed(seed).shuffle().repeat
    options = grain.ReadOptions(num_threads=data.read_threads, prefetch_buffer_size=64)
    rows = read(None).map(shifted).to_iter_dataset(options)
    packed = grain.experimental.ConcatThenSplitIterDataset(rows, length_struct=lengths)
    return from_batches(iter(packed.batch(batch_size)))


def tokenising(data: ConfigDict, corpus: Corpus) -> Work:
    """The documents of the source, over and over, by all cores."""
    source = load_source(data)
    for tokens in tokenised(cycle(source.train), corpus.tokenizer, Counter()):
        yield len(tokens)
