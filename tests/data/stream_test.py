"""Documents streamed while a model trains: batches, and the position that checkpoints keep."""

import gzip
import json
import os
import shutil
import subprocess
import sys
from itertools import islice

import jax
import numpy as np
import pytest
from helpers import ROOT, corpus_of, small_config, stop_after
from hub_server import hub
from jax.sharding import NamedSharding, PartitionSpec
from patience import patience
from process_runs import read_reports, run, stop_at

from t5x_diffeq.cli.train import train_to_end
from t5x_diffeq.config.config import Config, DataKeys
from t5x_diffeq.data import stream, stream_files
from t5x_diffeq.data.encoding import TextEncoder
from t5x_diffeq.data.examples import training_data
from t5x_diffeq.data.stream import Lane, LanePosition, Stream, _LocalBatches
from t5x_diffeq.data.stream_files import open_stream
from t5x_diffeq.data.tokenizer import ByteTokenizer
from t5x_diffeq.system import retries
from t5x_diffeq.system.errors import InputError
from t5x_diffeq.training.checks import run_checks
from t5x_diffeq.training.hooks import Hook

datasets = pytest.importorskip("datasets", reason="the Hugging Face library isn't installed")
datasets.disable_progress_bars()
BATCH, LENGTH, HELD_OUT, BLOCK = 8, 16, 3, 5
BLOCK_OF_RUNS = stream.BLOCK_DOCUMENTS
ENCODER = TextEncoder(ByteTokenizer())


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    monkeypatch.setattr(stream, "BLOCK_DOCUMENTS", BLOCK)
    monkeypatch.setattr(stream_files, "VALIDATION_DOCUMENTS", HELD_OUT)
    monkeypatch.setattr(stream_files, "_VALIDATION_EVERY", 3)


def texts_of(file):
    """Documents of many lengths, each with its own first characters."""
    return [f"<{file}.{n}>" + "abcdefg " * (n * n % 7) for n in range(17)]


@pytest.fixture(scope="module", params=["parquet", "jsonl", "jsonl.gz"])
def files(request, tmp_path_factory):
    """A glob of three files of 17 documents."""
    folder = tmp_path_factory.mktemp("files")
    write(folder, request.param)
    return f"{folder}/*.{request.param}"


def write(folder, kind="jsonl", texts=texts_of, count=3):
    for file in range(count):
        rows = datasets.Dataset.from_dict({"text": texts(file), "number": [*range(17)]})
        path = folder / f"{file}.{kind}"
        if kind == "parquet":
            rows.to_parquet(path, batch_size=4)
        else:
            lines = "".join(json.dumps(row) + "\n" for row in rows).encode()
            path.write_bytes(gzip.compress(lines) if kind.endswith("gz") else lines)


def stream_of(path, **keys):
    return open_stream(DataKeys(source="stream", path=str(path), **keys))


def local_batches(opened, rows, lanes, positions=None, steps=0):
    """The iterator of the rows of one process, after so many steps from positions."""
    lane_of = np.arange(BATCH) * lanes // BATCH
    numbers = np.unique(lane_of[rows]).tolist()
    kept = positions or [LanePosition()] * lanes
    lane = {n: Lane(opened, ENCODER, LENGTH, n, lanes, 3, LanePosition(*kept[n])) for n in numbers}
    batches = iter(_LocalBatches(lane, rows, lane_of, ENCODER.tokenizer.border, True))
    return batches


def assert_equal(expected, others):
    jax.tree.map(np.testing.assert_array_equal, expected, others)


@pytest.mark.parametrize("lanes", [1, 2, 3, 8])
def test_goes_on_at_every_batch_with_any_number_of_processes(files, lanes):
    """60 batches: into the third epoch. Positions are read back from JSON."""
    opened = stream_of(files)
    whole, batches, positions = local_batches(opened, np.arange(BATCH), lanes), [], []
    for _ in range(60):
        positions.append(json.loads(json.dumps(whole.get_state())))
        batches.append(next(whole))
    assert max(at[0] for at in positions[-1].values()) >= 6  # of three files
    for step in range(0, 56, 5):
        kept = [positions[step][str(n)] for n in range(lanes)]
        for rows in (np.arange(BATCH), np.arange(4), np.array([1, 2, 6]), np.arange(4, 8)):
            again = local_batches(opened, rows, lanes, kept)
            for expected in batches[step : step + 3]:
                ours = {name: leaf[rows] for name, leaf in expected.items()}
                assert_equal(ours, next(again))


