"""Files, locks, copies and shards in a bucket: real clients and a server that others wrote."""

import json
import os
import re
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from absl import flags
from bucket_server import PORTAL, serve
from helpers import corpus_of
from patience import patience

from t5x_diffeq.checkpoints.checkpoint import Checkpoints
from t5x_diffeq.checkpoints.checkpoint_folder import MARKER, METADATA, whole_steps
from t5x_diffeq.checkpoints.workdir import read_config
from t5x_diffeq.cli import command_line
from t5x_diffeq.config.config import DataKeys
from t5x_diffeq.data import shards
from t5x_diffeq.data.stream_files import open_stream
from t5x_diffeq.system import files, growing_file, locks, staging
from t5x_diffeq.system.errors import InfrastructureError, InputError, RunError
from t5x_diffeq.system.files import parse_path
from t5x_diffeq.system.growing_file import GrowingFile
from t5x_diffeq.training.tracking.jsonl import read_metrics
from t5x_diffeq.training.tracking.trackers import open_writer

WAYS = ("/upload/", "/resume")  # to write an object


@pytest.fixture(scope="module")
def server():
    """A server, to which all clients of this process go."""
    with serve() as (store, environment), pytest.MonkeyPatch.context() as patch:
        for name, value in environment.items():
            patch.setenv(name, value)
        yield store


@pytest.fixture
def store(server, tmp_path, monkeypatch):
    """What an empty server holds."""
    monkeypatch.setenv("T5X_DIFFEQ_CACHE", str(tmp_path / "cache"))
    server.clear()
    return server


def test_places(store, monkeypatch):
    assert files.is_in_bucket(parse_path("gs://bucket/run", "--workdir"))
    assert not files.is_in_bucket(parse_path("~/run", "--workdir"))
    assert str(files.join_path(parse_path("/run", "--workdir"), "gs://b/x")) == "gs://b/x"
    assert str(files.join_path(parse_path("gs://bucket/run", "--workdir"), "data/0")) == (
        "gs://bucket/run/data/0"
    )
    with pytest.raises(InputError, match="--workdir=s3://b/x: s3:// is not supported; give"):
        parse_path("s3://b/x", "--workdir")
    store.refuse = lambda method, path: 401
    with pytest.raises(
        InfrastructureError,
        match=r"data.path=gs://b/x can't be reached: the bucket refuses the token: refused, 401",
    ):
        parse_path("gs://b/x", "data.path")
    store.refuse = lambda method, path: 403
    with pytest.raises(InputError, match=r"can't be reached: Forbidden.*application-default login"):
        parse_path("gs://b/x", "data.path")
    files.bucket_files.cache_clear()
    monkeypatch.setitem(__import__("sys").modules, "gcsfs", None)
    monkeypatch.setattr(files.fsspec, "filesystem", lambda *_, **__: __import__("gcsfs"))
    with pytest.raises(InputError, match=r"needs the package gcsfs .*pip install -e '/.*\[gcs\]'"):
        parse_path("gs://b/x", "--workdir")
    files.bucket_files.cache_clear()


@pytest.mark.parametrize("size", [10, 6 * 2**20])  # sent at once, and in parts
def test_what_cannot_be_uploaded_replaces_nothing(store, size):
    path = parse_path("gs://bucket/run/x", "it")
    files.write_whole(path, b"good")
    store.refuse = lambda method, path: 400 if path.startswith(WAYS) else None
    with pytest.raises(RunError, match="gs://bucket/run/x can't be written: refused, 400"):
        files.write_whole(path, bytes(size))
    store.refuse = lambda method, path: None
    assert path.read_bytes() == b"good"
    with pytest.raises(ZeroDivisionError), files.atomic_file(path) as partial:
        partial.write_bytes(b"ha")
        raise ZeroDivisionError
    assert path.read_bytes() == b"good"
    files.write_whole(path, bytes(size))
    assert store.read("run/x") == bytes(size)
    assert not partial.exists()


