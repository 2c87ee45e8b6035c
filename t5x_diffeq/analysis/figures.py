"""Print-quality figures: their style, size and panels, and the files that they become.

This module, and those that draw with it, are the only ones that need matplotlib.
"""

import io
import re
from collections.abc import Callable
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure

from t5x_diffeq.analysis.report import Drawing

_STYLE = {
    "font.size": 8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.linewidth": 0.6,
    "lines.linewidth": 1.0,
    "legend.frameon": False,
    "savefig.dpi": 160,
    "pdf.fonttype": 42,
}
matplotlib.rcParams.update(_STYLE)  # type: ignore[arg-type]  # the stub lists every key
SHADES = LinearSegmentedColormap.from_list("shades", ["#ffffff", "#f6b26b", "#c0392b"])
WIDTH, NARROW = 7.0, 3.6  # of the text on a page, and of a phone's screen, in inches
_INK = "#000000"  # what follows the colour of a page's text
_OUTSIDE = re.compile(
    r"\A.*?(?=<svg)|<metadata>.*?</metadata>|<defs>\s*<style.*?</defs>", re.DOTALL
)
_PATH = re.compile(r' d="[^"]*"')
_NEEDLESS_DIGITS = re.compile(r"(\.\d\d)\d+")  # of a coordinate in points


def render_image(figure: Figure, kind: str = "png") -> bytes:
    """The figure as a file's content: "png", "pdf" or "svg"."""
    content = io.BytesIO()
    figure.savefig(content, format=kind)
    return content.getvalue()


def render_svg(figure: Figure, name: str) -> str:
    """The figure as an SVG element, what is black in the colour of the text around it.

    Args:
      figure: the figure.
      name: what its ids are made of; another than that of any other on the page.
    """
    content = io.BytesIO()
    with matplotlib.rc_context({"svg.hashsalt": name, "svg.fonttype": "none"}):
        figure.savefig(content, format="svg", transparent=True)
    svg = _OUTSIDE.sub("", content.getvalue().decode()).replace(_INK, "currentColor")
    return _PATH.sub(lambda path: _NEEDLESS_DIGITS.sub(r"\1", path[0]), svg)


def make_drawing(draw: Callable[[float], Figure], caption: str) -> Drawing:
    """A figure's files and its SVGs, with its caption.

    Args:
      draw: makes the figure, so many inches wide.
      caption: its caption.
    """
    figure = draw(WIDTH)
    svgs = tuple(
        render_svg(each, f"{caption} {width}")
        for each, width in ((figure, WIDTH), (draw(NARROW), NARROW))
    )
    return Drawing(caption, render_image(figure, "png"), render_image(figure, "pdf"), svgs)


def make_figure(height: float, width: float = WIDTH) -> Figure:
    """An empty figure, as wide as the text of a page; sizes are in inches."""
    return Figure(figsize=(width, height), layout="constrained")


def make_panels(
    count: int, width: float, least: float, height: float, **how: Any
) -> tuple[Figure, list[Axes]]:
    """A figure of `count` panels, as many in a row as fit if each is `least` inches wide."""
    columns = min(count, int(width // least))
    rows = -(-count // columns)
    figure = make_figure(height * rows + 0.4, width)
    grid = figure.subplots(rows, columns, squeeze=False, **how)
    for spare in grid.flat[count:]:
        spare.set_axis_off()
    return figure, list(grid.flat[:count])
