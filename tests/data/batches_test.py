"""A batch is a pure function of seed and step, whatever reads it."""

import time
from itertools import islice, product

import grain
import jax
import numpy as np
import pytest
from grain._src.python.testing.experimental import assert_equal_output_after_checkpoint
from helpers import auto_mesh
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import NamedSharding, PartitionSpec
from patience import patience
from row import BORDER, Row

from t5x_diffeq.data.batches import eval_batches, host_batches, train_batches, train_dataset
from t5x_diffeq.data.packing import FirstFitRows, Windows
from t5x_diffeq.data.tokenizer import Border
from t5x_diffeq.system.errors import InputError

TOKENS = np.arange(1, 1000, dtype=np.uint16)
ROW = Row(TOKENS, [500, 1, 98, 400])
WINDOWS = Windows(ROW, 16, "train", BORDER, segments=False)
BATCH = 8


def windows_of(tokens):
    return Windows(Row(TOKENS[:tokens], [tokens]), 16, "train", BORDER, segments=False)


def test_windows_over_shuffled_documents():
    """The row of a shuffled order is those documents one behind the other."""
    windows = Windows(ROW, 16, "validation", BORDER, ragged=True, seed=5)
    row = np.concatenate([ROW[n] for n in windows.order.tolist()])
    assert (row != TOKENS).any()
    inputs = np.concatenate([windows[k]["inputs"] for k in range(len(windows))])
    np.testing.assert_array_equal(inputs[:999], [0, *row[:998]])


def by_row():
    mesh = auto_mesh(data=8)
    return NamedSharding(mesh, PartitionSpec("data"))


def test_windows_predict_each_token_once():
    ragged = Windows(ROW, 16, "validation", BORDER, ragged=True)
    targets = [w["targets"][w["mask"] > 0] for w in (ragged[k] for k in range(len(ragged)))]
    np.testing.assert_array_equal(np.concatenate(targets), TOKENS)
    for k in (0, len(WINDOWS) - 1):
        np.testing.assert_array_equal(WINDOWS[k]["inputs"] + 1, WINDOWS[k]["targets"])


def scatter_rows(processes):
    """The rows of each process: sets that partition the batch, none of neighbours alone."""
    order = np.random.default_rng(processes).permutation(BATCH)
    return [np.sort(rows) for rows in np.split(order, processes)]


def whole_batch(parts, rows):
    """The global batch that processes with these rows read together."""
    numbers = np.argsort(np.concatenate(rows))
    return jax.tree.map(lambda *leaves: np.concatenate(leaves)[numbers], *parts)


@pytest.mark.parametrize("mixture", [[(1.0, WINDOWS)], [(0.3, WINDOWS), (0.7, windows_of(200))]])
@pytest.mark.parametrize("processes", [2, 4])
def test_processes_together_read_what_one_reads(processes, mixture):
    alone = train_dataset(mixture, BATCH, 3, np.arange(BATCH))
    rows = scatter_rows(processes)
    parts = [train_dataset(mixture, BATCH, 3, own) for own in rows]
    for step in range(30):  # across epochs: an epoch has 7.75 batches
        together = whole_batch([part[step] for part in parts], rows)
        jax.tree.map(np.testing.assert_array_equal, together, alone[step])


def test_grains_own_check_of_restored_iterators():
    dataset = train_dataset([(0.3, WINDOWS), (0.7, windows_of(200))], BATCH, 3, np.arange(BATCH))
    options = grain.ReadOptions(num_threads=2, prefetch_buffer_size=4)
    assert_equal_output_after_checkpoint(dataset[3:9].to_iter_dataset(options))


def test_an_epoch_is_every_window_once_in_another_order_each_time():
    dataset = train_dataset([(1.0, windows_of(16 * 32 + 1))], BATCH, 0, np.arange(BATCH))
    epochs = [
        np.concatenate([dataset[4 * epoch + s]["inputs"][:, 0] for s in range(4)])
        for epoch in range(2)
    ]
    np.testing.assert_array_equal(np.sort(epochs[0]), np.sort(epochs[1]))
    assert (epochs[0] != epochs[1]).any()
    assert len(set(epochs[0].tolist())) == 32


def test_evaluation_covers_the_split_whatever_the_batch_size():
    windows = Windows(ROW, 16, "validation", BORDER, ragged=True)
    for batch_size in (8, 24):
        batches = list(eval_batches([windows], batch_size, by_row()))
        targets = [np.asarray(b["targets"])[np.asarray(b["mask"]) > 0] for b in batches]
        np.testing.assert_array_equal(np.concatenate(targets), TOKENS)
        assert {b["inputs"].shape for b in batches} == {(batch_size, 16)}
    assert len(list(eval_batches([windows], 8, by_row(), limit=2))) == 2


def test_sequences_longer_than_the_data():
    with pytest.raises(InputError, match=r"sequence_length=16 needs 16 tokens.*train split has 9"):
        windows_of(9)


