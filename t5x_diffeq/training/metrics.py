"""Writes metrics: a line of JSON per report, and TensorBoard event files."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import jax
from etils import epath

from t5x_diffeq.runtime.console import say
from t5x_diffeq.runtime.errors import InputError
from t5x_diffeq.runtime.files import AnyPath, GrowingFile, describe_error, is_in_bucket

if TYPE_CHECKING:
    import tensorboardX

_METRICS_FILE = "metrics.jsonl"
_ON_DISK = "disk"  # tensorboardX chooses our writer by the prefix before a colon


class MetricWriter:
    """Appends reports to a workdir; only process 0 writes.

    Every line is stored before `write` returns; in a bucket, before `flush` does. A checkpoint of
    step s is saved after that, so a run that is killed and resumed leaves the same lines as an
    uninterrupted one.

    Args:
      workdir: where to write.
      step: the step to resume from; later lines are removed. 0 starts afresh: all are removed.
    """

    def __init__(self, workdir: AnyPath, step: int):
        self.file: GrowingFile | None = None  # process 0 only, as are the events
        self.reports = 0  # lines in the file
        if jax.process_index() != 0:
            return
        path = workdir / _METRICS_FILE
        kept = _lines_up_to(path, step if step > 0 else -1)
        self.file, self.reports = GrowingFile(path, kept), kept.count(b"\n")
        folder = str(workdir / "events")
        self.events = _event_writer(
            folder if is_in_bucket(workdir) else f"{_ON_DISK}:{folder}",
            purge_step=step + 1,
            filename_suffix=f".{step}",  # else files begun within one second would share a name
        )

    def write(self, step: int, values: dict[str, float]) -> None:
        """Writes a report of `values` at `step`."""
        if self.file is None:
            return
        self.file.write(f"{json.dumps({'step': step, **values})}\n".encode())
        self.reports += 1
        for name, value in values.items():
            self.events.add_scalar(name, value, step)

    def flush(self) -> None:
        """Returns when every line is stored."""
        if self.file is not None:
            self.file.flush()

    def __enter__(self) -> "MetricWriter":
        return self

    def __exit__(self, *exception: object) -> None:
        if self.file is not None:
            self.file.close()
            self.events.close()


class _BucketEventFile(GrowingFile):
    """An event file in a bucket; tensorboardX's own class uploads it again when Python exits."""

    def __init__(self, path: str):
        super().__init__(epath.Path(path))

    def flush(self) -> None:
        """Uploads it, or warns: an error in tensorboardX's thread would block the run for ever."""
        self._try_flush()

    @staticmethod
    def directory_check(path: str) -> None:
        """Does nothing: a bucket has no folders to make."""


class _LocalEventFile:
    """A local event file. A full disk ends it with a warning, as it only duplicates the metrics.

    An error in tensorboardX's thread would block the run for ever.
    """

    def __init__(self, path: str):
        self.path, self.file = Path(path.removeprefix(f"{_ON_DISK}:")), None
        with self._warn_instead():
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.file = self.path.open("wb", buffering=0)

    @contextmanager
    def _warn_instead(self) -> Iterator[None]:
        """A context in which an error becomes a warning, after which nothing more is written."""
        try:
            yield
        except OSError as error:
            self.file = None
            say(f"warning: {self.path} can't be written: {describe_error(error)}; it ends here")

    def write(self, content: bytes) -> None:
        """Appends to the file."""
        if self.file is not None:
            with self._warn_instead():
                self.file.write(content)

    def flush(self) -> None:
        """Does nothing: the file is unbuffered."""

    def close(self) -> None:
        """Closes the file."""
        if self.file is not None:
            with self._warn_instead():
                self.file.close()

    @staticmethod
    def directory_check(path: str) -> None:
        """Does nothing: the folder is made with the file."""


class _EventFileOpener:
    """The interface with which tensorboardX opens files: `open` and `directory_check`."""

    def __init__(self, kind: type[_BucketEventFile] | type[_LocalEventFile]):
        self.open, self.directory_check = kind, kind.directory_check


def _event_writer(folder: str, **options: object) -> "tensorboardX.SummaryWriter":
    """tensorboardX's writer with our files; imported only here, because that takes seconds."""
    from tensorboardX import SummaryWriter
    from tensorboardX.record_writer import register_writer_factory

    register_writer_factory("gs", _EventFileOpener(_BucketEventFile))
    register_writer_factory(_ON_DISK, _EventFileOpener(_LocalEventFile))
    return SummaryWriter(folder, **options)


def _lines_up_to(path: AnyPath, step: int) -> bytes:
    return b"".join(line for line in _lines_of(path) if _step_of(line) <= step)


def _lines_of(path: AnyPath) -> list[bytes]:
    try:
        return path.read_bytes().splitlines(keepends=True) if path.exists() else []
    except OSError as error:
        raise InputError(f"{path} can't be read: {describe_error(error)}; move it away") from error


def warn_if_lost(workdir: AnyPath, step: int, reports: int | None) -> None:
    """Warns if the metrics have fewer lines than when checkpoint `step` was saved.

    Args:
      workdir: the run's workdir.
      step: the checkpoint's step.
      reports: the number of lines at that time; None if the checkpoint doesn't record it.
    """
    there = _lines_up_to(workdir / _METRICS_FILE, step).count(b"\n")
    if reports is not None and there < reports:
        say(
            f"warning: {workdir / _METRICS_FILE} has {there} of the {reports} lines that it had at "
            f"checkpoint {step}: it was cut or replaced; training continues, those lines are lost"
        )


def _step_of(line: bytes) -> float:
    try:
        return float(json.loads(line)["step"]) if line.endswith(b"\n") else float("inf")
    except (ValueError, KeyError, TypeError):
        return float("inf")


def read_metrics(workdir: AnyPath) -> list[dict[str, float]]:
    """All reports in a workdir, oldest first."""
    lines = _lines_of(workdir / _METRICS_FILE)
    return [json.loads(line) for line in lines if _step_of(line) < float("inf")]
