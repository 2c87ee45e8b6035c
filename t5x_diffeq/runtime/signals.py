"""Stopping between optimizer steps: SIGTERM (preemption) and Ctrl-C."""

import signal
from types import FrameType

from t5x_diffeq.runtime import processes
from t5x_diffeq.runtime.agreement import Reason
from t5x_diffeq.runtime.peers import EXIT_INTERRUPTED, EXIT_PREEMPTED


class StopSignals:
    """A context that records a SIGTERM or SIGINT, and lets the step and the save finish.

    A second Ctrl-C acts at once, as it does by default. Further SIGTERMs change nothing: SLURM
    sends them to every process of a job several times within a second. A signal to any of several
    processes stops all of them after the same step (see `agreement`).

    Attributes:
      reason: why to stop; None until it is time to stop.
    """

    def __init__(self) -> None:
        self.reason: Reason | None = None
        self.agreement = processes.agreement

    def __enter__(self) -> "StopSignals":
        self.before = {s: signal.signal(s, self._note) for s in (signal.SIGTERM, signal.SIGINT)}
        return self

    def should_stop(self) -> bool:
        """Whether to stop after this step; every process must call it in every step."""
        if self.agreement is None:
            return self.reason is not None
        if not self.agreement.count_step():
            return False
        self.reason = self.agreement.reason
        return True

    def __exit__(self, *exception: object) -> None:
        self._restore()

    def _note(self, number: int, frame: FrameType | None) -> None:
        interrupted = number == signal.SIGINT
        name = "Ctrl-C" if interrupted else "SIGTERM"
        reason = Reason(EXIT_INTERRUPTED if interrupted else EXIT_PREEMPTED, name)
        if interrupted:
            self._restore()
        if self.agreement:
            self.agreement.ask(reason)
        elif self.reason is None:
            self.reason = reason

    def _restore(self) -> None:
        for number, handler in self.before.items():
            signal.signal(number, handler)
