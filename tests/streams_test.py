"""Tokenising in the loop: rows of documents that depend on the seed and the batch size alone."""

import shutil
import signal
from collections import Counter
from itertools import islice

import jax
import numpy as np
import pytest
from helpers import corpus_of, metrics_of, send_after, small_config
from row import Row as Documents

from t5x_diffeq.benchmarks import throughput
from t5x_diffeq.data import encoding, streams
from t5x_diffeq.data.encoding import TextEncoder
from t5x_diffeq.data.packing import Windows
from t5x_diffeq.data.streams import RowStreams, document_at, gather_positions
from t5x_diffeq.data.tokenizer import ByteTokenizer
from t5x_diffeq.runs.load import load_run
from t5x_diffeq.runtime.config import Config
from t5x_diffeq.runtime.errors import InputError
from t5x_diffeq.verbs.train import train

BATCH, LENGTH = 8, 16
NO_TEXT = ["", " \n", "\0", "\udcff"]
ALL_ROWS = np.arange(BATCH)
TEXTS = [f"<{n}>" + "abcdefg " * (n * n % 23) for n in range(40)]


def rows_of(texts, batch_size=BATCH, **options):
    return RowStreams(texts, TextEncoder(ByteTokenizer()), LENGTH, batch_size, seed=3, **options)


def run(texts, count, rows=ALL_ROWS, step=0, positions=None, **options):
    """So many batches, each with the positions after it."""
    found = rows_of(texts, **options).batches(rows, step, positions)
    return list(islice(found, count))


def assert_equal(expected, found):
    jax.tree.map(np.testing.assert_array_equal, expected, found)


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    """Several blocks of batches for one process, and other ones for two."""
    monkeypatch.setattr(streams, "BLOCK_TOKENS", 5 * BATCH * LENGTH)


@pytest.mark.parametrize("processes", [2, 4])
def test_any_number_of_processes_reads_the_same(processes, monkeypatch):
    """Steps 0 to 50, which end in the second epoch."""
    alone, size = run(TEXTS + NO_TEXT, 51), BATCH // processes
    parts = [run(TEXTS + NO_TEXT, 51, np.arange(p, p + size)) for p in range(0, BATCH, size)]
    for step, (expected, positions) in enumerate(alone):
        for name, leaf in expected.items():
            together = np.concatenate([part[step][0][name] for part in parts])
            np.testing.assert_array_equal(together, leaf)
        each = np.stack([part[step][1] for part in parts])
        monkeypatch.setattr(streams, "process_allgather", lambda _, e=each: e.view(np.int32))
        assert gather_positions(each[0]) == positions.tolist()
    assert positions[:, 0].min() * BATCH > len(TEXTS + NO_TEXT)


@pytest.mark.parametrize("step", [1, 5, 33])
def test_starting_at_positions_is_running_there(step):
    undisturbed = run(TEXTS, 51)
    resumed = run(TEXTS, 51 - step, step=step, positions=gather_positions(undisturbed[step - 1][1]))
    assert_equal(undisturbed[step:], resumed)


def test_starting_at_positions_reads_no_document_before():
    class Recorded(list):
        def __getitem__(self, number):
            read.append(number)
            return super().__getitem__(number)

    read, texts = [], Recorded(TEXTS * 10)  # more than are read here
    positions = run(texts, 16)[-1][1]
    resumed = rows_of(texts)
    read.clear()
    next(resumed.batches(np.arange(BATCH), 16, positions.tolist()))
    before = {
        document_at(400, 3, r + BATCH * k) for r in range(BATCH) for k in range(positions[r, 0])
    }
    assert len(before) > BATCH
    assert len(read) >= BATCH
    assert not before & set(read)


def test_each_epoch_reads_every_document_once():
    steps = run(TEXTS, 51)
    for r in range(BATCH):
        row = np.concatenate([batch["inputs"][r] for batch, _ in steps])
        order = [document_at(40, 3, r + BATCH * k) for k in range(9)]
        text = "".join(TEXTS[number] + "\0" for number in order)[: len(row)]
        assert ByteTokenizer().decode(row[: len(text)]) == text
    orders = [[document_at(40, 3, 40 * epoch + n) for n in range(40)] for epoch in range(3)]
    assert all(sorted(order) == list(range(40)) for order in orders)
    assert orders[0] != orders[1] != orders[2]


@pytest.mark.parametrize("cross_documents", [False, True])
def test_windows_are_those_of_documents_tokenised_ahead(cross_documents):
    texts = [TEXTS[document_at(40, 3, n)] + "\0" for n in range(40)]
    tokens = np.frombuffer("".join(texts).encode(), np.uint8)
    end = None if cross_documents else 0
    ahead = Windows(Documents(tokens, [*map(len, texts)]), LENGTH, "train", end_of_text=end)
    found = run(TEXTS, len(ahead), np.arange(1), batch_size=1, cross_documents=cross_documents)
    for k, (batch, _) in enumerate(found):
        window = ahead[k]
        assert batch.keys() == window.keys()
        for name, leaf in window.items():
            np.testing.assert_array_equal(batch[name][0], leaf)
            assert batch[name].dtype == leaf.dtype


