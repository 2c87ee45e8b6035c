"""Runs a command, and hands on to it the signals that this process gets."""

import os
import signal
import subprocess
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from types import FrameType

from t5x_diffeq.cluster.peers import EXIT_INTERRUPTED, EXIT_PREEMPTED
from t5x_diffeq.system.files import open_to_write
from t5x_diffeq.system.parent import environment_of_child

_STATUSES = {signal.SIGTERM: EXIT_PREEMPTED, signal.SIGINT: EXIT_INTERRUPTED}


class StoppedError(Exception):
    """A run was stopped, and saved."""

    def __init__(self, status: int):
        super().__init__(status)
        self.status = status


class Commands:
    """A context in which SIGTERM and Ctrl-C are handed on to the command that runs.

    The command has a process group of its own: a terminal sends Ctrl-C to a whole group, and a
    training would take a second Ctrl-C as a request to stop without saving. On Linux the command
    gets SIGTERM if this process is killed.
    """

    def __init__(self) -> None:
        self.child: subprocess.Popen | None = None
        self.received: int | None = None

    def __enter__(self) -> "Commands":
        self.before = {number: signal.signal(number, self._hand_on) for number in _STATUSES}
        return self

    def __exit__(self, *exception: object) -> None:
        for number, handler in self.before.items():
            signal.signal(number, handler)

    def check(self) -> None:
        """Raises a `StoppedError` if a signal has come."""
        if self.received is not None:
            raise StoppedError(_STATUSES[signal.Signals(self.received)])

    def run(
        self, command: Sequence[str], log_file: Path, watch: Callable[[], None] = lambda: None
    ) -> tuple[int, str]:
        """Runs a command, with its messages in a log; returns its status and standard output.

        Args:
          command: the words of the command.
          log_file: the file to which its standard error is appended.
          watch: called every second while it runs, and when it has ended.

        Raises:
          StoppedError: if a signal ended it.
          Exception: what `watch` raises, after the command was ended.
        """
        with os.fdopen(open_to_write(log_file, os.O_WRONLY | os.O_APPEND), "ab") as messages:
            self.child = subprocess.Popen(
                command,
                stdout=subprocess.PIPE,
                stderr=messages,
                process_group=0,
                env=environment_of_child(),
            )
            if self.received is not None:  # it came while the command started
                self.child.send_signal(self.received)
            printed = None
            while printed is None:
                with suppress(subprocess.TimeoutExpired):
                    printed, _ = self.child.communicate(timeout=1)
                try:
                    watch()
                except BaseException:
                    self.child.terminate()
                    self.child.communicate()  # `wait` could hang at a full pipe
                    raise
        status, self.child = self.child.returncode, None
        if status in _STATUSES.values():
            raise StoppedError(status)
        if status != 0:
            self.check()
        return status, printed.decode()

    def _hand_on(self, number: int, frame: FrameType | None) -> None:
        self.received = number
        if self.child is not None:
            self.child.send_signal(number)
