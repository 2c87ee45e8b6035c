"""What a save has cost: how long training waited, how long it took, and how much it wrote."""

import threading
import time
from collections.abc import Callable
from typing import Literal, NamedTuple

from t5x_diffeq.runtime.console import say

Tier = Literal["workdir", "local"]
_LONG = 1.0  # seconds for which training should not wait


class FinishedSave(NamedTuple):
    """A checkpoint that is completely written.

    Attributes:
      step: its optimizer step.
      tier: "workdir", or "local" for one in `train.local_checkpoints`.
      size: bytes; of a local one, those of this process.
      waited: seconds that the training thread was blocked, also by the save before it.
      seconds: from the call of `save` to the end of writing.
    """

    step: int
    tier: Tier
    size: int
    waited: float
    seconds: float

    def line(self) -> str:
        """`checkpoint 500 saved: 63 MB; training waited 0.02 s, written in 0.8 s`."""
        return (
            f"{'local ' if self.tier == 'local' else ''}checkpoint {self.step} saved: "
            f"{format_bytes(self.size)}; training waited {self.waited:.2f} s, "
            f"written in {self.seconds:.1f} s"
        )


class SaveTimes:
    """Collects finished saves. `add` may be called in any thread, the rest in the main thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._new: list[FinishedSave] = []
        self._said: list[FinishedSave] = []
        self._has_said_local = False

    def add(self, save: FinishedSave) -> None:
        """Adds a save that has just finished."""
        with self._lock:
            self._new.append(save)

    def say_new(self) -> None:
        """Prints a line for each new save; of quick local ones, only for the first."""
        with self._lock:
            new, self._new = self._new, []
        for save in new:
            if save.tier == "workdir" or save.waited > _LONG or not self._has_said_local:
                say(save.line())
            self._has_said_local |= save.tier == "local"
        self._said += new

    def take(self) -> list[FinishedSave]:
        """The saves that finished since the last call."""
        self.say_new()
        taken, self._said = self._said, []
        return taken


def watch(wait: Callable[[], None], finish: Callable[[float], None]) -> threading.Thread:
    """A thread that waits for a save, then calls `finish` with the time at which it ended.

    Args:
      wait: returns when the save is finished, and raises if it fails; whoever called `save` hears
        of the failure too.
      finish: gets the value of `time.perf_counter()`.
    """

    def run() -> None:
        try:
            wait()
        except Exception:
            return
        finish(time.perf_counter())

    thread = threading.Thread(target=run, name="watch_save", daemon=True)
    thread.start()
    return thread


def format_bytes(size: int) -> str:
    """A size such as `84 kB`, `63 MB`, `1.01 GB`."""
    for unit, name, digits in ((10**12, "TB", 2), (10**9, "GB", 2), (10**6, "MB", 0)):
        if size >= unit:
            return f"{size / unit:.{digits}f} {name}"
    return f"{size / 1000:.0f} kB"
