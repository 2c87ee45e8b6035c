"""Mutual exclusion of processes: a file lock on this machine, a lease in a bucket."""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from t5x_diffeq.system.errors import InputError, RunError
from t5x_diffeq.system.files import AnyPath, describe_error, is_in_bucket, open_to_write
from t5x_diffeq.system.guards import guarded
from t5x_diffeq.system.leases import hold_lease


@contextmanager
def hold_lock(lock: AnyPath, what: str) -> Iterator[None]:
    """Holds a lock file; a killed process releases it, in a bucket after `leases.LEASE_SECONDS`.

    Args:
      lock: the file; its folder is created.
      what: what the lock protects, for messages.

    Raises:
      InputError: if the file can't be created or locked, or another process holds it.
      InfrastructureError: if the bucket does not answer.
    """
    with hold_lease(lock, what) if is_in_bucket(lock) else hold_local_lock(lock, what):
        yield


@contextmanager
def hold_local_lock(lock: AnyPath, what: str, wait: bool = False) -> Iterator[None]:
    """`hold_lock` for processes that share this file system; can wait for another process.

    Nothing is written to the file.
    """
    try:
        lock.parent.mkdir(parents=True, exist_ok=True)
        file = os.fdopen(open_to_write(lock, os.O_RDWR), "rb")
    except OSError as error:
        raise InputError(f"{what} can't be written: {describe_error(error)}") from error
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise InputError(
                f"another process is writing {what}; wait for it or stop it"
            ) from error
        except OSError as error:
            raise InputError(
                f"{what} can't be locked: {describe_error(error)}; name a folder on a file system "
                "that has flock (Lustre has it if it is mounted with -o flock)"
            ) from error
        check = partial(_check_in_place, lock, os.fstat(file.fileno()), what)
        with guarded(lock.parent, check):
            yield


def _check_in_place(lock: Path, held: os.stat_result, what: str) -> None:
    """Checks that the path still leads to the folder in which the lock is held.

    Otherwise the rest of the run would be written to another folder, or below a mount point.

    Raises:
      RunError: if it doesn't.
    """
    try:
        now: os.stat_result | None = lock.stat()
    except OSError:
        now = None
    if now is None or not os.path.samestat(now, held):
        raise RunError(
            f"{what} is no longer the folder that it was: it was moved or deleted, or its disk was "
            "unmounted; nothing more is written there; put it back, and run the same command again"
        )