def write(path):
    files.write_whole(path, b"new")


def copy(path):
    staging.stage([path])


def lease(path):
    with locks.hold_lock(path.parent / ".lock", "it"):
        pass


@pytest.mark.slow
@pytest.mark.parametrize("status", [503, 502])
@pytest.mark.parametrize(
    ("use", "what"),
    [
        (lambda path: parse_path(str(path), "data.path"), "data.path=gs://bucket/text/a"),
        (write, "gs://bucket/text/a can't be written"),
        (copy, "gs://bucket/text/a can't be read"),
        (copy, r"gs://bucket/text/a can't be copied to \S+"),
        (lease, "it can't be written"),
        (
            lambda path: read_config(path.parent),
            "a bucket or another server does not answer|gs://bucket/text/config.json is not the",
        ),
    ],
    ids=["place", "write", "look", "copy", "lease", "read"],
)
def test_a_bucket_that_does_not_answer_is_infrastructure(store, no_waiting, status, use, what):
    """Status 175, so that launchers start the run again. A refusal is 1 or 2 (see above)."""
    path = parse_path("gs://bucket/text/a", "it")
    files.write_whole(path, b"text")
    only_download = "copied" in what
    store.refuse = lambda method, path: (
        status if not only_download or "alt=media" in path or "/download" in path else None
    )

    def verb():
        use(path)

    with pytest.raises(SystemExit) as ended, pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.argv", ["verb"])
        command_line.run(verb, "", flags.FlagValues())
    assert ended.value.code == 175
    told = no_waiting.readouterr().err
    line = told.splitlines()[-1]
    assert "Traceback" not in told and told.count("error: ") == 1, told
    assert re.match(f"error: ({what})", line), line


@pytest.fixture
def no_waiting(monkeypatch, capsys):
    """gcsfs asks six times, and waits in between."""

    async def sleep(_):
        pass

    monkeypatch.setattr("gcsfs.retry.asyncio", SimpleNamespace(sleep=sleep))
    return capsys


def test_metrics_grow_in_a_bucket(store, monkeypatch, capsys):
    workdir = parse_path("gs://bucket/run", "--workdir")
    with open_writer(workdir, 0, ("tensorboard",)) as writer:
        writer.write_scalars(1, {"train/loss": 1.0})
        assert list(read_metrics(workdir)) == []  # not so often
        writer.flush()
        writer.write_scalars(2, {"train/loss": 2.0})
        assert [line["step"] for line in read_metrics(workdir)] == [1]
        monkeypatch.setattr(growing_file, "SECONDS_BETWEEN_UPLOADS", 0)
        store.refuse = lambda method, path: 400 if path.startswith(WAYS) else None
        writer.write_scalars(3, {"train/loss": 3.0})  # a warning, for it can be uploaded later
        with pytest.raises(RunError, match=r"metrics.jsonl can't be written: refused, 400"):
            writer.flush()
        assert [line["step"] for line in read_metrics(workdir)] == [1]
        assert "refused, 400; trying again later" in capsys.readouterr().err
        store.refuse = lambda method, path: None
        writer.write_scalars(4, {"train/loss": 4.0})
        assert [line["step"] for line in read_metrics(workdir)] == [1, 2, 3, 4]
    with open_writer(workdir, 1, ("tensorboard",)):
        assert [line["step"] for line in read_metrics(workdir)] == [1]
    events = [store.read(name) for name in store.names("run/events/")]
    assert any(b"train/loss" in event for event in events)