def documents(count, seed):
    """Documents of random lengths, 0 at the end of each and nowhere else."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, 60, count)
    tokens = rng.integers(1, 50_000, lengths.sum()).astype(np.uint16)
    tokens[np.cumsum(lengths) - 1] = 0
    return Row(tokens, lengths)


def two_sources(packing):
    """7 parts of one source, 3 of another, attention within documents."""
    parts = [documents(300, 1), documents(90, 2)]
    if packing == "first_fit":
        examples = [FirstFitRows(part, 32, "train", BORDER, 5) for part in parts]
    else:
        examples = [Windows(part, 32, "train", BORDER, seed=5) for part in parts]
    return list(zip((0.7, 0.3), examples, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("packing", ["concat_then_split", "first_fit"])
def test_batches_are_the_same_for_any_processes_and_threads(packing):
    """Steps 0 to 200 of a mixture of two sources."""
    mixture = two_sources(packing)

    def batches(rows, threads=1, start=0):
        dataset = train_dataset(mixture, BATCH, 3, rows)
        return list(islice(host_batches(dataset, start, threads), 201 - start))

    alone = batches(np.arange(BATCH))
    assert set(alone[0]) == {"inputs", "targets", "mask", "segments", "positions"}
    for processes, threads in ((1, 4), (2, 1), (4, 0), (4, 2)):
        rows = scatter_rows(processes)
        parts = [batches(own, threads) for own in rows]
        for step, expected in enumerate(alone):
            together = whole_batch([part[step] for part in parts], rows)
            jax.tree.map(np.testing.assert_array_equal, together, expected)
    for expected, found in zip(alone[150:], batches(np.arange(BATCH), start=150), strict=True):
        jax.tree.map(np.testing.assert_array_equal, expected, found)


def test_a_mixture_has_its_shares():
    mixture = two_sources("concat_then_split")
    whole = np.concatenate([documents(300, 1).tokens, documents(90, 2).tokens])
    second = {tuple(w["targets"]) for w in (mixture[1][1][k] for k in range(len(mixture[1][1])))}
    assert len(whole) > 9000
    dataset = train_dataset(mixture, BATCH, 3, np.arange(BATCH))
    targets = np.concatenate([dataset[step]["targets"] for step in range(50)])
    from_second = sum(tuple(row) in second for row in targets)
    assert abs(from_second - 0.3 * len(targets)) <= 1


def test_starting_late_takes_no_time():
    """Two million documents, step 150 and step 100,000."""
    lengths = np.random.default_rng(0).integers(1, 400, 2_000_000)
    row = Row(np.zeros(lengths.sum(), np.uint8), lengths)
    mixture = [(1.0, Windows(row, 64, "train", BORDER, seed=0))]
    for step in (150, 100_000):
        begun = time.perf_counter()
        next(train_batches(mixture, BATCH, 0, step, by_row()))
        assert time.perf_counter() - begun < patience(2)


def test_segments_part_documents():
    """`end_of_text` closes a document as a target and opens the next as an input."""
    row = Row(np.array([5, 6, 0, 7, 0, 8, 9, 3, 0]), [3, 2, 4])
    first, second = islice(Windows(row, 4, "train", BORDER), 2)
    assert first["inputs"].tolist() == [0, 5, 6, 0]
    assert first["targets"].tolist() == [5, 6, 0, 7]
    assert first["segments"].tolist() == [1, 1, 1, 2]
    assert first["positions"].tolist() == [0, 1, 2, 0]
    assert second["inputs"].tolist() == [7, 0, 8, 9]
    assert second["targets"].tolist() == [0, 8, 9, 3]
    assert second["positions"].tolist() == [0, 0, 1, 2]
    for segments, end in product((True, False), (0, 2)):  # another token may open documents
        ended = Row(np.where(row.tokens == 0, end, row.tokens), row.lengths)
        opened = Windows(ended, 4, "train", Border(end=end, opener=1), segments=segments)
        assert opened[0]["inputs"].tolist() == [1, 5, 6, 1]
        assert opened[0]["targets"].tolist() == [5, 6, end, 7]
        assert opened[1]["inputs"].tolist() == [7, 1, 8, 9]
    packed = FirstFitRows(row, 4, "train", Border(end=0, opener=1), 0)
    for k in range(len(packed)):
        assert (packed[k]["inputs"][packed[k]["positions"] == 0] == 1).all()
        assert 0 not in packed[k]["inputs"]


@settings(max_examples=50, deadline=None)
@given(lengths=st.lists(st.integers(1, 40), min_size=1, max_size=60), seed=st.integers(0, 9))
def test_first_fit_places_every_token_once(lengths, seed):
    """No document that fits is split, and targets follow their inputs."""
    tokens = np.arange(1, sum(lengths) + 1, dtype=np.int64)
    tokens[np.cumsum(lengths) - 1] = 0
    row = Row(tokens, lengths)
    packed = FirstFitRows(row, 16, "train", BORDER, seed)
    windows = [packed[k] for k in range(len(packed))]
    found = np.concatenate([w["targets"][w["mask"] > 0] for w in windows])
    np.testing.assert_array_equal(np.sort(found), np.sort(tokens))
    for w in windows:
        real = w["mask"] > 0
        opened = w["positions"] == 0
        previous = w["targets"][:-1]
        follows = real[1:] & ~opened[1:]
        np.testing.assert_array_equal(w["inputs"][1:][follows], previous[follows])
        assert np.all(w["inputs"][~real] == 0)
    for number, length in enumerate(lengths):
        if 1 < length <= 16:
            document = row[number][:-1]
            assert any(set(document) <= set(w["targets"].tolist()) for w in windows)
    assert len(packed) <= len(lengths) + sum(lengths) // 16
