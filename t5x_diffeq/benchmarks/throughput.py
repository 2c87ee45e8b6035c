"""How fast batches are made on the host, compared with plain Grain doing the same work."""

import os
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from copy import copy
from dataclasses import replace
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
from t5x_diffeq.data.shards import ShardedDocuments
from t5x_diffeq.data.sources import Source, load_source
from t5x_diffeq.data.streams import RowStreams
from t5x_diffeq.data.text_faults import find_text_fault
from t5x_diffeq.data.tokenizer import Tokenizer
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
      shuffle and packing); and unless the data is shards, `tokenising` (documents to tokens),
      `in_loop` (batches from documents) and `grain_tokenising` (the same, by Grain).
    """
    data = replace(data, tokenize="ahead")
    corpus = prepare_corpus(data, folder, new=True)
    examples, tokens = train_examples(data, corpus, batch_size, seed), corpus.parts[0].train
    assert not isinstance(examples, RowStreams)  # tokenised ahead of training
    assert isinstance(tokens, ShardedDocuments)
    dataset = train_dataset(examples, batch_size, seed, np.arange(batch_size))

    def tokens_of(record: bytes) -> np.ndarray:
        return np.frombuffer(record, tokens.dtype).astype(np.int32)

    records, threads = grain.MapDataset.source(tokens.records), data.read_threads
    works = {
        "pipeline": _count_tokens(host_batches(dataset, 0, threads)),
        "plain_grain": plain_grain(records, tokens_of, data, batch_size, seed, threads),
    }
    if data.source not in ("tokens", "mixture") and data.loss_on == "all":  # Grain knows no chat
        works |= _text_methods(load_source(data), corpus.tokenizer, data, batch_size, seed)
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


def plain_grain(
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


def _text_methods(
    source: Source, tokenizer: Tokenizer, data: DataKeys, batch_size: int, seed: int
) -> dict[str, Work]:
    """The methods that tokenise documents: alone, in the loop, and in Grain's read threads."""
    encoder = TextEncoder(tokenizer)
    works = {"tokenising": _tokenise_over_and_over(source.train, encoder)}
    if source.one_by_one and len(source.train) >= batch_size:
        streams = RowStreams(source.train, encoder, data.sequence_length, batch_size, seed)
        in_loop = streams.batches(np.arange(batch_size), 0, None)
        works["in_loop"] = _count_tokens(batch for batch, _ in in_loop)
        works["grain_tokenising"] = _tokenise_with_grain(source, tokenizer, data, batch_size, seed)
    return works


def _tokenise_with_grain(
    source: Source, tokenizer: Tokenizer, data: DataKeys, batch_size: int, seed: int
) -> Work:
    """Documents tokenised and packed by Grain alone, on all cores."""
    each = copy(tokenizer)
    each.threads = 1  # there are many read threads already

    def tokens_of(text: str) -> np.ndarray:
        return np.append(each.encode([text])[0], tokenizer.end_of_text)

    documents = grain.MapDataset.source(source.train).filter(lambda text: not find_text_fault(text))
    return plain_grain(documents, tokens_of, data, batch_size, seed, os.cpu_count() or 1)


def _tokenise_over_and_over(documents: Documents, encoder: TextEncoder) -> Work:
    for tokens in tokenise_documents(cycle(documents), encoder, Counter()):
        yield len(tokens)
