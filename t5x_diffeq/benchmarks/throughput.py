"""How fast batches are made on the host, compared with plain Grain doing the same work."""

import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from itertools import cycle
from pathlib import Path
from typing import Any

import grain
import numpy as np

from t5x_diffeq.data.batches import host_batches, train_dataset
from t5x_diffeq.data.corpus import prepare_corpus
from t5x_diffeq.data.documents import Documents
from t5x_diffeq.data.encoding import TextEncoder
from t5x_diffeq.data.examples import train_examples
from t5x_diffeq.data.preparation import tokenise_documents
from t5x_diffeq.data.sources import load_source
from t5x_diffeq.runtime.config import DataKeys

SECONDS = 1.0  # for each measurement in a round
LEAD_IN = 0.5  # seconds before it, so that what was read ahead in between doesn't count
_WARM_UP_BATCHES = 10  # batches
Work = Iterator[int]  # numbers of tokens, as they become ready


def measure(data: DataKeys, batch_size: int, seed: int, folder: Path, rounds: int) -> dict:
    """Tokens per second of each method, the median of rounds in which they take turns.

    Args:
      data: `config.data`.
      batch_size: rows in a batch.
      seed: determines the order of documents.
      folder: where the corpus is prepared.
      rounds: number of rounds.

    Returns:
      By name: `pipeline` (batches from token shards), `plain_grain` (the same, by Grain's own
      shuffle and packing); and unless the data is shards, `tokenising` (documents to tokens).
    """
    corpus = prepare_corpus(data, folder, new=True)
    examples, tokens = train_examples(data, corpus, batch_size, seed), corpus.parts[0].train
    dataset = train_dataset(examples, batch_size, seed, np.arange(batch_size))

    def tokens_of(record: bytes) -> np.ndarray:
        return np.frombuffer(record, tokens.dtype).astype(np.int32)

    records, threads = grain.MapDataset.source(tokens.records), data.read_threads
    works = {
        "pipeline": _count_tokens(host_batches(dataset, 0, threads)),
        "plain_grain": _plain_grain(records, tokens_of, data, batch_size, seed, threads),
    }
    if data.source not in ("tokens", "mixture") and data.loss_on == "all":  # Grain knows no chat
        encoder = TextEncoder(corpus.tokenizer)
        works["tokenising"] = _tokenise_over_and_over(load_source(data).train, encoder)
    for work in works.values():
        for _ in range(_WARM_UP_BATCHES):
            next(work)
    rates: dict[str, list[float]] = {name: [] for name in works}
    for _ in range(rounds):
        for name, work in works.items():
            rates[name].append(rate(work))
    return {name: statistics.median(each) for name, each in rates.items()}


def rate(work: Work) -> float:
    """Tokens per second over about `SECONDS`."""
    start, tokens = time.perf_counter(), 0
    while time.perf_counter() - start < LEAD_IN:
        next(work)
    start = time.perf_counter()
    while time.perf_counter() - start < SECONDS:
        tokens += next(work)
    return tokens / (time.perf_counter() - start)


def _count_tokens(batches: Iterator[Mapping[str, Any]]) -> Work:
    for batch in batches:
        yield batch["inputs"].size


def _plain_grain(
    documents: grain.MapDataset,
    tokens_of: Callable[[Any], np.ndarray],
    data: DataKeys,
    batch_size: int,
    seed: int,
    threads: int,
) -> Work:
    """Documents shuffled, tokenised, concatenated, split and batched by Grain alone.

    Args:
      documents: what Grain reads.
      tokens_of: returns the tokens of a document.
      data: `config.data`.
      batch_size: rows in a batch.
      seed: determines the order of documents.
      threads: number of threads that read and call `tokens_of`.
    """

    def shift(document: object) -> dict[str, np.ndarray]:
        tokens = tokens_of(document)
        return {"inputs": tokens[:-1], "targets": tokens[1:]}

    lengths = {"inputs": data.sequence_length, "targets": data.sequence_length}
    read = documents.seed(seed).shuffle().repeat(None)
    options = grain.ReadOptions(num_threads=threads, prefetch_buffer_size=64)
    rows = read.map(shift).to_iter_dataset(options)
    packed = grain.experimental.ConcatThenSplitIterDataset(rows, length_struct=lengths)
    return _count_tokens(iter(packed.batch(batch_size)))


def _tokenise_over_and_over(documents: Documents, encoder: TextEncoder) -> Work:
    for tokens in tokenise_documents(cycle(documents), encoder, Counter()):
        yield len(tokens)