def test_only_what_is_new_is_uploaded(store):
    """A file of any size grows by its new lines alone, and stays one object."""
    sent = []
    store.refuse = lambda method, path: sent.append(path) if path.startswith(WAYS) else None
    file = GrowingFile(parse_path("gs://bucket/run/lines", "it"))
    for line in (b"1\n" * 1000, b"2\n", b"3\n"):
        file.write(line)
        file.flush()
    assert store.read("run/lines") == b"1\n" * 1000 + b"2\n3\n"
    assert store.names("run/") == ["run/lines"]
    assert [path.rpartition("name=")[2] for path in sent].count("run/lines") <= 1
    file.flush()
    assert not file.pending
    again = GrowingFile(parse_path("gs://bucket/run/lines", "it"), kept=2002)
    again.write(b"4\n")
    again.close()
    assert again.lines == 1001 and store.read("run/lines")[-6:] == b"1\n2\n4\n"
    store.clear()
    again.write(b"5\n")
    again.close()
    assert store.read("run/lines") == b"5\n"


@pytest.mark.parametrize("error", [FileExistsError("412"), ConnectionResetError("the answer")])
@pytest.mark.parametrize("done", [True, False])
def test_a_lost_answer_neither_loses_nor_repeats_lines(store, monkeypatch, error, done):
    file = GrowingFile(parse_path("gs://bucket/run/lines", "it"))
    file.write(b"1\n")
    file.flush()
    call, errors = files.bucket_files().call, [error]

    def lose_answer(*arguments, **given):
        if errors and done:
            call(*arguments, **given)
        if errors:
            raise errors.pop()
        return call(*arguments, **given)

    monkeypatch.setattr(files.bucket_files(), "call", lose_answer)
    file.write(b"2\n")
    file.try_flush()
    file.write(b"3\n")
    file.flush()
    assert store.read("run/lines") == b"1\n2\n3\n" and not errors


def test_a_folder_is_moved(store):
    root = parse_path("gs://bucket/run", "it")
    for name in ("from/a", "from/b/c", "to/old"):
        files.write_whole(root / name, name.encode())
    files.move_folder(root / "from", root / "to")
    assert store.names() == ["run/to/a", "run/to/b/c"]
    assert [str(path) for path in files.files_in(root)] == [
        f"gs://bucket/{name}" for name in store.names()
    ]
    assert files.files_matching(root / "**" / "c") == [root / "to/b/c"]


@pytest.mark.parametrize("answer", [401, PORTAL])
def test_an_expired_token_and_a_portal_pass(store, answer):
    path = parse_path("gs://bucket/run/x", "it")
    store.refuse = lambda method, path: answer
    with pytest.raises(InfrastructureError, match="gs://bucket/run/x can't be written: the bucket"):
        files.write_whole(path, b"new")


def test_a_lease_is_refused_while_its_holder_lives(store, monkeypatch):
    monkeypatch.setenv("T5X_DIFFEQ_LEASE_SECONDS", f"{patience(1):.0f}")
    lock = parse_path("gs://bucket/run/.lock", "it")
    with locks.hold_lock(lock, "it"):
        with (
            pytest.raises(InputError, match="another process is writing it"),
            locks.hold_lock(lock, "it"),
        ):
            pass
        left = store.read("run/.lock")
    assert store.names() == []
    store.put("run/.lock", left)  # of one that was killed
    with locks.hold_lock(lock, "it"):
        assert json.loads(store.read("run/.lock"))["holder"] != json.loads(left)["holder"]
    store.refuse = lambda method, path: 403 if path.startswith(WAYS) else None
    with (
        pytest.raises(InputError, match="it can't be written: Forbidden"),
        locks.hold_lock(lock, "it"),
    ):
        pass


