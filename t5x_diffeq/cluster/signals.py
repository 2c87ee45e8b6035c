"""Stopping between optimizer steps, or in an evaluation: preemption, a closed terminal, Ctrl-C.

A request to save, which no signal makes, is carried out at the same places.

A system that takes the machine away sends SIGTERM. Schedulers that are asked for a warning send
SIGUSR1 (`sbatch --signal=USR1@60`). A terminal or connection that is closed sends SIGHUP, which
`nohup` ignores.
"""

import signal
import threading
from collections.abc import Iterable, Iterator
from types import FrameType
from typing import TypeVar

from t5x_diffeq.cluster import processes
from t5x_diffeq.cluster.agreement import Request
from t5x_diffeq.cluster.peers import EXIT_INTERRUPTED, EXIT_PREEMPTED
from t5x_diffeq.system import console

_Item = TypeVar("_Item")


class Interrupted(Exception):  # noqa: N818  # nothing went wrong
    """The run stops in the middle of an evaluation or similar work (see `interruptible`)."""


_SIGNALS = (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGINT)


class StopSignals:
    """A context that records one of the signals, and lets the step and the save finish.

    Outside the main thread, which alone gets signals, it records none, and says so.

    A second Ctrl-C acts at once, as it does by default. Further signals of other kinds change
    nothing: SLURM sends SIGTERM to every process of a job several times within a second. A signal
    to any of several processes stops all of them at the same place (see `agreement`).

    Attributes:
      reason: the request to stop; None until it is time to stop.
      save_asked: whether it is time to save. Whoever saves sets it to False.
    """

    def __init__(self) -> None:
        self.reason: Request | None = None
        self.save_asked = False
        self.agreement = processes.agreement

    def __enter__(self) -> "StopSignals":
        handled = [
            s for s in _SIGNALS if s is not signal.SIGHUP or signal.getsignal(s) != signal.SIG_IGN
        ]
        if threading.current_thread() is not threading.main_thread():
            handled = []
            console.log(
                "note: in a thread, Ctrl-C and SIGTERM won't save the run; an empty file `save` in "
                "its workdir asks for a checkpoint"
            )
        self.before = {s: signal.signal(s, self._note) for s in handled}
        return self

    def should_stop(self) -> bool:
        """Whether to stop here, such as after a step; every process must call it at each place."""
        for request in self.agreement.count_place() if self.agreement else ():
            self._carry_out(request)
        return self.reason is not None

    def ask(self, request: Request) -> None:
        """Asks all processes to stop or to save at the same place; returns at once."""
        if self.agreement:
            self.agreement.ask(request)
        else:
            self._carry_out(request)

    def _carry_out(self, request: Request) -> None:
        if request.status:
            self.reason = self.reason or request
        else:
            self.save_asked = True

    def interruptible(self, items: Iterable[_Item]) -> Iterator[_Item]:
        """Yields the items, equally many on all processes; Interrupted once it is time to stop."""
        for item in items:
            if self.should_stop():
                raise Interrupted
            yield item

    def __exit__(self, *exception: object) -> None:
        for number, handler in self.before.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        interrupted = number == signal.SIGINT
        name = "Ctrl-C" if interrupted else signal.Signals(number).name
        status = EXIT_INTERRUPTED if interrupted else EXIT_PREEMPTED
        if interrupted:
            signal.signal(signal.SIGINT, self.before[signal.SIGINT])  # a second Ctrl-C acts at once
        if number == signal.SIGHUP:
            console.leave_terminal()
        self.ask(Request(status, name))
