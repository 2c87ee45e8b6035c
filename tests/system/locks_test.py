"""Locks of folders: links, folders that are moved, and file systems that have no flock."""

import errno
import fcntl
import os

import pytest

from t5x_diffeq.system.errors import InputError, RunError
from t5x_diffeq.system.files import parse_path, write_whole
from t5x_diffeq.system.growing_file import GrowingFile
from t5x_diffeq.system.locks import hold_local_lock, hold_lock


@pytest.fixture(params=["ENOLCK", "ENOSYS", "EOPNOTSUPP"])
def no_flock(request, monkeypatch, tmp_path):
    """Those of NFS without its lock service, of FUSE, and of Lustre without -o flock."""
    number = getattr(errno, request.param)

    def refuse(*_):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", refuse)
    monkeypatch.setenv("T5X_DIFFEQ_CACHE", str(tmp_path / "cache"))
    return os.strerror(number)


def assert_not_locked(lock, message):
    """That it is refused with that message; `lock` is what would hold it."""
    with pytest.raises(InputError, match=message), lock:
        raise AssertionError("it is locked")


def test_without_flock(no_flock, tmp_path):
    file, message = tmp_path / ".lock", f"can't be locked: {no_flock}; name a folder on"
    assert_not_locked(hold_lock(file, "--workdir=DIR"), f"DIR {message}")
    assert_not_locked(hold_local_lock(file, "CACHE", wait=True), f"CACHE {message}")


def test_a_link_is_not_followed(tmp_path):
    """Neither as a lock, nor as a file that grows, nor as the name of a file not yet complete."""
    other, run = tmp_path / "other", tmp_path / "run"
    other.write_text("of somebody else")
    run.mkdir()
    (run / ".lock").symlink_to(other)
    assert_not_locked(hold_lock(run / ".lock", "it"), "it can't be written: it is a link; remove")
    for name in ("metrics.jsonl", f".config.json.{os.getpid()}.partial"):
        (run / name).symlink_to(other)
    with pytest.raises(InputError, match=r"metrics.jsonl is a link to"):
        GrowingFile(run / "metrics.jsonl", 9)
    grown = GrowingFile(run / "metrics.jsonl")
    write_whole(run / "config.json", b"{}")
    assert not (run / "metrics.jsonl").is_symlink()
    (run / "metrics.jsonl").unlink()
    (run / "metrics.jsonl").symlink_to(other)
    with pytest.raises(RunError, match="it is a link; remove it"):
        grown.write(b"2\n")
    assert other.read_text() == "of somebody else"


def test_a_lock_holds_its_file_as_it_is(tmp_path):
    (tmp_path / ".lock").write_text("kept")
    with hold_lock(tmp_path / ".lock", "it"):
        assert_not_locked(hold_lock(tmp_path / ".lock", "it"), "another process is writing it")
    assert (tmp_path / ".lock").read_text() == "kept"


@pytest.mark.skipif(not os.path.exists("/proc/locks"), reason="only Linux lists locks")
def test_who_holds_a_lock(tmp_path):
    message = rf"is writing it \(process {os.getpid()}\); wait for it"
    with hold_lock(tmp_path / ".lock", "it"):
        assert_not_locked(hold_lock(tmp_path / ".lock", "it"), message)


def test_a_workdir_outlives_a_change_of_the_current_folder(tmp_path, monkeypatch):
    """Such as by a hook."""
    monkeypatch.chdir(tmp_path)
    workdir = parse_path("run", "--workdir")
    with hold_lock(workdir / ".lock", "--workdir=run"):
        grown = GrowingFile(workdir / "metrics.jsonl")
        monkeypatch.chdir("/")
        grown.write(b"1")
    assert (tmp_path / "run" / "metrics.jsonl").read_bytes() == b"1"


def test_a_folder_that_was_moved_is_not_made_again(tmp_path):
    run, moved = tmp_path / "run", tmp_path / "moved"
    with hold_lock(run / ".lock", "--workdir=run"):
        grown = GrowingFile(run / "metrics.jsonl")
        run.rename(moved)
        for write in (lambda: write_whole(run / "config.json", b"{}"), lambda: grown.write(b"1")):
            with pytest.raises(RunError, match="--workdir=run is no longer the folder that it was"):
                write()
        assert not run.exists()
        moved.rename(run)
        grown.write(b"1")
    write_whole(run / "config.json", b"{}")
