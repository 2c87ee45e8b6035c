"""Mutual exclusion of processes: a file lock on this machine, a lease on a folder of a bucket.

A lease is an object. Its holder rewrites it periodically, and names in each write the generation of
its last write: the bucket refuses the write if the object has another generation by now
(`ifGenerationMatch`). A process that wants the lease watches the object. If its generation changes,
the holder is alive. If it doesn't change for the length of a lease, the holder is gone or asleep,
and the process deletes the object at the generation that it saw. Clocks of two machines are never
compared.

A holder that wakes up later finds another generation, and stops before it writes anything else.
"""

import fcntl
import json
import os
import socket
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import NamedTuple

from t5x_diffeq.system import environment, files
from t5x_diffeq.system.console import log
from t5x_diffeq.system.errors import InfrastructureError, InputError, RunError
from t5x_diffeq.system.files import AnyPath, bucket_errors, bucket_files, describe_error

_BOUNDARY = "part-of-a-lease"
LEASE_SECONDS = 60  # until a killed holder's lease expires; T5X_DIFFEQ_LEASE_SECONDS changes it


@contextmanager
def hold_lock(lock: AnyPath, what: str) -> Iterator[None]:
    """Holds a lock file; a killed process releases it, in a bucket after `LEASE_SECONDS`.

    Raises:
      InputError: if the file can't be created or locked, or another process holds it.
      InfrastructureError: if the bucket does not answer.
    """
    with _hold_lease(lock, what) if files.is_in_bucket(lock) else hold_local_lock(lock, what):
        yield


@contextmanager
def hold_local_lock(lock: AnyPath, what: str, wait: bool = False) -> Iterator[None]:
    """`hold_lock` for processes that share this file system; can wait for another process.

    Nothing is written to the file.
    """
    try:
        lock.parent.mkdir(parents=True, exist_ok=True)
        file = os.fdopen(files.open_to_write(lock, os.O_RDWR), "rb")
    except OSError as error:
        is_file = isinstance(error, FileExistsError | NotADirectoryError)
        way_out = "; that is a file, so name a folder" if is_file else ""
        raise InputError(f"{what} can't be written: {describe_error(error)}{way_out}") from error
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise InputError(
                f"another process is writing {what}{_name_holder(lock)}; wait for it or stop it"
            ) from error
        except OSError as error:
            raise InputError(
                f"{what} can't be locked: {describe_error(error)}; name a folder on a file system "
                "that has flock (Lustre has it if it is mounted with -o flock)"
            ) from error
        check = partial(_check_in_place, lock, os.fstat(file.fileno()), what)
        with files.guarded(lock.parent, check):
            yield


def _name_holder(lock: Path) -> str:
    """` (process 1234)`; empty if Linux lists no such lock, or several.

    The holder may be on another machine. File systems such as btrfs and overlayfs list another
    device than `stat`, so the device decides only between locks of the same inode.
    """
    holders: dict[bool, set[str]] = {True: set(), False: set()}  # by whether the device is the same
    with suppress(OSError, ValueError):  # no such file, or a line of another form
        facts = lock.stat()
        device = f"{os.major(facts.st_dev):02x}:{os.minor(facts.st_dev):02x}"
        for line in Path("/proc/locks").read_text("ascii").splitlines():
            _, kind, _, _, process, place = line.split()[:6]
            its_device, _, inode = place.rpartition(":")
            if kind == "FLOCK" and int(inode) == facts.st_ino and int(process) > 0:
                holders[its_device == device].add(process)
    processes = holders[True] or holders[False]
    return f" (process {processes.pop()})" if len(processes) == 1 else ""


