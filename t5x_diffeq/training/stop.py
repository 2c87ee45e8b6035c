"""Stopping between steps: SIGTERM (preemption) and Ctrl-C."""

import signal
from types import FrameType

EXIT_PREEMPTED = 42  # saved: start me again
EXIT_INTERRUPTED = 130  # saved, stopped by a person


class StopSignals:
    """Notes the first SIGTERM or SIGINT; a second one acts at once, as it would have.

    Use as a context. `status` is None until a signal came, then the exit status to end with.
    """

    def __init__(self):
        self.status: int | None = None
        self.name = ""

    def __enter__(self) -> "StopSignals":
        self.before = {s: signal.signal(s, self.note) for s in (signal.SIGTERM, signal.SIGINT)}
        return self

    def __exit__(self, *exception: object) -> None:
        self.restore()

    def note(self, number: int, frame: FrameType | None) -> None:
        """The handler."""
        interrupted = number == signal.SIGINT
        self.status = EXIT_INTERRUPTED if interrupted else EXIT_PREEMPTED
        self.name = "Ctrl-C" if interrupted else "SIGTERM"
        self.restore()

    def restore(self) -> None:
        """Puts back the handlers found."""
        for number, handler in self.before.items():
            signal.signal(number, handler)
