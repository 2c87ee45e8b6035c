"""Figures of matplotlib as images."""

import threading
from typing import TYPE_CHECKING

import numpy as np
from jaxtyping import UInt8

if TYPE_CHECKING:
    from matplotlib.figure import Figure

DRAWING = threading.Lock()  # matplotlib's caches of fonts are not made for several threads


def render(figure: "Figure") -> UInt8[np.ndarray, "H W 3"]:
    """A figure as an image, `figure.dpi` dots per inch."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    return np.array(canvas.buffer_rgba())[..., :3]