def _check_in_place(lock: Path, held: os.stat_result, what: str) -> None:
    """Checks that the path still leads to the folder in which the lock is held.

    Otherwise the rest of the run would be written to another folder, or below a mount point.
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


@contextmanager
def _hold_lease(path: AnyPath, what: str) -> Iterator[None]:
    """A context that holds a lease; `files.check_writable` of its folder then checks the lease."""
    lease = _Lease(path, what)
    with bucket_errors(f"{what} can't be written", InputError):
        lease.take()
    ended = threading.Event()
    renewing = threading.Thread(target=lease.keep_renewing, args=(ended,), daemon=True)
    renewing.start()
    try:
        with files.guarded(path.parent, lease.check):
            yield
    finally:
        ended.set()
        renewing.join()
        lease.release()


class _Seen(NamedTuple):
    content: bytes
    generation: str

    def holder(self) -> str:
        try:
            written = files.parse_json(self.content)
            return f"process {int(written['process'])} on {str(written['host'])[:100]!r}"
        except (ValueError, KeyError, TypeError):
            return "an unknown process"


class _Lease:
    def __init__(self, path: AnyPath, what: str):
        self.path, self.what = path, what
        self.bucket, _, self.key = str(path).partition("://")[2].partition("/")
        self.seconds = environment.LEASE_SECONDS.read() or LEASE_SECONDS
        self.me = {"host": socket.gethostname(), "process": os.getpid(), "holder": uuid.uuid4().hex}
        self.generation = ""  # of this process's last write
        self.beat = 0  # number of the write; makes each content different
        self.renewed = 0.0  # the time of the last renewal, by `_now`
        self.lost: str | None = None  # the process that has the lease now; None: this one
        self.turn = threading.Lock()  # the renewing thread and `check` renew one after the other

    def take(self) -> None:
        """Returns when the lease is ours; an InputError if another process holds it."""
        while not self._try_write("0"):
            try:
                before = self._read()
                log(
                    f"{self.what} is held by {before.holder()}: waiting {self.seconds:.0f} s to "
                    "see whether it is still alive"
                )
                deadline = time.monotonic() + self.seconds
                while time.monotonic() < deadline:
                    time.sleep(self.seconds / 20)
                    if self._read().generation != before.generation:
                        raise InputError(
                            f"another process is writing {self.what} ({before.holder()}); wait for "
                            "it or stop it"
                        )
                self._delete(before.generation)  # nothing, if somebody has written it meanwhile
            except FileNotFoundError:
                pass  # its holder has just released it

    def keep_renewing(self, ended: threading.Event) -> None:
        """Renews the lease until `ended` is set, or it is lost; a failure is tried again."""
        while not ended.wait(self.seconds / 4):
            try:
                self._renew()
            except InfrastructureError:
                return  # `check` says so
            except Exception as error:
                log(f"warning: {self.path} can't be renewed: {describe_error(error)}")

    def check(self) -> None:
        """Checks that the lease is held, and asks the bucket if it may have expired."""
        if self.lost is None and _now() - self.renewed < self.seconds / 2:
            return
        with bucket_errors(f"{self.what} can't be written", InfrastructureError):
            self._renew()

    def release(self) -> None:
        """Deletes the object, unless it is another's."""
        if self.lost is None:
            try:
                self._delete(self.generation)
            except Exception as error:
                log(f"warning: {self.path} can't be deleted: {describe_error(error)}")

    def _renew(self) -> None:
        with self.turn:
            if self.lost is None and not self._try_write(self.generation):
                try:
                    self.lost = self._read().holder()
                except FileNotFoundError:
                    self.lost = "nobody: its object was deleted"
            if self.lost is not None:
                raise InfrastructureError(
                    f"this process no longer holds {self.path}, its lease on {self.what}, which is "
                    f"now held by {self.lost}; it was silent for {self.seconds:.0f} s or more, and "
                    "stops before it writes anything else; stop the other process to continue here"
                )

    def _try_write(self, generation: str) -> bool:
        """Writes the object if it has this generation ("0": if it is missing); returns whether."""
        self.beat += 1
        content = json.dumps({**self.me, "beat": self.beat}).encode()
        started = _now()  # the lease counts from before the request, not from its answer
        bucket = bucket_files()
        try:
            written = bucket.call(
                "POST",
                f"{bucket._location}/upload/storage/v1/b/{self.bucket}/o",
                uploadType="multipart",
                ifGenerationMatch=generation,
                headers={"Content-Type": f"multipart/related; boundary={_BOUNDARY}"},
                data=self._multipart(content),
                json_out=True,
            )["generation"]
        except FileExistsError:  # the precondition failed
            try:
                seen = self._read()
            except FileNotFoundError:
                return False
            if seen.content != content:
                return False
            written = seen.generation  # it was written, and the answer was lost
        self.generation, self.renewed = written, started
        return True

    def _multipart(self, content: bytes) -> bytes:
        head = f"--{_BOUNDARY}\r\nContent-Type: application/json\r\n\r\n".encode()
        parts = (json.dumps({"name": self.key}).encode(), content)
        return b"".join(head + part + b"\r\n" for part in parts) + f"--{_BOUNDARY}--".encode()

    def _read(self) -> _Seen:
        headers, content = bucket_files().call(
            "GET", "b/{}/o/{}", self.bucket, self.key, alt="media"
        )
        return _Seen(content, headers["x-goog-generation"])

    def _delete(self, generation: str) -> None:
        with suppress(FileNotFoundError, FileExistsError):  # it is gone, or another's
            bucket_files().call(
                "DELETE", "b/{}/o/{}", self.bucket, self.key, ifGenerationMatch=generation
            )


def _now() -> float:
    """Seconds of a clock that counts while the machine is suspended, too, if the system has one."""
    return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))
