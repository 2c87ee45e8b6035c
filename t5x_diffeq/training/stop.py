"""Stopping between steps: SIGTERM (preemption) and Ctrl-C."""

import os
import signal
from types import FrameType

from jax.experimental import multihost_utils

from t5x_diffeq.processes import are_several

EXIT_PREEMPTED = 42  # saved: start me again
EXIT_INTERRUPTED = 130  # saved, stopped by a person


class StopSignals:
    """Notes a SIGTERM or SIGINT, and lets the step and the save end.

    A second Ctrl-C acts at once, as it would have. Further SIGTERMs change nothing: SLURM sends it
    to every process of a job several times within a second.

    Of several processes, any that gets a signal stops all, after the same step: JAX's preemption
    service hears SIGTERM, and makes them agree; a SIGINT is turned into one.

    Use as a context. `status` is None until it is time to stop, then the exit status to end with.
    """

    def __init__(self):
        self.status: int | None = None
        self.name = ""
        self.calls = 0  # of `after_step`

    def __enter__(self) -> "StopSignals":
        self.several = are_several()
        heard = (signal.SIGINT,) if self.several else (signal.SIGTERM, signal.SIGINT)
        self.before = {s: signal.signal(s, self.note) for s in heard}
        return self

    def after_step(self) -> bool:
        """Whether to stop after this step; to be called in every step, by every process."""
        if not self.several:
            return self.status is not None
        # What comes before the first call is agreed on as call 1, whatever the step: so calls are
        # counted, or a continued run would never hear of a signal during its compilation.
        self.calls += 1
        agreed = multihost_utils.reached_preemption_sync_point(self.calls)
        if agreed and self.status is None:
            self.status, self.name = EXIT_PREEMPTED, "SIGTERM to one of the processes"
        return agreed

    def __exit__(self, *exception: object) -> None:
        self.restore()

    def note(self, number: int, frame: FrameType | None) -> None:
        """The handler."""
        interrupted = number == signal.SIGINT
        if self.status is None:
            self.status = EXIT_INTERRUPTED if interrupted else EXIT_PREEMPTED
            self.name = "Ctrl-C" if interrupted else "SIGTERM"
        if interrupted:
            self.restore()
        if self.several:
            os.kill(os.getpid(), signal.SIGTERM)

    def restore(self) -> None:
        """Puts back the handlers found."""
        for number, handler in self.before.items():
            signal.signal(number, handler)
