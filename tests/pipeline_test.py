"""A batch is a pure function of seed and step, whatever reads it."""

from itertools import islice

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from t5x_diffeq.data.packing import DocumentsInRow, Windows
from t5x_diffeq.data.pipeline import eval_batches, own_rows, train_batches, train_dataset
from t5x_diffeq.errors import InputError

TOKENS = np.arange(1, 1000, dtype=np.uint16)
ROW = DocumentsInRow(TOKENS, np.array([500, 1, 98, 400]))
WINDOWS = Windows(ROW, 16, "train")
BATCH = 8


def windows_of(tokens):
    return Windows(DocumentsInRow(TOKENS[:tokens], np.array([tokens])), 16, "train")


def test_windows_over_shuffled_documents():
    """The row of a shuffled order is those documents one behind the other."""
    windows = Windows(ROW, 16, "validation", ragged=True, seed=5)
    row = np.concatenate([ROW[n] for n in windows.order.tolist()])
    assert (row != TOKENS).any()
    inputs = np.concatenate([windows[k]["inputs"] for k in range(len(windows))])
    np.testing.assert_array_equal(inputs[:998], row[:998])


def by_row():
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    return NamedSharding(mesh, PartitionSpec("data"))


def test_windows_predict_each_token_once():
    ragged = Windows(ROW, 16, "validation", ragged=True)
    targets = [w["targets"][w["mask"] > 0] for w in (ragged[k] for k in range(len(ragged)))]
    np.testing.assert_array_equal(np.concatenate(targets), TOKENS[1:])
    for k in (0, len(WINDOWS) - 1):
        np.testing.assert_array_equal(WINDOWS[k]["inputs"] + 1, WINDOWS[k]["targets"])


@pytest.mark.parametrize("processes", [2, 4])
def test_processes_together_read_what_one_reads(processes):
    alone = train_dataset(WINDOWS, BATCH, seed=3, rows=range(BATCH))
    size = BATCH // processes
    parts = [
        train_dataset(WINDOWS, BATCH, seed=3, rows=range(p * size, (p + 1) * size))
        for p in range(processes)
    ]
    for step in range(30):  # across epochs: an epoch has 7.75 batches
        together = np.concatenate([part[step]["inputs"] for part in parts])
        np.testing.assert_array_equal(together, alone[step]["inputs"])


def test_starting_at_a_step_is_running_there():
    from_start = train_batches(WINDOWS, BATCH, 3, 0, by_row())
    there = train_batches(WINDOWS, BATCH, 3, 12, by_row())
    for expected, found in zip(islice(from_start, 12, 15), there, strict=False):
        np.testing.assert_array_equal(expected["inputs"], found["inputs"])


def test_an_epoch_is_every_window_once_in_another_order_each_time():
    dataset = train_dataset(windows_of(16 * 32 + 1), BATCH, 0, range(BATCH))
    epochs = [
        np.concatenate([dataset[4 * epoch + s]["inputs"][:, 0] for s in range(4)])
        for epoch in range(2)
    ]
    np.testing.assert_array_equal(np.sort(epochs[0]), np.sort(epochs[1]))
    assert (epochs[0] != epochs[1]).any()
    assert len(set(epochs[0].tolist())) == 32


def test_evaluation_covers_the_split_whatever_the_batch_size():
    windows = Windows(ROW, 16, "validation", ragged=True)
    for batch_size in (8, 24):
        batches = list(eval_batches(windows, batch_size, by_row()))
        targets = [np.asarray(b["targets"])[np.asarray(b["mask"]) > 0] for b in batches]
        np.testing.assert_array_equal(np.concatenate(targets), TOKENS[1:])
        assert {b["inputs"].shape for b in batches} == {(batch_size, 16)}
    assert len(list(eval_batches(windows, 8, by_row(), limit=2))) == 2


def test_own_rows_of_one_process_are_all():
    assert own_rows(by_row(), 16) == range(16)


def test_sequences_longer_than_the_data():
    with pytest.raises(
        InputError, match=r"sequence_length=16 needs 16 \+ 1 tokens.*train split has 9"
    ):
        windows_of(9)
