"""Work in background threads, so that a slow or failing tracker costs the run nothing."""

import queue
import threading
import time
from collections.abc import Callable

from t5x_diffeq.runtime.console import say
from t5x_diffeq.runtime.files import describe_error
from t5x_diffeq.tracking.interface import Tracker

_MOST_CALLS = 10_000  # of a tracker that can wait


class Worker:
    """A thread that does one task after the other; the first failure ends it with a warning.

    Args:
      name: what the tasks belong to, for the warning.
      most: how many tasks can wait; beyond that, further ones are dropped, with a warning.
      tolerant: whether later tasks are done although one has failed; each failure is reported once.
    """

    def __init__(self, name: str, most: int, tolerant: bool = False):
        self.name, self.tolerant = name, tolerant
        self.tasks: queue.Queue[Callable[[], None] | None] = queue.Queue(most)
        self.failed = self.dropped = False
        self.said: set[str] = set()
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
                say(f"warning: {self.name} is too slow; some of its output is left out")
            self.dropped = True

    def _work(self) -> None:
        while (task := self.tasks.get()) is not None:
            if self.failed:
                continue  # empties the queue, so that `stop` can add its last task
            try:
                task()
            except BaseException as error:  # of any library: none may end the run
                self._warn(error)

    def _warn(self, error: BaseException) -> None:
        reason = f"{type(error).__name__}: {describe_error(error)}"
        self.failed = not self.tolerant
        consequence = "" if self.tolerant else " and is disabled"
        if reason not in self.said:
            self.said.add(reason)
            say(f"warning: {self.name} failed ({reason}){consequence}; training continues")

    def stop(self, deadline: float) -> None:
        """Waits for queued tasks until `deadline` (`time.monotonic`); warns if some remain."""
        try:
            self.tasks.put(None, timeout=max(deadline - time.monotonic(), 0.01))
            self.thread.join(max(deadline - time.monotonic(), 0.01))
        except queue.Full:
            pass
        if self.thread.is_alive():
            say(f"warning: {self.name} was not done in time; some of its output is lost")


class BackgroundTracker(Worker):
    """A tracker whose work is done in a thread of its own, its creation included.

    Args:
      name: the tracker's name, for warnings.
      make: makes the tracker.
    """

    def __init__(self, name: str, make: Callable[[], Tracker]):
        super().__init__(name, _MOST_CALLS)
        self.tracker: Tracker

        def create() -> None:
            self.tracker = make()

        self.do(create)

    def call(self, write: Callable[[Tracker], None]) -> None:
        """Has `write` called with the tracker; returns at once."""
        self.do(lambda: write(self.tracker))