def test_what_is_no_text_is_skipped_and_counted_now_and_then(capsys):
    found = run(TEXTS + NO_TEXT, 51)
    inputs = np.concatenate([batch["inputs"] for batch, _ in found], axis=1)
    starts = Counter(ByteTokenizer().decode(inputs.ravel()).split("<"))
    assert starts.keys() & {"\0\0"} == set()
    told = [line for line in capsys.readouterr().err.splitlines() if "skipped so far" in line]
    assert 1 <= len(told) <= 4
    assert "with a NUL character" in told[-1]


def test_enormous_documents_are_read_in_pieces(monkeypatch):
    texts = ["line of words\n" * 40 + str(n) for n in range(BATCH)]
    whole = run(texts, 60)
    for module in (encoding, streams):
        monkeypatch.setattr(module, "PIECE_CHARACTERS", 50)
    assert_equal(whole, run(texts, 60))
    assert_equal(whole[30:], run(texts, 30, step=30, positions=whole[29][1].tolist()))


def test_documents_that_can_not_be_rows():
    with pytest.raises(InputError, match=r"no document to train on: 4 empty, .*give text"):
        rows_of(NO_TEXT[:2] * 2 + NO_TEXT[2:] * 4)
    with pytest.raises(InputError, match=r"each of the 8 rows .* there are 7; set data.tokenize"):
        rows_of(TEXTS[:7])
    for positions in (None, [[0, 0]] * 7, [[-1, -1]] * 8):
        with pytest.raises(InputError, match=r"checkpoint 3 does not say where the 8 rows stand"):
            run(TEXTS, 1, step=3, positions=positions)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Documents in a file of lines, and one that is none."""
    path = tmp_path_factory.mktemp("texts")
    texts = [f"line {n} of the text, {n * n} squared. " * (n % 7 + 1) for n in range(60)]
    (path / "a.jsonl").write_text("".join(f'{{"text": "{text}"}}\n' for text in [*texts, " "]))
    return path


def in_loop_config(folder):
    """A run that tokenises its documents as it needs them."""
    config = small_config(folder)
    config.data.tokenize = "in_loop"
    config.model.dropout_rate = 0.1
    config.mesh.fsdp = 1
    return config


@pytest.fixture
def config(folder):
    return in_loop_config(folder)


@pytest.fixture(scope="module")
def reference_run(folder, tmp_path_factory):
    workdir = tmp_path_factory.mktemp("undisturbed")
    assert train(Config.of(in_loop_config(folder)), workdir) == 0
    return workdir


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "status"),
    [(signal.SIGTERM, 42), (signal.SIGINT, 130)],
)
def test_stopped_and_resumed_equals_undisturbed(
    config, reference_run, tmp_path, monkeypatch, capsys, number, status
):
    with monkeypatch.context() as patch:
        send_after(patch, number, steps=2)
        assert train(Config.of(config), tmp_path) == status
    told = capsys.readouterr().err
    assert "55 documents" in told
    assert train(Config.of(config), tmp_path) == 0
    assert "continuing at step 3" in capsys.readouterr().err
    assert metrics_of(tmp_path) == metrics_of(reference_run)
    params = [load_run(w, 256, batch_size=1).params for w in (reference_run, tmp_path)]
    assert_equal(*params)
    assert not list((tmp_path / "data" / "0").glob("train*"))


@pytest.mark.slow
def test_runs_that_are_refused(config, reference_run, folder, tmp_path):
    config.data.tokenize = "ahead"
    with pytest.raises(InputError, match=r"data.tokenize was 'in_loop', is 'ahead'"):
        train(Config.of(config), reference_run)
    config.data.tokenize = "in_loop"
    other = shutil.copytree(folder, tmp_path / "other")
    (other / "b.txt").write_text("more")
    config.data.path = str(other)
    with pytest.raises(InputError, match="restore that data or choose a new --workdir"):
        corpus_of(config.data, reference_run, new=False)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"source": "tokens"}, r"data.source is tokens; set data.tokenize=ahead or another"),
        ({"source": "mixture"}, r"data.source is mixture; set data.tokenize=ahead or another"),
        ({"packing": "first_fit"}, r"data.packing=first_fit needs .* set data.tokenize=ahead or"),
        ({"path": "text.gz"}, r"in random order, and those of text.gz lie in several large"),
    ],
)
def test_keys_that_do_not_go_together(config, tmp_path, monkeypatch, changes, message):
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "text.gz"
    folder.mkdir()
    for name in "abc":
        (folder / f"{name}.jsonl.gz").write_bytes(b"")
    config.data.update(changes)
    with pytest.raises(InputError, match=message):
        train(Config.of(config), tmp_path / "run")
    assert not (tmp_path / "run" / "config.json").exists()


@pytest.mark.slow
def test_throughput_against_grain(config, tmp_path, monkeypatch):
    for name in ("SECONDS", "LEAD_IN"):
        monkeypatch.setattr(throughput, name, 0.01)
    rates = throughput.measure(Config.of(config).data, 8, 0, tmp_path, rounds=1)
    assert rates.keys() >= {"plain_grain", "tokenising", "in_loop", "grain_tokenising"}
    assert min(rates.values()) > 0