@pytest.mark.parametrize("lanes", [1, 2, 3, 5, 8])
def test_an_epoch_has_each_document_once_and_none_that_validates(files, lanes):
    """Lanes take turns with the files of all epochs."""
    opened, texts = stream_of(files), []
    for number in range(lanes):
        lane = Lane(opened, ENCODER, LENGTH, number, lanes, 3, LanePosition())
        for at, codes in lane.coming:
            if at.place >= 3:
                break
            texts.append(bytes(codes[:-1].astype(np.uint8)).decode())
    every = [text for file in range(3) for text in texts_of(file)]
    validating = texts_of(0)[0:9:3]
    assert list(opened.documents[1]) == validating
    assert sorted(texts) == sorted(set(every) - set(validating))
    assert texts != sorted(texts)
    assert set(opened.documents[0]) == set(texts)


def test_small_and_empty_files(tmp_path):
    """A lane whose file has nothing for it goes on to the next."""
    for file, count in enumerate((1, 0, 2, 30)):
        lines = [json.dumps({"text": f"<{file}.{n}>"}) + "\n" for n in range(count)]
        (tmp_path / f"{file}.jsonl").write_text("".join(lines))
    opened = stream_of(f"{tmp_path}/*.jsonl")
    assert list(opened.documents[1]) == ["<0.0>"]
    for number in range(4):
        lane = Lane(opened, ENCODER, LENGTH, number, 4, 3, LanePosition())
        assert len(lane.window()) == LENGTH + 1


def test_windows_are_the_documents_one_after_the_other(files):
    opened = stream_of(files)
    lanes = [Lane(opened, ENCODER, LENGTH, 0, 1, 3, LanePosition()) for _ in range(2)]
    codes = np.concatenate([codes for _, codes in islice(lanes[0].coming, 30)])
    for number in range(20):
        start = number * LENGTH
        np.testing.assert_array_equal(lanes[1].window(), codes[start : start + LENGTH + 1])


def test_splits_of_a_folder(tmp_path):
    for split in ("train", "validation"):
        (tmp_path / split).mkdir()
    write(tmp_path / "train")
    write(tmp_path / "validation", texts=lambda file: [f"v{file}.{n}" for n in range(17)], count=1)
    opened = stream_of(tmp_path)
    assert not any(opened.is_held_out(0, row) for row in range(20))
    assert list(opened.documents[1]) == ["v0.0", "v0.1", "v0.2"]
    assert opened.fingerprint == stream_of(tmp_path).fingerprint
    moved = shutil.copytree(tmp_path, tmp_path.with_name("moved"))
    files = {"path": f"{moved}/train/*.jsonl", "validation_path": f"{moved}/validation/*"}
    assert stream_of(**files).train.fingerprint == opened.train.fingerprint  # another path
    assert list(stream_of(**files).documents[1]) == ["v0.0", "v0.1", "v0.2"]
    path = tmp_path / "train" / "0.jsonl"
    path.write_text(path.read_text().replace("<0.16>", "<0.61>"))  # of the same size
    assert stream_of(tmp_path).fingerprint != opened.fingerprint


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"path": "nosuch/*.parquet"}, "data.path=nosuch"),
        ({"train_split": "rest", "path": "FILES/*.jsonl"}, None),
        ({"text_field": "body"}, "train has no 'body', but text, number"),
        ({"path": "FILES/a.csv"}, "a.csv is a file of another kind; a stream reads"),
        ({"path": "gs://bucket/folder"}, "data.path=gs://bucket/folder names no files of a known"),
        (
            {"path": "FILES", "validation_path": "x"},
            "data.validation_path=x: .* is a whole dataset",
        ),
        ({"loss_on": "completion"}, "needs messages"),
        ({"path": "FILES", "train_split": "rest"}, "data.train_split=rest: .* has train"),
    ],
)
def test_mistakes(tmp_path, keys, message):
    write(tmp_path)
    (tmp_path / "a.csv").touch()
    path = keys.pop("path", "FILES/*.jsonl").replace("FILES", str(tmp_path))
    if message is None:
        assert len(stream_of(path, **keys).train) == 3  # files of a glob are the split asked for
        return
    with pytest.raises(InputError, match=message):
        list(stream_of(path, **keys).documents[1])


