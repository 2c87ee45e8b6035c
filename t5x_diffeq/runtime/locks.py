"""Mutual exclusion of processes: a file lock on this machine, a lease in a bucket."""

import fcntl
import json
import os
import socket
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager

from t5x_diffeq.runtime.console import say
from t5x_diffeq.runtime.errors import InputError
from t5x_diffeq.runtime.files import (
    AnyPath,
    bucket_errors,
    bucket_files,
    describe_error,
    is_in_bucket,
)

LEASE_SECONDS = 60  # until a killed holder's lease expires; T5X_DIFFEQ_LEASE_SECONDS changes it


@contextmanager
def hold_lock(lock: AnyPath, what: str) -> Iterator[None]:
    """Holds a lock file; a killed process releases it, in a bucket after `LEASE_SECONDS`.

    Args:
      lock: the file; its folder is created.
      what: what the lock protects, for messages.

    Raises:
      InputError: if the file can't be created or locked, or another process holds it.
      InfrastructureError: if the bucket does not answer.
    """
    with _hold_lease(lock, what) if is_in_bucket(lock) else hold_local_lock(lock, what):
        yield


@contextmanager
def hold_local_lock(lock: AnyPath, what: str, wait: bool = False) -> Iterator[None]:
    """`hold_lock` for processes that share this file system; can wait for another process."""
    try:
        lock.parent.mkdir(parents=True, exist_ok=True)
        file = lock.open("w")
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
        yield


@contextmanager
def _hold_lease(lock: AnyPath, what: str) -> Iterator[None]:
    """`hold_lock` for processes that share the bucket.

    The holder rewrites the object periodically. A process that finds one watches it: if it changes,
    its holder is alive; if it doesn't for the length of a lease, the holder was killed. No clocks
    are compared.
    """
    seconds = float(os.environ.get("T5X_DIFFEQ_LEASE_SECONDS", LEASE_SECONDS))
    me = {"host": socket.gethostname(), "process": os.getpid(), "holder": uuid.uuid4().hex}
    with bucket_errors(f"{what} can't be written", InputError):
        _take_lease(lock, what, _lease_content(me, 0), seconds)
    ended = threading.Event()
    beating = threading.Thread(
        target=_renew_lease, args=(lock, me, ended, seconds / 4), daemon=True
    )
    beating.start()
    try:
        yield
    finally:
        ended.set()
        beating.join()
        lock.unlink(missing_ok=True)


def _lease_content(me: dict, number: int) -> bytes:
    """The content of a lease's object: no two are equal."""
    return json.dumps({**me, "beat": number}).encode()


def _take_lease(lock: AnyPath, what: str, mine: bytes, seconds: float) -> None:
    """Returns when the lease is ours; the bucket guarantees that only one process creates it."""
    while True:
        try:
            bucket_files().pipe_file(str(lock), mine, mode="create")
            return
        except FileExistsError:
            pass
        try:
            before = lock.read_bytes()
            if before == mine:
                return  # it was created, and the answer was lost
            holder = json.loads(before)
            say(
                f"{what} is held by process {holder['process']} on {holder['host']}: waiting "
                f"{seconds:.0f} s to see whether it is still alive"
            )
            deadline = time.monotonic() + seconds
            while time.monotonic() < deadline:
                time.sleep(seconds / 20)
                if lock.read_bytes() != before:
                    raise InputError(
                        f"another process is writing {what} (process {holder['process']} on "
                        f"{holder['host']}); wait for it or stop it"
                    )
            lock.unlink(missing_ok=True)
        except FileNotFoundError:
            pass  # its holder has just released it


def _renew_lease(lock: AnyPath, me: dict, ended: threading.Event, seconds: float) -> None:
    """Renews the lease until `ended` is set; a failed renewal is retried at the next."""
    number = 0
    while not ended.wait(seconds):
        number += 1
        try:
            bucket_files().pipe_file(str(lock), _lease_content(me, number))
        except Exception as error:
            say(f"warning: {lock} can't be renewed: {describe_error(error)}")
