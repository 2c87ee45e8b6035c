"""Ends a run that hangs because a peer, a link or a device no longer answers without failing."""

import faulthandler
import os
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import jax

from t5x_diffeq.cluster import processes
from t5x_diffeq.cluster.peers import EXIT_INFRASTRUCTURE, LAST_LINE, Failure
from t5x_diffeq.system.files import AnyPath, describe_error, write_whole

_SECONDS_TO_WRITE = 30  # for the stacks, as the bucket they go to may be what hangs


class Watchdog:
    """A context whose thread checks that what the run waits for finishes in time.

    If it doesn't, every process writes the stacks of all its threads into the workdir (into
    `stacks/process_<n>.txt`), says so in one line, and ends with status 175. Nothing is watched
    until `expect` or `limit` is called.
    """

    def __init__(self, workdir: AnyPath):
        self.file = workdir / "stacks" / f"process_{jax.process_index()}.txt"
        self.what, self.deadline = "", float("inf")
        self.seconds: float | None = None
        self.changed = threading.Condition()
        self.ended = False

    def expect(self, what: str, seconds: float | None) -> None:
        """Gives `what`, such as "step 7", so many seconds from now (None: no limit).

        What was expected before has finished.
        """
        with self.changed:
            self.what, self.seconds = what, seconds
            self.deadline = float("inf") if seconds is None else time.monotonic() + seconds
            self.changed.notify()

    @contextmanager
    def limit(self, what: str, seconds: float | None) -> Iterator[None]:
        """A context in which `what` is expected. After it, the earlier work has its full time."""
        before = self.what, self.seconds
        self.expect(what, seconds)
        try:
            yield
        finally:
            self.expect(*before)

    def _watch(self) -> None:
        with self.changed:
            while not self.ended:
                left = self.deadline - time.monotonic()
                if left <= 0:
                    break
                self.changed.wait(None if left == float("inf") else left)
            if self.ended:
                return
        _end_hanging(self.file, f"{self.what} was not done within {self.seconds:g} s")

    def __enter__(self) -> "Watchdog":
        if processes.peers:
            processes.peers.at_hang = lambda: _write_stacks(self.file)
        threading.Thread(target=self._watch, name="watchdog", daemon=True).start()
        return self

    def __exit__(self, *exception: object) -> None:
        with self.changed:
            self.ended = True
            self.changed.notify()


def _end_hanging(file: AnyPath, what: str) -> None:
    failure = Failure(
        jax.process_index(),
        EXIT_INFRASTRUCTURE,
        f"{what}: a process, a link or a device hangs; the stacks of all threads are in "
        f"{file.parent}; the same command continues the run",
        hang=True,
    ).unless_repeated()
    _write_stacks(file)
    if processes.peers:
        processes.peers.send_failure(failure)
    LAST_LINE.print(failure)
    os._exit(failure.status)


def _write_stacks(file: AnyPath) -> None:
    """Writes the stack of every thread, or warns that it can't; takes bounded time."""

    def write() -> None:
        try:
            with tempfile.TemporaryFile() as stacks:
                faulthandler.dump_traceback(stacks, all_threads=True)
                stacks.seek(0)
                write_whole(file, stacks.read())
        except Exception as error:  # from any library below; the process must end anyway
            print(f"warning: {file} can't be written: {describe_error(error)}", flush=True)

    writing = threading.Thread(target=write, daemon=True)
    writing.start()
    writing.join(_SECONDS_TO_WRITE)
