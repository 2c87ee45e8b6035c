"""TensorBoard's event files in the workdir's `events/`, written by parts of tensorboardX.

Its `SummaryWriter` isn't used: it writes in a thread of its own, where an error ends the thread
without a word, and blocks whoever writes next.
"""

import time
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from etils import epath

from t5x_diffeq.system.files import AnyPath, GrowingFile
from t5x_diffeq.training.tracking.interface import Array, Scalar, Tracker


class TensorBoardTracker(Tracker):
    """Writes event files; TensorBoard hides events after `step` of earlier files."""

    def __init__(self, workdir: AnyPath, step: int):
        self.folder, self.rewinds = workdir / "events", 0
        self._open(step)

    def rewind(self, step: int) -> None:
        """Begins a file that hides the events after `step`."""
        self.close()
        self.rewinds += 1
        self._open(step)

    def _open(self, step: int) -> None:
        from tensorboardX.event_file_writer import EventsWriter
        from tensorboardX.proto.event_pb2 import SessionLog
        from tensorboardX.record_writer import register_writer_factory

        register_writer_factory("gs", SimpleNamespace(open=_BucketFile))
        if isinstance(self.folder, Path):
            self.folder.mkdir(parents=True, exist_ok=True)
        # Else files begun within one second would share a name.
        suffix = f".{step}" + (f".{self.rewinds}" if self.rewinds else "")
        self.events = EventsWriter(str(self.folder / "events"), suffix)
        self._write(step + 1, session_log=SessionLog(status=SessionLog.START))

    def _write(self, step: int | None, **content: Any) -> None:
        from tensorboardX.proto.event_pb2 import Event

        self.events.write_event(Event(wall_time=time.time(), step=step, **content))
        if isinstance(self.folder, Path):
            self.events.flush()

    def write_scalars(self, step: int, scalars: Mapping[str, Scalar]) -> None:
        """Writes numbers."""
        from tensorboardX import summary

        values = [value for x in scalars.items() for value in summary.scalar(*x).value]
        self._write(step, summary=summary.Summary(value=values))

    def write_images(self, step: int, images: Mapping[str, Array]) -> None:
        """Writes images; needs Pillow, which comes with matplotlib."""
        from tensorboardX import summary

        for name, image in images.items():
            self._write(step, summary=summary.image(name, image, dataformats="HWC"))

    def write_texts(self, step: int, texts: Mapping[str, str]) -> None:
        """Writes texts as code blocks, since TensorBoard takes texts for Markdown."""
        from tensorboardX import summary

        for name, text in texts.items():
            block = "".join(f"    {line}\n" for line in text.split("\n"))
            self._write(step, summary=summary.text(name, block))

    def write_hparams(self, hparams: Mapping[str, Any]) -> None:
        """Writes the run's row of the HPARAMS page, whose column of results is `eval/loss`."""
        from tensorboardX.summary import hparams as make_summaries

        plain = {
            k: x if isinstance(x, bool | int | float | str) else str(x) for k, x in hparams.items()
        }
        for summary in make_summaries(plain, {"eval/loss": None}):
            self._write(None, summary=summary)

    def close(self) -> None:
        """Ends the file."""
        self.events.close()


class _BucketFile(GrowingFile):
    """An event file in a bucket; if that doesn't take it for a while, this is a warning."""

    def __init__(self, path: str):
        super().__init__(epath.Path(path))

    def flush(self) -> None:
        """Uploads it, or warns."""
        self.try_flush()
