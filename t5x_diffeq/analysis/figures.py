"""Print-quality figures: their style, size and panels, and the files that they become.

Only this module, and the modules that draw with it, need matplotlib.
"""

import io
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import cycle
from typing import Any

import matplotlib
import numpy as np
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
_INK = "#000000"  # replaced by the colour of the page's text
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
    """The figure as an SVG element, in which black becomes the colour of the surrounding text.

    Args:
      name: the prefix of its ids; each figure on a page needs its own.
    """
    content = io.BytesIO()
    with matplotlib.rc_context({"svg.hashsalt": name, "svg.fonttype": "none"}):
        figure.savefig(content, format="svg", transparent=True)
    svg = _OUTSIDE.sub("", content.getvalue().decode()).replace(_INK, "currentColor")
    return _PATH.sub(lambda path: _NEEDLESS_DIGITS.sub(r"\1", path[0]), svg)


def make_drawing(draw: Callable[[float], Figure], caption: str) -> Drawing:
    """A figure's files and its SVGs, with its caption."""
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


_SINGLE = 4.8  # width of a figure with one panel, in inches
MODEL_COLOURS = {
    "baseline": "#4d4d4d",
    "ode": "#0072b2",
    "compact": "#d55e00",
    "smooth": "#009e73",
    "shared": "#cc79a7",
    "euler": "#e69f00",
}
_OTHER_COLOURS = ("#56b4e9", "#8c564b", "#9467bd", "#6b8e23", "#c44e52")
_FORMATS = ("o-", "s--", "^:", "D-.")  # of the lines of one model

_Lines = Mapping[str, Sequence[tuple[float | str, float, float | None]]]


def means_with_errors(
    panels: Mapping[str, _Lines],
    across: str,
    up: str,
    log: bool = False,
    ticks: Sequence[float] = (),
) -> Figure:
    """Panels of lines, or of points if the horizontal coordinates are words.

    A model has the same colour in every figure; lines of one model differ in mark and dashes.

    Args:
      panels: by title, lines by name: lists of (horizontal coordinate, mean, standard error or
        None). Each panel has a vertical axis of its own.
      ticks: horizontal coordinates to mark; none: matplotlib chooses them.
    """
    figure, grid = make_panels(len(panels), WIDTH if len(panels) > 1 else _SINGLE, 2.3, 2.6)
    styles = _styles(dict.fromkeys(name for lines in panels.values() for name in lines))
    for axes, (title, lines) in zip(grid, panels.items(), strict=True):
        _draw_means(axes, lines, styles)
        axes.set_title(title, fontsize=8)
        if not any(isinstance(x, str) for line in lines.values() for x, *_ in line):
            axes.set(xlabel=across, **({"xscale": "log"} if log else {}))
            if ticks:
                axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
                axes.minorticks_off()
    for axes in grid[::3]:  # the first of each row
        axes.set(ylabel=up)
    handles = {
        label: handle
        for axes in grid
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)
    }
    if handles:
        figure.legend(handles.values(), handles, loc="outside lower center", ncols=3)
    return figure


def _styles(names: Iterable[str]) -> dict[str, tuple[str, str]]:
    others, lines_of = cycle(_OTHER_COLOURS), Counter[str]()
    styles = {}
    for name in names:
        words = re.findall(r"[a-z]+", name.lower())
        model = next((word for word in words if word in MODEL_COLOURS), "")
        colour = MODEL_COLOURS[model] if model else next(others)
        styles[name] = colour, _FORMATS[lines_of[model] % len(_FORMATS)]
        lines_of[model] += bool(model)
    return styles


def _draw_means(axes: Axes, lines: _Lines, styles: Mapping[str, tuple[str, str]]) -> None:
    words = list(dict.fromkeys(point[0] for line in lines.values() for point in line))
    in_words = isinstance(words[0], str)
    named = in_words and list(lines) == words  # the axis already says each line's name
    for number, (name, points) in enumerate(lines.items()):
        positions, means, errors = map(list, zip(*points, strict=True))
        colour, form = styles[name]
        if in_words:
            beside = 0 if named or len(lines) == 1 else 0.4 * (number / len(lines) - 0.5)
            positions, form = [words.index(word) + beside for word in positions], form[0]
        shown: dict[str, Any] = {"color": colour, "markersize": 4, "label": "" if named else name}
        if any(error is not None for error in errors):
            spread = [np.nan if error is None else error for error in errors]
            axes.errorbar(positions, means, yerr=spread, fmt=form, capsize=2, **shown)
        else:
            axes.plot(positions, means, form, **shown)
    if in_words:
        slanted: dict[str, Any] = {"rotation": 20, "ha": "right"} if len(words) > 3 else {}
        axes.set_xticks(range(len(words)), [str(word) for word in words], **slanted)
        axes.margins(x=0.15)
