"""The writer of a run: the workdir's files and the trackers of `config.train.trackers`."""

import importlib.util
import json
import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import jax

from t5x_diffeq.runtime.console import say
from t5x_diffeq.runtime.errors import InputError, MachineryError, RunError
from t5x_diffeq.runtime.files import AnyPath, write_whole
from t5x_diffeq.tracking.background import BackgroundWriter
from t5x_diffeq.tracking.figures import FigureWorker
from t5x_diffeq.tracking.interface import Array, MetricWriter, Scalar
from t5x_diffeq.tracking.jsonl import JsonlWriter
from t5x_diffeq.tracking.tensorboard import TensorBoardWriter

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_FILE = "trackers.json"  # the run's id in each tracker
_SECONDS_TO_CLOSE = 30.0  # for all trackers together, at the end of a run


def check_trackers(trackers: Sequence[str]) -> None:
    """Checks that the libraries of the trackers are installed and have an account if they need one.

    Raises:
      InputError: if not; says what to do.
    """
    for name in trackers:
        if name != "tensorboard" and not importlib.util.find_spec(name):
            raise InputError(
                f"train.trackers has {name}, whose package is not installed; "
                "pip install -e '.[trackers]', or leave it out"
            )
    if "wandb" in trackers and jax.process_index() == 0:
        from t5x_diffeq.tracking.wandb import check_login

        check_login()


class RunWriter:
    """Writes to the files of the workdir at once, and to the trackers in threads of their own.

    Only process 0 has anything to write to. A file that can't be written ends the run; a tracker
    never does: it warns once, and gets nothing more.

    Args:
      files: the files of the workdir; None on the other processes.
      trackers: the trackers.
    """

    def __init__(self, files: JsonlWriter | None, trackers: Sequence[BackgroundWriter]):
        self.files, self.trackers = files, list(trackers)
        self.writers: list[MetricWriter] = [*([files] if files else []), *self.trackers]
        self.figures = FigureWorker([*self.trackers]) if trackers else None

    @property
    def reports(self) -> int:
        """The number of lines in `metrics.jsonl`."""
        return self.files.reports if self.files else 0

    def write_scalars(self, step: int, scalars: Mapping[str, Scalar]) -> None:
        """Writes numbers: a line of `metrics.jsonl`."""
        for writer in self.writers:
            writer.write_scalars(step, scalars)

    def write_summaries(
        self, step: int, values: Mapping[str, Array], metadata: Mapping[str, Any] | None = None
    ) -> None:
        """Writes arrays: a line of `curves.jsonl`. Trackers show arrays as figures (`draw`)."""
        for writer in self.writers:
            writer.write_summaries(step, values, metadata)

    def write_images(self, step: int, images: Mapping[str, Array]) -> None:
        """Writes images, to trackers only."""
        for writer in self.writers:
            writer.write_images(step, images)

    def write_texts(self, step: int, texts: Mapping[str, str]) -> None:
        """Writes texts: a line of `samples.jsonl`."""
        for writer in self.writers:
            writer.write_texts(step, texts)

    def write_hparams(self, hparams: Mapping[str, Any]) -> None:
        """Writes what describes the run: `hyperparameters.json`."""
        for writer in self.writers:
            writer.write_hparams(hparams)

    def rewind(self, step: int) -> None:
        """Goes back to `step`: the files lose later lines, and trackers get them once more."""
        if self.files:
            self.files.rewind(step)
        for tracker in self.trackers:
            tracker.rewind(step)

    def draw(self, step: int, name: str, make: Callable[[], "Figure"]) -> None:
        """Has a figure drawn and written as an image, if there are trackers; returns at once.

        Args:
          step: the optimizer step that it shows.
          name: the name of the image.
          make: makes the figure from arrays on the host; called in another thread, which is where
            matplotlib should be imported.
        """
        if self.figures:
            self.figures.draw(step, name, make)

    def flush(self) -> None:
        """Returns when every line of the files is stored; doesn't wait for the trackers."""
        for writer in self.writers:
            writer.flush()

    def try_flush(self) -> None:
        """Flushes; if a bucket doesn't take the files, that is a warning, and they are kept."""
        try:
            self.flush()
        except (RunError, MachineryError) as error:
            say(f"warning: {error}; the run goes on, and tries again later")

    def close(self) -> None:
        """Stores everything; waits at most half a minute for the trackers."""
        deadline = time.monotonic() + _SECONDS_TO_CLOSE
        try:
            if self.files:
                self.files.close()
        finally:
            if self.figures:
                self.figures.stop(deadline)
            for tracker in self.trackers:
                tracker.close()
            for tracker in self.trackers:
                tracker.stop(deadline)


@contextmanager
def open_writer(workdir: AnyPath, step: int, trackers: Sequence[str]) -> Iterator[RunWriter]:
    """A context with the writer of a run.

    Args:
      workdir: the run's workdir.
      step: the step to resume from; later lines are removed. 0 starts afresh: all are removed.
      trackers: names of trackers, see `config.train.trackers`.

    Raises:
      InputError: if the files of the workdir can't be read.
      RunError: if they can't be written.
    """
    if jax.process_index() != 0:
        yield RunWriter(None, [])
        return
    files = JsonlWriter(workdir, step)
    ids = _run_ids(workdir, trackers)
    writer = RunWriter(
        files, [_tracker(name, workdir, step, ids) for name in dict.fromkeys(trackers)]
    )
    try:
        yield writer
    finally:
        writer.close()


def _tracker(name: str, workdir: AnyPath, step: int, ids: Mapping[str, str]) -> BackgroundWriter:
    """A tracker; its library is imported in its thread, because that takes seconds."""

    def make() -> MetricWriter:
        if name == "wandb":
            from t5x_diffeq.tracking.wandb import WandbWriter

            return WandbWriter(workdir, ids[name], _SECONDS_TO_CLOSE)
        if name == "trackio":
            from t5x_diffeq.tracking.trackio import TrackioWriter

            return TrackioWriter(f"{workdir.name}-{ids[name]}")
        return TensorBoardWriter(workdir, step)

    return BackgroundWriter(name, make)


def _run_ids(workdir: AnyPath, trackers: Sequence[str]) -> dict[str, str]:
    """The run's id in each tracker, made once and kept in the workdir.

    Raises:
      InputError: if the file that has them can't be read.
    """
    path = workdir / _FILE
    try:
        known = json.loads(path.read_text()) if path.exists() else {}
        ids = {**known, **{name: known.get(name) or secrets.token_hex(4) for name in trackers}}
    except (OSError, ValueError, AttributeError, TypeError) as error:
        raise InputError(
            f"{path} can't be read: {error}; remove it, and the trackers begin new runs"
        ) from error
    ids.pop("tensorboard", None)
    if ids != known:
        write_whole(path, json.dumps(ids).encode())
    return ids