def test_a_damaged_file_is_named(tmp_path):
    write(tmp_path)
    (tmp_path / "0.jsonl").write_text('[{"text": "whole"}]')
    (tmp_path / "1.jsonl").write_text('[{"text": "whole"}, no JSON]')
    with pytest.raises(InputError, match=r"1\.jsonl can't be read"):
        list(stream_of(f"{tmp_path}/*.jsonl").train.documents())
    (tmp_path / "0.jsonl").write_text("[no JSON]")
    with pytest.raises(InputError, match="can't be opened as a stream"):
        stream_of(f"{tmp_path}/*.jsonl")


@pytest.mark.parametrize(("documents", "lanes"), [(1, 1), (9, 3)])
def test_too_little_text_ends(tmp_path, documents, lanes):
    """All documents of the lane validate."""
    (tmp_path / "0.jsonl").write_text('{"text": "short"}\n' * documents)
    lane = Lane(stream_of(tmp_path), ENCODER, LENGTH, 0, lanes, 3, LanePosition())
    with pytest.raises(
        InputError, match=r"found no document to train on in 2 passes; .*data.validation_path"
    ):
        lane.window()


def test_what_does_not_go_with_a_stream():
    with pytest.raises(InputError, match=r"data.packing=first_fit needs the lengths"):
        run_checks("train", Config(data=DataKeys("stream", path="x", packing="first_fit")))
    with pytest.raises(InputError, match=r"data.mixture has a part with the source stream"):
        mixture = ((1, "stream", "x"), (1, "stdlib", None))
        run_checks("train", Config(data=DataKeys("mixture", mixture=mixture)))


def one_device():
    mesh = jax.make_mesh((1,), ("data",), devices=jax.devices()[:1])
    return NamedSharding(mesh, PartitionSpec("data", None))


def test_the_position_is_that_of_the_batches_handed_out(files):
    """However many are read ahead; and those that a rollback leaves behind are passed over."""
    sharding = one_device()
    make = lambda: Stream(stream_of(files), ENCODER, LENGTH, BATCH, 3, False)  # noqa: E731
    data = make()
    whole = list(islice(data.batches(sharding, 0, None), 9))
    assert data.position()["drawn"] == 9
    data = make()
    list(islice(data.batches(sharding, 0, None), 4))
    kept = json.loads(json.dumps(data.position()))
    for drawn in (4, 6):
        assert_equal(whole[drawn:], list(islice(make().batches(sharding, drawn, kept), 9 - drawn)))


class Drawn(Hook):
    """Keeps the batches that a run of this process trains on."""

    name = "drawn"
    batches: list = []  # noqa: RUF012  # the test reads it from the class

    def before_step(self, step, state, batch):
        self.batches.append(jax.device_get(batch))


@pytest.mark.slow
def test_a_stopped_run_goes_on_with_the_next_batch(tmp_path, capfd):
    write(tmp_path)
    small = small_config(tmp_path)
    small.data.update(source="stream", path=f"{tmp_path}/*.jsonl")
    small.train.update(total_steps=8, eval_every=8, hooks=(f"{__name__}:Drawn",))
    small.mesh.fsdp = 1
    config, run = Config.of(small), tmp_path / "run"
    Drawn.batches.clear()
    assert stop_after(4, config, run) == 42
    assert "a stream of 3 files train" in capfd.readouterr().err
    assert train_to_end(config, run) == 0
    data = training_data(config, corpus_of(small.data, run, new=False))
    assert_equal(list(islice(data.batches(one_device(), 0, None), 8)), Drawn.batches)
    (tmp_path / "0.jsonl").write_text('{"text": "changed", "number": 1}\n')
    with pytest.raises(InputError, match="the data is now"):
        corpus_of(small.data, run, new=False)


