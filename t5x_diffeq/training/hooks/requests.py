"""Takes up what a person asks of a run while it trains, by files in its workdir.

A file `profile` asks for a trace (`profiler`), and a file `save` for a checkpoint
(`basic_hooks.Saves`). Such files work on every disk and in a bucket, with any launcher.
"""

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any, ClassVar

from t5x_diffeq.system.console import log
from t5x_diffeq.system.files import describe_error
from t5x_diffeq.training.hooks.hook import Hook, Training

SECONDS_BETWEEN_LOOKS = 10.0


class Requests(Hook):
    """Looks for the files of `Training.requests`, in a thread, so no step waits for a disk."""

    name: ClassVar[str] = "requests"

    def __init__(self, training: Training):
        super().__init__(training)
        self.ended = threading.Event()
        self.pool = ThreadPoolExecutor(1, "requests")
        self.warnings: set[str] = set()  # the warnings that were printed

    def __enter__(self) -> "Requests":
        if self.training.requests:
            self.pool.submit(self._look_often)
        return self

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        self.ended.set()
        self.pool.shutdown()

    def _look_often(self) -> None:
        while not self.ended.wait(SECONDS_BETWEEN_LOOKS):
            try:
                self._look()
            except Exception as error:  # any file system may raise its own
                warning = f"warning: {self.training.workdir}: {describe_error(error)}"
                if warning not in self.warnings:
                    self.warnings.add(warning)
                    log(warning)

    def _look(self) -> None:
        """Takes up the requests in the workdir, which is listed once for all of them."""
        requests = self.training.requests
        for file in self.training.workdir.iterdir():
            if file.name in requests:
                requests[file.name](file)
