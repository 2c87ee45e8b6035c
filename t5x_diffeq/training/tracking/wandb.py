"""Weights & Biases: one run per workdir, whatever the number of restarts."""

import html
import os
import tempfile
from collections.abc import Mapping
from typing import Any

from t5x_diffeq.system.console import say
from t5x_diffeq.system.errors import InputError
from t5x_diffeq.system.files import AnyPath, is_in_bucket
from t5x_diffeq.training.tracking.interface import Array, Scalar, Tracker

_STEP = "step"  # the optimizer step: the horizontal axis of every chart
_OFFLINE = ("offline", "disabled", "dryrun")


def check_login() -> None:
    """Checks that the library can reach an account, or is told to stay offline."""
    if os.environ.get("WANDB_MODE") in _OFFLINE:
        return
    import wandb

    if wandb.setup().settings.mode in _OFFLINE or wandb.login(prompt=False):
        return
    raise InputError(
        "train.trackers has wandb, which has no account here; run `wandb login`, set "
        "WANDB_API_KEY, or set WANDB_MODE=offline"
    )


class WandbTracker(Tracker):
    """Writes to a W&B run, which is continued if it exists.

    The library's own settings apply (WANDB_MODE, WANDB_PROJECT, WANDB_ENTITY, `wandb offline`).

    W&B numbers the rows that it gets by itself, and continues to count when a run is continued. The
    optimizer step is a column beside them. So steps that are taken again, after a resume from an
    older checkpoint, are accepted, and a chart has both of their values.

    Its files go to the workdir's `wandb/`, or if that is in a bucket, to a temporary folder.
    `close` takes at most so many seconds.
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
        say(f"Weights & Biases: {where}")

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
