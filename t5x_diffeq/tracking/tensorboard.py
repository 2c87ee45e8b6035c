"""TensorBoard's event files in the workdir's `events/`, written by tensorboardX."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from etils import epath

from t5x_diffeq.runtime.console import say
from t5x_diffeq.runtime.files import AnyPath, GrowingFile, describe_error, is_in_bucket
from t5x_diffeq.tracking.interface import Array, Scalar, code_block, plain_values

if TYPE_CHECKING:
    import tensorboardX

_ON_DISK = "disk"  # tensorboardX chooses our writer by the prefix before a colon


class TensorBoardWriter:
    """Writes event files, in the workdir on this machine or in a bucket.

    Args:
      workdir: the run's workdir.
      step: the step to resume from; TensorBoard then hides later events of earlier files.
    """

    def __init__(self, workdir: AnyPath, step: int):
        self.workdir, self.rewinds = workdir, 0
        self._open(step)

    def rewind(self, step: int) -> None:
        """Begins a file that hides the events after `step`."""
        self.events.close()
        self.rewinds += 1
        self._open(step)

    def _open(self, step: int) -> None:
        workdir = self.workdir
        folder = str(workdir / "events")
        self.events = _event_writer(
            folder if is_in_bucket(workdir) else f"{_ON_DISK}:{folder}",
            purge_step=step + 1,
            # Else files begun within one second would share a name.
            filename_suffix=f".{step}" + (f".{self.rewinds}" if self.rewinds else ""),
        )

    def write_scalars(self, step: int, scalars: Mapping[str, Scalar]) -> None:
        """Writes numbers."""
        for name, value in scalars.items():
            self.events.add_scalar(name, value, step)

    def write_summaries(
        self, step: int, values: Mapping[str, Array], metadata: Mapping[str, Any] | None = None
    ) -> None:
        """Does nothing: TensorBoard shows no curves over anything but steps."""

    def write_images(self, step: int, images: Mapping[str, Array]) -> None:
        """Writes images; needs Pillow, which comes with matplotlib."""
        for name, image in images.items():
            self.events.add_image(name, image, step, dataformats="HWC")

    def write_texts(self, step: int, texts: Mapping[str, str]) -> None:
        """Writes texts as code blocks, since TensorBoard takes texts for Markdown."""
        for name, text in texts.items():
            self.events.add_text(name, code_block(text), step)

    def write_hparams(self, hparams: Mapping[str, Any]) -> None:
        """Writes the run's row of the HPARAMS page, whose column of results is `eval/loss`."""
        from tensorboardX.summary import hparams as make_summaries

        for summary in make_summaries(plain_values(hparams), {"eval/loss": None}):
            self.events.file_writer.add_summary(summary)

    def flush(self) -> None:
        """Writes the events that are still queued."""
        self.events.flush()

    def close(self) -> None:
        """Writes the events that are still queued, and ends the file."""
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
