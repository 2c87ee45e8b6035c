"""Figures that are drawn while training goes on."""

import importlib.util
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
from jaxtyping import UInt8

from t5x_diffeq.runtime.errors import InputError
from t5x_diffeq.tracking.background import Worker
from t5x_diffeq.tracking.interface import MetricWriter

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_MOST = 32  # figures that can wait to be drawn
_DRAWING = threading.Lock()  # matplotlib's caches of fonts are not made for several threads


def check_matplotlib(key: str) -> None:
    """Checks that matplotlib is installed.

    Raises:
      InputError: if it is not; names `key`, the config key that needs it.
    """
    if not importlib.util.find_spec("matplotlib"):
        raise InputError(
            f"{key} needs the package matplotlib; pip install -e '.[analysis]', or leave it out"
        )


def render(figure: "Figure") -> UInt8[np.ndarray, "H W 3"]:
    """A figure of matplotlib as an image, `figure.dpi` dots per inch."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    return np.array(canvas.buffer_rgba())[..., :3]


class FigureWorker:
    """Draws figures in a thread of its own, one at a time, and writes them as images.

    Args:
      writers: where the images go.
    """

    def __init__(self, writers: list[MetricWriter]):
        self.writers, self.worker = writers, Worker("the drawing of figures", _MOST, tolerant=True)

    def draw(self, step: int, name: str, make: Callable[[], "Figure"]) -> None:
        """Has a figure drawn; returns at once.

        Args:
          step: the optimizer step that it shows.
          name: the name of the image.
          make: makes the figure from arrays on the host. It is called in the thread, which is
            where matplotlib should be imported. If too many figures wait, it isn't called.
        """

        def task() -> None:
            with _DRAWING:
                image = render(make())
            for writer in self.writers:
                writer.write_images(step, {name: image})

        self.worker.do(task)

    def stop(self, deadline: float) -> None:
        """Waits until all figures are drawn, but no longer than `deadline` (`time.monotonic`)."""
        self.worker.stop(deadline)
