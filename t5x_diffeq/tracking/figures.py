"""Figures of matplotlib as images."""

import importlib.util
import threading
from typing import TYPE_CHECKING

import numpy as np
from jaxtyping import UInt8

from t5x_diffeq.runtime.errors import InputError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

DRAWING = threading.Lock()  # matplotlib's caches of fonts are not made for several threads


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
    """A figure as an image, `figure.dpi` dots per inch."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    return np.array(canvas.buffer_rgba())[..., :3]
