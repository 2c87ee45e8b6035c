"""The writer of a run: the workdir's files and the trackers of `config.train.trackers`."""

import json
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from jaxtyping import UInt8

from t5x_diffeq.system.errors import InputError
from t5x_diffeq.system.extras import need_package
from t5x_diffeq.system.files import AnyPath, parse_json, write_whole
from t5x_diffeq.system.foreign_files import read_inside
from t5x_diffeq.training.tracking.interface import Array, BackgroundTracker, Scalar, Tracker, Worker
from t5x_diffeq.training.tracking.jsonl import JsonlWriter
from t5x_diffeq.training.tracking.services import TensorBoardTracker, WandbTracker, check_login

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_FILE = "trackers.json"  # the run's id in W&B
_SECONDS_TO_CLOSE = 30.0  # for all trackers together, at the end of a run
_MOST_FIGURES = 32  # the most figures that can wait to be drawn
_DRAWING = threading.Lock()  # matplotlib's caches of fonts are not made for several threads


def check_trackers(trackers: Sequence[str]) -> None:
    """Checks that the libraries of the trackers are installed, and that W&B has an account."""
    for name in trackers:
        if name != "tensorboard":
            need_package(name, f"train.trackers={name}", "leave it out")
    if "wandb" in trackers and jax.process_index() == 0:
        check_login()


class RunWriter:
    """Writes to the files of the workdir at once, and to the trackers in threads of their own.

    Only process 0 has anything to write to. A file that can't be written ends the run; a failing
    tracker is disabled, with a warning.
    """

    def __init__(self, files: JsonlWriter | None, trackers: Sequence[BackgroundTracker]):
        self.files, self.trackers = files, trackers
        if trackers:
            self.drawing = Worker("the drawing of figures", _MOST_FIGURES, tolerant=True)

    @property
    def reports(self) -> int:
        """The number of lines in `metrics.jsonl`."""
        return self.files.reports if self.files else 0

    def _each(self, write: Callable[[Tracker], None]) -> None:
        """Calls `write` with the files now, and with the trackers in their threads."""
        if self.files:
            write(self.files)
        for tracker in self.trackers:
            tracker.call(write)

    def write_scalars(self, step: int, scalars: Mapping[str, Scalar]) -> None:
        """Writes numbers: a line of `metrics.jsonl`."""
        numbers = dict(scalars)  # trackers read them later, when hooks may have changed `scalars`
        self._each(lambda writer: writer.write_scalars(step, numbers))

    def write_summaries(
        self, step: int, values: Mapping[str, Array], metadata: Mapping[str, Any] | None = None
    ) -> None:
        """Writes arrays: a line of `curves.jsonl`. Trackers show arrays as figures (`draw`)."""
        if self.files:
            self.files.write_summaries(step, values, metadata)

    def write_images(self, step: int, images: Mapping[str, Array]) -> None:
        """Writes images, to trackers only."""
        self._each(lambda writer: writer.write_images(step, images))

    def write_texts(self, step: int, texts: Mapping[str, str]) -> None:
        """Writes texts: a line of `samples.jsonl`."""
        self._each(lambda writer: writer.write_texts(step, texts))

    def write_hparams(self, hparams: Mapping[str, Any]) -> None:
        """Writes what describes the run: `hyperparameters.json`."""
        self._each(lambda writer: writer.write_hparams(hparams))

    def rewind(self, step: int) -> None:
        """Goes back to `step`: files lose the lines of later steps, which will be written again."""
        self._each(lambda writer: writer.rewind(step))

    def draw(self, step: int, name: str, make: Callable[[], "Figure"]) -> None:
        """Has a figure drawn and written as an image, if there are trackers; returns at once.

        `make` makes the figure from arrays on the host. It is called in another thread, where it
        should import matplotlib; it isn't called if too many figures wait.
        """

        def task() -> None:
            with _DRAWING:
                image = render(make())
            self.write_images(step, {name: image})

        if self.trackers:
            self.drawing.do(task)

    def flush(self) -> None:
        """Returns when every line of the files is stored."""
        if self.files:
            self.files.flush()

    def close(self) -> None:
        """Stores everything; waits at most half a minute for the trackers."""
        deadline = time.monotonic() + _SECONDS_TO_CLOSE
        try:
            if self.files:
                self.files.close()
        finally:
            if self.trackers:
                self.drawing.stop(deadline)
            for tracker in self.trackers:
                tracker.call(lambda writer: writer.close())
            for tracker in self.trackers:
                tracker.stop(deadline)


def render(figure: "Figure") -> UInt8[np.ndarray, "H W 3"]:
    """A figure as an image, `figure.dpi` dots per inch."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    return np.array(canvas.buffer_rgba())[..., :3]


@contextmanager
def open_writer(
    workdir: AnyPath, step: int, trackers: Sequence[str], reports: int | None = None
) -> Iterator[RunWriter]:
    """A context with the writer of a run that resumes from a step, or at 0 starts afresh.

    `reports` is the number of reports up to that step, if it is known; see `JsonlWriter`.
    """
    if jax.process_index() != 0:
        yield RunWriter(None, [])
        return
    files = JsonlWriter(workdir, step, reports)
    named = [_tracker(name, workdir, step) for name in dict.fromkeys(trackers)]
    writer = RunWriter(files, named)
    try:
        yield writer
    finally:
        writer.close()


def _tracker(name: str, workdir: AnyPath, step: int) -> BackgroundTracker:
    """A tracker; its library is imported in its thread, because that takes seconds."""

    run_id = _wandb_id(workdir) if name == "wandb" else ""

    def make() -> Tracker:
        if name == "wandb":
            return WandbTracker(workdir, run_id, _SECONDS_TO_CLOSE)
        return TensorBoardTracker(workdir, step)

    return BackgroundTracker(name, make)


def _wandb_id(workdir: AnyPath) -> str:
    """The run's id in W&B, made once and kept in the workdir."""
    path = workdir / _FILE
    try:
        known = parse_json(read_inside(path)) if path.exists() else {}
        run_id = known.get("wandb") or secrets.token_hex(4)
    except (OSError, ValueError, AttributeError, TypeError) as error:
        raise InputError(
            f"{path} can't be read: {error}; remove it, and the trackers begin new runs"
        ) from error
    if known.get("wandb") != run_id:
        write_whole(path, json.dumps({**known, "wandb": run_id}).encode())
    return run_id