def test_of_eight_who_want_a_lease_one_gets_it(store, monkeypatch):
    monkeypatch.setenv("T5X_DIFFEQ_LEASE_SECONDS", f"{patience(1):.0f}")
    lock, told, ended = parse_path("gs://bucket/run/.lock", "it"), [], threading.Event()

    def take():
        try:
            with locks.hold_lock(lock, "it"):
                told.append("held")
                ended.wait(patience(10))
        except InputError:  # the others see it beat
            told.append("refused")
            if told.count("refused") == 7:
                ended.set()

    threads = [threading.Thread(target=take) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(told) == ["held", *["refused"] * 7]


def test_copies_are_checked_and_bounded(store, monkeypatch):
    monkeypatch.setattr(staging, "DEFAULT_GIB", 2500 / 2**30)
    paths = [parse_path(f"gs://bucket/{n}.txt", "it") for n in range(4)]
    for n in range(4):
        store.put(f"{n}.txt", bytes([n]) * 1000)
    (first,) = staging.stage(paths[:1])
    assert first.read_bytes() == bytes(1000)
    asked = []
    store.refuse = lambda method, path: asked.append(path)
    assert staging.stage(paths[:1]) == [first]
    assert not any("download" in path for path in asked)
    first.write_bytes(b"rotten")
    (first,) = staging.stage(paths[:1])
    assert first.read_bytes() == bytes(1000)
    with pytest.raises(staging.NoRoomError, match=r"delete old copies there, raise this limit"):
        staging.stage(paths[1:])
    staging.stage(paths[1:2])
    store.put("1.txt", b"new")
    assert staging.stage(paths[1:2])[0].read_bytes() == b"new"
    monkeypatch.setattr(staging, "DEFAULT_GIB", 1)
    with pytest.raises(InputError, match=r"gs://bucket/3.txt is damaged"):
        staging.stage(paths[3:], ["0" * 64])
    with pytest.raises(InputError, match=r"gs://bucket/9.txt: there is no such object"):
        staging.stage([parse_path("gs://bucket/9.txt", "it")])


@pytest.mark.slow
@pytest.mark.parametrize("gib", ["1", "0"])  # copied; read by ArrayRecord where they are
def test_shards(small, store, tmp_path, monkeypatch, gib):
    """Text, shards and the workdir in a bucket; the same tokens as from this machine."""
    monkeypatch.setenv("T5X_DIFFEQ_CACHE_GIB", "1")
    store.put("texts/a.txt", Path(small.data.path).read_bytes())
    local = corpus_of(small.data, parse_path(f"{small.data.path}.run", "it"), new=True)
    small.data.path = "gs://bucket/texts"
    made = parse_path("gs://bucket/run", "it")
    corpus_of(small.data, made, new=True)
    names = store.names("run/data/0/")
    made_at = {each["name"]: each["timeCreated"] for each in store.facts("run/data/0/train")}
    stem = "run/data/0/train-00000-of-00001"
    assert made_at[f"{stem}.json"] > made_at[f"{stem}.array_record"]
    assert not any("partial" in name for name in names)
    monkeypatch.setenv("T5X_DIFFEQ_CACHE_GIB", gib)
    monkeypatch.setenv("T5X_DIFFEQ_CACHE", str(tmp_path / "other cache"))
    small.data.update(source="tokens", path="gs://bucket/run/data/0")
    found = corpus_of(small.data, parse_path(f"{made}2", "it"), new=True)
    expected = local.parts[0].train
    assert files.is_in_bucket(found.parts[0].train.paths[0]) == (gib == "0")
    np.testing.assert_array_equal(found.parts[0].train[0], expected[0])
    damaged = "run/data/0/train-00000-of-00001.array_record"
    store.put(damaged, store.read(damaged)[:-1] + b"?")
    if gib == "1":
        with pytest.raises(InputError, match=f"{damaged} is damaged"):
            shards.ShardedDocuments(parse_path("gs://bucket/run/data/0", "it"), "train")
    assert os.environ["T5X_DIFFEQ_CACHE_GIB"] == gib


def test_checkpoints_copied_into_a_bucket_without_their_mark(store, capsys):
    """Orbax takes those for saves that were cut off, and would delete them."""
    folder = parse_path("gs://bucket/run/checkpoints", "it")
    committed = json.dumps({"commit_timestamp_nsecs": 17}).encode()
    cut_off = json.dumps({"commit_timestamp_nsecs": None}).encode()
    for step, metadata in (("2", committed), ("4", committed), ("6", cut_off), ("8", None)):
        files.write_whole(folder / step / "state" / "x", b"array")
        if metadata:
            files.write_whole(folder / step / METADATA, metadata)
    files.write_whole(folder / "4" / MARKER, b"")
    with Checkpoints(folder.parent, keep=3) as checkpoints:
        assert checkpoints.latest_step == 4
    assert whole_steps(folder) == [2, 4]
    assert not (folder / "6").exists()
    assert (folder.parent / "unreadable_checkpoints" / "8" / "state" / "x").exists()
    assert not (folder / "8").exists()
    said = capsys.readouterr().err
    assert "checkpoint 2 is complete but lacks commit_success.txt" in said
    assert "warning: checkpoint 8 lacks commit_success.txt and _CHECKPOINT_METADATA" in said


@pytest.mark.slow
def test_a_stream(store):
    """Hugging Face's library reads files of a bucket; one that is missing is named."""
    pytest.importorskip("datasets", reason="the Hugging Face library isn't installed")
    for file in range(2):
        lines = "".join(json.dumps({"text": f"{file}.{n}"}) + "\n" for n in range(3))
        store.put(f"web/{file}.jsonl", lines.encode())
    stream = open_stream(DataKeys(source="stream", path="gs://bucket/web/*.jsonl"))
    assert [text for *_, text in stream.train.documents()] == [
        *("0.0", "0.1", "0.2"),
        *("1.0", "1.1", "1.2"),
    ]
    with pytest.raises(InputError, match=r"data.path=gs://bucket/no/.*jsonl can't be opened"):
        open_stream(DataKeys(source="stream", path="gs://bucket/no/*.jsonl"))


@pytest.fixture
def lease(store, monkeypatch):
    """A lease on gs://bucket/run that lasts a second; gives its path."""
    monkeypatch.setenv("T5X_DIFFEQ_LEASE_SECONDS", f"{patience(1):.0f}")
    monkeypatch.setattr(locks._Lease, "keep_renewing", lambda self, ended: None)  # it sleeps
    return parse_path("gs://bucket/run/.lock", "it")


def test_a_holder_that_slept_too_long_writes_nothing(store, lease, monkeypatch):
    """It finds another generation, says so, and leaves the next holder's lease alone."""
    lost = pytest.raises(InfrastructureError, match=r"no longer holds .* now held by process")
    with locks.hold_lock(lease, "it"):
        files.write_whole(lease.parent / "first", b"1")
        ((_, slept),) = files.write_guards
        with locks.hold_lock(lease, "it"):  # it waits until the lease has expired
            for _ in range(2):
                with lost:
                    slept()
            taken = store.read("run/.lock")
        store.put("run/.lock", taken)
        with lost:
            files.write_whole(lease.parent / "second", b"2")
        assert store.names() == ["run/.lock", "run/first"]
    assert store.read("run/.lock") == taken


def test_a_lease_that_may_have_expired_is_renewed_before_a_file_is_written(
    store, lease, monkeypatch
):
    """A lease of which nobody has taken over is held again."""
    with locks.hold_lock(lease, "it"):
        before = store.read("run/.lock")
        files.check_writable(lease.parent / "file")
        assert store.read("run/.lock") == before
        monkeypatch.setattr(locks, "_now", lambda: time.monotonic() + 1e9)
        files.check_writable(lease.parent / "file")
        assert store.read("run/.lock") != before
    assert store.names() == []


def test_an_answer_that_is_lost_is_no_lost_lease(store, lease, monkeypatch):
    """The bucket wrote it, and the client tries again with a generation of before."""
    now = [0.0]
    monkeypatch.setattr(locks, "_now", lambda: now[0])
    with locks.hold_lock(lease, "it"):
        now[0] = 1e9
        written, original = [], locks.bucket_files().call

        def call_twice(method, *arguments, **more):
            if method == "POST":
                written.append(original(method, *arguments, **more))
            return original(method, *arguments, **more)

        monkeypatch.setattr(locks.bucket_files(), "call", call_twice)
        files.check_writable(lease.parent / "file")
        assert len(written) == 1
        monkeypatch.undo()
    assert store.names() == []
