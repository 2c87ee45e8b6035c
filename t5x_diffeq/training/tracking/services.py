"""TensorBoard's event files, and Weights & Biases; their libraries are imported where needed."""

import html
import os
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from etils import epath

from t5x_diffeq.system.console import log
from t5x_diffeq.system.errors import InputError
from t5x_diffeq.system.files import AnyPath, is_in_bucket
from t5x_diffeq.system.growing_file import GrowingFile
from t5x_diffeq.training.tracking.interface import Array, Scalar, Tracker

_STEP = "step"  # the optimizer step: the horizontal axis of every chart of W&B
_OFFLINE = ("offline", "disabled", "dryrun")


class TensorBoardTracker(Tracker):
    """Writes event files into the workdir's `events/`, by parts of tensorboardX.

    A file begins with an event that makes TensorBoard hide the events after `step` in earlier
    files. tensorboardX's `SummaryWriter` isn't used: it writes in a thread of its own, where an
    error ends the thread without a word and blocks the next call that writes.
    """

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
        # Without a suffix, files that are begun within one second would share a name.
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
    """An event file in a bucket; while the bucket can't be written to, there are warnings."""

    def __init__(self, path: str):
        super().__init__(epath.Path(path))

    def flush(self) -> None:
        """Uploads the file; warns if that fails."""
        self.try_flush()


# ------------------------------------------------------------------------------ W&B


def check_login() -> None:
    """Checks that W&B's library can reach an account, or is told to stay offline."""
    if os.environ.get("WANDB_MODE") in _OFFLINE:
        return
    import wandb

    try:
        if wandb.setup().settings.mode in _OFFLINE or wandb.login(prompt=False):
            return
    except ValueError as error:  # a variable of its settings has an invalid value
        reason = " ".join(str(error).split())
        raise InputError(
            f"train.trackers has wandb, which refuses its settings: {reason}"
        ) from error
    raise InputError(
        "train.trackers has wandb, which has no account here; run `wandb login`, set "
        "WANDB_API_KEY, or set WANDB_MODE=offline"
    )


class WandbTracker(Tracker):
    """Writes to a W&B run: one per workdir, which is continued if it exists.

    The library's own settings apply (WANDB_MODE, WANDB_PROJECT, WANDB_ENTITY, `wandb offline`).

    W&B numbers its rows by itself, and continues to count when a run is continued. The optimizer
    step is a column of the rows. So steps that are taken again, after a resume from an older
    checkpoint, are accepted, and a chart has both of their values.

    Its files go to the workdir's `wandb/`, or to a temporary folder if the workdir is in a bucket.
    `close` takes at most `seconds`.
    """

    def __init__(self, workdir: AnyPath, run_id: str, seconds: float):
        import wandb

        self.wandb = wandb
        settings: dict[str, Any] = {"silent": True, "finish_timeout": seconds}
        if "WANDB_CONSOLE" not in os.environ:
            settings["console"] = "off"  # it would replace sys.stderr in the middle of the run
        mode: Any = os.environ.get("WANDB_MODE")  # which the library reads only once per process
        folder = tempfile.mkdtemp(prefix="wandb-") if is_in_bucket(workdir) else str(workdir)
        self.run = wandb.init(
            project=os.environ.get("WANDB_PROJECT") or "t5x_diffeq",
            name=os.environ.get("WANDB_NAME") or workdir.name,
            id=run_id,
            resume="allow",
            dir=os.environ.get("WANDB_DIR") or folder,
            mode=mode,
            settings=wandb.Settings(**settings),
        )
        self.run.define_metric(_STEP, hidden=True)
        self.run.define_metric("*", step_metric=_STEP)
        folder = self.run.dir.removesuffix("/files")
        where = f"offline; `wandb sync {folder}` uploads it" if self.run.offline else self.run.url
        log(f"Weights & Biases: {where}")

    def write_scalars(self, step: int, scalars: Mapping[str, Scalar]) -> None:
        """Writes numbers."""
        self.run.log({_STEP: step, **scalars})

    def write_images(self, step: int, images: Mapping[str, Array]) -> None:
        """Writes images."""
        shown = {name: self.wandb.Image(image) for name, image in images.items()}
        self.run.log({_STEP: step, **shown})

    def write_texts(self, step: int, texts: Mapping[str, str]) -> None:
        """Writes texts as HTML, which W&B shows with their line breaks."""
        shown = {
            name: self.wandb.Html(f"<pre style='white-space: pre-wrap'>{html.escape(text)}</pre>")
            for name, text in texts.items()
        }
        self.run.log({_STEP: step, **shown})

    def write_hparams(self, hparams: Mapping[str, Any]) -> None:
        """Sets the run's config; a continued run gets the present values."""
        self.run.config.update(dict(hparams), allow_val_change=True)

    def close(self) -> None:
        """Ends the run."""
        self.run.finish()
