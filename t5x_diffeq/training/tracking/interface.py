"""The interface of trackers and of writers of files, and threads in which trackers work.

The names and parameters are those of `clu.metric_writers.interface.MetricWriter`, which can't be
imported without TensorFlow; a test compares the two.
"""

import queue
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import numpy as np

from t5x_diffeq.system.console import log
from t5x_diffeq.system.files import describe_error

_MOST_CALLS = 10_000  # the most calls of a tracker that can wait
Array: TypeAlias = np.ndarray
Scalar: TypeAlias = float | int | np.number


class Tracker:
    """Keeps what a run reports at an optimizer step. Methods that aren't overridden do nothing."""

    def write_scalars(self, step: int, scalars: Mapping[str, Scalar]) -> None:
        """Writes numbers by name."""

    def write_images(self, step: int, images: Mapping[str, Array]) -> None:
        """Writes images by name: uint8 arrays `[H, W, C]` with C = 1, 3 or 4."""

    def write_texts(self, step: int, texts: Mapping[str, str]) -> None:
        """Writes plain texts by name."""

    def write_hparams(self, hparams: Mapping[str, Any]) -> None:
        """Writes what describes the run as a whole, once per start: flat names with values."""

    def rewind(self, step: int) -> None:
        """Goes back to `step`: the steps after it will be written again."""

    def close(self) -> None:
        """Stores everything; the tracker is unusable afterwards."""


class Worker:
    """A thread that does one task after the other; the first failure ends it with a warning.

    Args:
      name: what the tasks belong to, for the warning.
      most: how many tasks can wait; further tasks are dropped, with a warning.
      tolerant: whether later tasks are done although one has failed; each failure is reported once.
    """

    def __init__(self, name: str, most: int, tolerant: bool = False):
        self.name, self.tolerant = name, tolerant
        self.tasks: queue.Queue[Callable[[], None] | None] = queue.Queue(most)
        self.failed = self.dropped = False
        self.reported: set[str] = set()
        self.thread = threading.Thread(target=self._work, name=name, daemon=True)
        self.thread.start()

    def do(self, task: Callable[[], None]) -> None:
        """Adds a task, or drops it if too many wait; returns at once."""
        if self.failed:
            return
        try:
            self.tasks.put_nowait(task)
        except queue.Full:
            if not self.dropped:
                log(f"warning: {self.name} is too slow; some of its output is left out")
            self.dropped = True

    def _work(self) -> None:
        while (task := self.tasks.get()) is not None:
            if self.failed:
                continue  # empties the queue, so that `stop` can add its last task
            try:
                task()
            except BaseException as error:  # no error of a library may end the run
                self._warn(error)

    def _warn(self, error: BaseException) -> None:
        reason = f"{type(error).__name__}: {describe_error(error)}"
        self.failed = not self.tolerant
        consequence = "" if self.tolerant else " and is disabled"
        if reason not in self.reported:
            self.reported.add(reason)
            log(f"warning: {self.name} failed ({reason}){consequence}; training continues")

    def stop(self, deadline: float) -> None:
        """Waits for queued tasks until `deadline` (`time.monotonic`); warns if some remain."""
        try:
            self.tasks.put(None, timeout=max(deadline - time.monotonic(), 0.01))
            self.thread.join(max(deadline - time.monotonic(), 0.01))
        except queue.Full:
            pass
        if self.thread.is_alive():
            log(f"warning: {self.name} was not done in time; some of its output is lost")


class BackgroundTracker(Worker):
    """A tracker that is made, and does all of its work, in a thread of its own."""

    def __init__(self, name: str, make: Callable[[], Tracker]):
        super().__init__(name, _MOST_CALLS)
        self.tracker: Tracker

        def create() -> None:
            self.tracker = make()

        self.do(create)

    def call(self, write: Callable[[Tracker], None]) -> None:
        """Calls `write` with the tracker in the thread; returns at once."""
        self.do(lambda: write(self.tracker))
