"""File systems that have no flock: one clear line."""

import errno
import fcntl
import os

import pytest

from t5x_diffeq.runtime.errors import InputError
from t5x_diffeq.runtime.locks import hold_local_lock, hold_lock


@pytest.fixture(params=["ENOLCK", "ENOSYS", "EOPNOTSUPP"])
def no_flock(request, monkeypatch, tmp_path):
    """Those of NFS without its lock service, of FUSE, and of Lustre without -o flock."""
    number = getattr(errno, request.param)

    def refuse(*_):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", refuse)
    monkeypatch.setenv("T5X_DIFFEQ_CACHE", str(tmp_path / "cache"))
    return os.strerror(number)


def test_without_flock(no_flock, tmp_path):
    with (
        pytest.raises(InputError, match=f"DIR can't be locked: {no_flock}; name a folder on"),
        hold_lock(tmp_path / ".lock", "--workdir=DIR"),
    ):
        raise AssertionError("it is locked")
    with (
        pytest.raises(InputError, match=f"CACHE can't be locked: {no_flock}; name a folder on"),
        hold_local_lock(tmp_path / ".lock", "CACHE", wait=True),
    ):
        raise AssertionError("it is locked")
