"""Trackio: a tracker that keeps its runs on this machine (or on a server of one's own).

`trackio show` opens the dashboard. The library's own settings apply: TRACKIO_DIR is the folder of
all runs (by default in Hugging Face's cache), TRACKIO_SPACE_ID or TRACKIO_SERVER_URL send them
elsewhere.
"""

import contextlib
import io
import os
from collections.abc import Mapping
from typing import Any

from t5x_diffeq.runtime.console import say
from t5x_diffeq.tracking.interface import Array, Scalar, Tracker, code_block, plain_values


class TrackioTracker(Tracker):
    """Writes to a Trackio run, which is continued if it exists.

    Rows keep their optimizer step. Steps that are taken again, after a resume from an older
    checkpoint, are there twice.

    Args:
      name: the name of the run, unique in its project.
    """

    def __init__(self, name: str):
        import trackio

        self.trackio = trackio
        project = os.environ.get("TRACKIO_PROJECT") or "t5x_diffeq"
        with _without_prints():
            self.run = trackio.init(
                project=project,
                name=name,
                resume="allow",
                embed=False,
                auto_log_cpu=False,
                auto_log_gpu=False,
            )
        say(f"Trackio: run {name}; `trackio show --project {project}` shows it")

    def write_scalars(self, step: int, scalars: Mapping[str, Scalar]) -> None:
        """Writes numbers."""
        self.run.log(dict(scalars), step=step)

    def write_images(self, step: int, images: Mapping[str, Array]) -> None:
        """Writes images."""
        self.run.log({name: self.trackio.Image(each) for name, each in images.items()}, step=step)

    def write_texts(self, step: int, texts: Mapping[str, str]) -> None:
        """Writes texts as code blocks of Markdown."""
        shown = {name: self.trackio.Markdown(code_block(text)) for name, text in texts.items()}
        self.run.log(shown, step=step)

    def write_hparams(self, hparams: Mapping[str, Any]) -> None:
        """Sets the run's config, which the library sends with the first row."""
        self.run.config.update(plain_values(hparams))

    def close(self) -> None:
        """Ends the run."""
        with _without_prints():
            self.run.finish()


def _without_prints() -> contextlib.AbstractContextManager:
    """A context in which the library prints nothing: standard output is for results."""
    return contextlib.redirect_stdout(io.StringIO())