@pytest.mark.slow
@pytest.mark.in_turns("whole programs")
def test_processes_go_on_as_fewer(tmp_path, monkeypatch):
    """Two processes, stopped, then one: it ends where the lanes of two would be."""
    write(tmp_path, texts=lambda file: [f"<{file}.{n}>" + "abcdefg " * 20 for n in range(17)])
    files = {"path": f"{tmp_path}/*.jsonl", "validation_path": f"{tmp_path}/0.jsonl"}
    keys = [
        *("--config.data.source=stream", "--config.data.tokenizer=bytes", "--config.seed=3"),
        *(f"--config.data.{key}={value}" for key, value in files.items()),
        *(f"--config.train.batch_size={BATCH}", f"--config.data.sequence_length={LENGTH}"),
        *("--config.train.total_steps=40", "--config.train.eval_every=1000"),
    ]
    stop_at(10, "", tmp_path / "run", 2, 1, *keys)
    run("", tmp_path / "run", 1, 1, *keys)
    assert len(read_reports(tmp_path / "run")) == 40
    facts = json.loads((tmp_path / "run/checkpoints/40/data/metadata").read_text())
    monkeypatch.setattr(stream, "BLOCK_DOCUMENTS", BLOCK_OF_RUNS)
    whole = local_batches(stream_of(**files), np.arange(BATCH), 2)
    batches = list(islice(whole, 43))
    again = local_batches(stream_of(**files), np.arange(BATCH), 2, facts["position"]["lanes"])
    assert_equal(batches[40:], list(islice(again, 3)))


class Flaky:
    """In place of what reads the tables of a file: it breaks off every so often, `left` times."""

    def __init__(self, read, left):
        self.read, self.left, self.every, self.taken = read, left, 3, 0

    def __call__(self, *arguments, **keywords):
        for table in self.read(*arguments, **keywords):
            self.taken += 1
            if self.left and self.taken % self.every == 0:
                self.left -= 1
                raise ConnectionResetError("the hub hiccups")
            yield table


@pytest.mark.parametrize(("kind", "times"), [("parquet", 2), ("jsonl", 1)])
def test_a_hub_that_hiccups_is_asked_again(tmp_path, monkeypatch, capsys, kind, times):
    """The documents are the same; a hub that doesn't come back ends the run."""
    monkeypatch.setattr(retries, "PAUSES", (0, 0))
    write(tmp_path, kind)
    opened = stream_of(f"{tmp_path}/*.{kind}")
    expected = list(opened.train.documents())
    examples = opened.train.dataset._ex_iterable
    examples = getattr(examples, "ex_iterable", examples)  # without the selection of columns
    examples.generate_tables_fn = flaky = Flaky(examples.generate_tables_fn, left=times)
    assert list(opened.train.documents()) == expected
    assert flaky.left == 0
    assert capsys.readouterr().err.count("the hub hiccups; trying again in 0 s") == times
    flaky.every, flaky.left = 1, 9
    with pytest.raises(ConnectionResetError):
        list(opened.train.documents())
    assert flaky.left == 6


@pytest.mark.slow
def test_the_hub(tmp_path):
    """The real client reads a dataset of a server by parts; nothing is there but what it serves."""
    write(tmp_path, "parquet")
    files = {f"data/train-{n}.parquet": (tmp_path / f"{n}.parquet").read_bytes() for n in range(3)}
    program = """if True:
        import os, sys
        from itertools import islice
        from t5x_diffeq.data.stream_files import open_stream
        from t5x_diffeq.config.config import DataKeys
        for path in sys.argv[1:]:
            stream = open_stream(DataKeys(source="stream", path=path))
            documents = islice(stream.train.documents(), 2)
            print(len(stream.train), *(text for _, _, text in documents), flush=True)
        os._exit(0)  # else Arrow may wait for ever for a thread of its own that reads on"""
    paths = [
        "owner/corpus",
        "owner/corpus@main:default",
        "hf://datasets/owner/corpus/data/*.parquet",
    ]
    with hub("owner/corpus", files) as (endpoint, asked):
        environment = {**os.environ, "HF_ENDPOINT": endpoint, "HF_HOME": str(tmp_path / "home")}
        environment |= {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "0"}
        environment |= {"HF_DATASETS_OFFLINE": "0"}
        command = [sys.executable, "-c", program]
        bounded = {"env": environment, "capture_output": True, "timeout": patience(300)}
        done = subprocess.run([*command, *paths], **bounded, text=True)
        assert done.stdout.splitlines() == ["3 <0.0> <0.1>abcdefg "] * 3, done.stderr
        missing = subprocess.run([*command, "owner/nosuch"], **bounded)
    assert b"data.path=owner/nosuch can't be opened as a stream" in missing.stderr
    read = [line for line in asked if "/resolve/" in line and line.endswith(".parquet")]
    assert not any("train-1" in line or "train-2" in line for line in read)
