"""Metrics to disk: a line of JSON per report, and TensorBoard event files."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import jax
from etils import epath

from t5x_diffeq.runtime.console import say
from t5x_diffeq.runtime.errors import InputError
from t5x_diffeq.runtime.files import AnyPath, Growing, is_in_bucket, told

if TYPE_CHECKING:
    import tensorboardX

METRICS_FILE = "metrics.jsonl"
ON_DISK = "disk"  # tensorboardX finds our way of writing by what stands before a colon


class MetricWriter:
    """Appends reports to a workdir; only process 0 writes.

    Every line is kept before `write` returns; in a bucket, before `flush` does. A checkpoint of
    step s is saved after that, so a run that is killed and resumed leaves the lines of one never
    disturbed.

    Args:
      workdir: where.
      step: the step continued from; lines after it are cut off. 0 begins anew: all are.
    """

    def __init__(self, workdir: AnyPath, step: int):
        self.file: Growing | None = None  # of process 0, as are its events
        self.reports = 0  # lines that the file has
        if jax.process_index() != 0:
            return
        path = workdir / METRICS_FILE
        kept = kept_lines(path, step if step > 0 else -1)
        self.file, self.reports = Growing(path, kept), kept.count(b"\n")
        folder = str(workdir / "events")
        self.events = event_writer(
            folder if is_in_bucket(workdir) else f"{ON_DISK}:{folder}",
            purge_step=step + 1,
            filename_suffix=f".{step}",  # files begun within one second are two
        )

    def write(self, step: int, values: dict[str, float]) -> None:
        """One report of `values` at `step`."""
        if self.file is None:
            return
        self.file.write(f"{json.dumps({'step': step, **values})}\n".encode())
        self.reports += 1
        for name, value in values.items():
            self.events.add_scalar(name, value, step)

    def flush(self) -> None:
        """Returns when every line is kept."""
        if self.file is not None:
            self.file.flush()

    def __enter__(self) -> "MetricWriter":
        return self

    def __exit__(self, *exception: object) -> None:
        if self.file is not None:
            self.file.close()
            self.events.close()


class EventsInBuckets(Growing):
    """An event file in a bucket. tensorboardX's own uploads it once more when Python ends."""

    def __init__(self, path: str):
        super().__init__(epath.Path(path))

    def flush(self) -> None:
        """Uploads it, or warns: an error in tensorboardX's thread would stop the run for ever."""
        self.try_flush()

    @staticmethod
    def directory_check(path: str) -> None:
        """A bucket has no folders to make."""


class EventsOnDisk:
    """An event file of this machine. A full disk ends it with a warning: it is a copy of metrics.

    An error in tensorboardX's thread would stop the run for ever.
    """

    def __init__(self, path: str):
        self.path, self.file = Path(path.removeprefix(f"{ON_DISK}:")), None
        with self.warned():
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.file = self.path.open("wb", buffering=0)

    @contextmanager
    def warned(self) -> Iterator[None]:
        """Within it, an error is said, and nothing is written any more."""
        try:
            yield
        except OSError as error:
            self.file = None
            say(f"warning: {self.path} can't be written: {told(error)}; it ends here")

    def write(self, content: bytes) -> None:
        """Adds to the end."""
        if self.file is not None:
            with self.warned():
                self.file.write(content)

    def flush(self) -> None:
        """All of it is with the operating system already."""

    def close(self) -> None:
        """No more is written."""
        if self.file is not None:
            with self.warned():
                self.file.close()

    @staticmethod
    def directory_check(path: str) -> None:
        """The folder is made with the file."""


class Opening:
    """How tensorboardX opens files of a kind: `open` and `directory_check`."""

    def __init__(self, kind: type[EventsInBuckets] | type[EventsOnDisk]):
        self.open, self.directory_check = kind, kind.directory_check


def event_writer(folder: str, **options: object) -> "tensorboardX.SummaryWriter":
    """tensorboardX's writer, with our files; imported only here, because it takes seconds."""
    from tensorboardX import SummaryWriter
    from tensorboardX.record_writer import register_writer_factory

    register_writer_factory("gs", Opening(EventsInBuckets))
    register_writer_factory(ON_DISK, Opening(EventsOnDisk))
    return SummaryWriter(folder, **options)


def kept_lines(path: AnyPath, step: int) -> bytes:
    """The lines up to `step`, without a last one that was half written."""
    return b"".join(line for line in lines_of(path) if step_of(line) <= step)


def lines_of(path: AnyPath) -> list[bytes]:
    """The lines of a file; none if it isn't there.

    Raises:
      InputError: if it can't be read.
    """
    try:
        return path.read_bytes().splitlines(keepends=True) if path.exists() else []
    except OSError as error:
        raise InputError(f"{path} can't be read: {told(error)}; move it away") from error


def say_if_lost(workdir: AnyPath, step: int, reports: int | None) -> None:
    """Says so if the metrics have fewer lines than when checkpoint `step` was saved.

    Args:
      workdir: of the run.
      step: of the checkpoint.
      reports: lines at that time; None if the checkpoint doesn't tell.
    """
    there = kept_lines(workdir / METRICS_FILE, step).count(b"\n")
    if reports is not None and there < reports:
        say(
            f"warning: {workdir / METRICS_FILE} has {there} of the {reports} lines that it had at "
            f"checkpoint {step}: it was cut or replaced; training continues, those lines are lost"
        )


def step_of(line: bytes) -> float:
    """The step of a line; infinite if the line is not whole."""
    try:
        return float(json.loads(line)["step"]) if line.endswith(b"\n") else float("inf")
    except (ValueError, KeyError, TypeError):
        return float("inf")


def read_metrics(workdir: AnyPath) -> list[dict[str, float]]:
    """All reports of a workdir, oldest first."""
    lines = lines_of(workdir / METRICS_FILE)
    return [json.loads(line) for line in lines if step_of(line) < float("inf")]
