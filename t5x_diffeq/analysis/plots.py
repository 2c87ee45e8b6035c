"""Print-quality figures. Only this module, `prompt_plots` and `run_plots` need matplotlib."""

import io
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import cycle
from typing import Any

import matplotlib
import numpy as np
from jaxtyping import Complex, Float, Int
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

from t5x_diffeq.analysis import spectra
from t5x_diffeq.analysis.clustering import Clustering
from t5x_diffeq.analysis.report import Drawing
from t5x_diffeq.analysis.weight_paths import WeightPaths, cosines, principal_path

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
_MOST_TICKS = 8  # on an axis that labels every number of steps
WIDTH, NARROW = 7.0, 3.6  # of the text on a page, and of a phone's screen, in inches
_SINGLE = 4.8  # of a figure with one panel
_ENDS = {"start": "#2980b9", "end": "#c0392b"}  # of a particle's trajectory
MODEL_COLOURS = {
    "baseline": "#4d4d4d",
    "ode": "#0072b2",
    "compact": "#d55e00",
    "smooth": "#009e73",
    "shared": "#cc79a7",
}
_OTHER_COLOURS = ("#e69f00", "#56b4e9", "#8c564b", "#9467bd", "#6b8e23", "#c44e52")
_FORMATS = ("o-", "s--", "^:", "D-.")  # of the lines of one model
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


def eigenvalues_over_depth(
    times: Float[np.ndarray, " times"],
    values: Complex[np.ndarray, "times H M"],
    part: str,
    name: str,
    nodes: tuple[Float[np.ndarray, " n"], Complex[np.ndarray, "n H M"]] | None = None,
    depth: str = "depth t",
    heads: Int[np.ndarray, " heads"] | None = None,
    width: float = WIDTH,
) -> Figure:
    """A panel per head: |lambda| or Re lambda of every eigenvalue over depth (figures 2a, 2b, E).

    Args:
      times: times of the curves, or layer numbers.
      values: the eigenvalues there; each rank by magnitude (or by real part) is one curve.
      part: "magnitude" or "real".
      name: name of the product.
      nodes: times at which the model was trained, and the eigenvalues there, drawn as dots; None if
        `times` are these, and there is nothing between them: dotted lines join the dots.
      depth: label of the horizontal axis.
      heads: the heads' indices; None: these are all heads.
      width: width of the figure in inches.
    """
    figure, axes = make_panels(values.shape[1], width, 1.7, 1.5, sharex=True, sharey=True)
    indices = range(len(axes)) if heads is None else heads
    style = ":" if nodes is None else "-"
    at, dots = (times, values) if nodes is None else nodes
    for head, ax in enumerate(axes):
        curves = _sorted_part(values[:, head], part)
        colours = SHADES(np.linspace(0.95, 0.35, curves.shape[1]))
        for curve, colour in zip(curves.T, colours, strict=True):
            ax.plot(times, curve, color=colour, linewidth=0.5, linestyle=style)
        ax.plot(at, _sorted_part(dots[:, head], part), ".", color="black", markersize=2)
        ax.axhline(0, color="grey", linewidth=0.4)
        ax.set_title(f"head {indices[head] + 1}" if values.shape[1] > 1 else "", fontsize=8)
    symbol = "$|\\lambda|$" if part == "magnitude" else "Re $\\lambda$"
    figure.supylabel(f"{symbol} of {name}", fontsize=8)
    figure.supxlabel(depth, fontsize=8)
    return figure


def _sorted_part(values: Complex[np.ndarray, "times M"], part: str) -> Float[np.ndarray, "times M"]:
    """|lambda| or Re lambda, decreasing along the last axis."""
    return -np.sort(-(np.abs(values) if part == "magnitude" else values.real), axis=-1)


def mean_magnitudes(
    found: spectra.Spectra,
    times: Float[np.ndarray, " times"],
    depth: str = "depth t",
    width: float = WIDTH,
) -> Figure:
    """A panel per product: mean |lambda| at each node or layer, and that of each head in grey."""
    figure, axes = make_panels(len(found), width, 1.7, 1.6)
    for ax, (kind, values) in zip(axes, found.items(), strict=True):
        means = spectra.magnitude(values).reshape(len(values), -1)
        if means.shape[1] > 1:
            ax.plot(times, means, color="grey", linewidth=0.5)
        ax.plot(times, means.mean(1), ".:", color="black")
        ax.set_ylim(bottom=0)
        ax.set_title(f"${tex(spectra.title_of(kind))}$", fontsize=8)
    figure.supylabel("mean $|\\lambda|$", fontsize=8)
    figure.supxlabel(depth, fontsize=8)
    return figure


def heat_maps(
    found: spectra.Spectra, labels: Sequence[str], depth: str, width: float = WIDTH
) -> Figure:
    """Mean |lambda| and the share of positive real parts, by head and time or layer."""
    figure, axes = make_panels(2 * len(found), width, 3, 1.6, sharex=True)
    limits = {"vmin": 0, "vmax": 1, "cmap": "RdBu"}
    shown: list[tuple[np.ndarray, str, dict[str, Any]]] = []
    for kind, values in found.items():
        name = f"${tex(spectra.title_of(kind))}$"
        shown += [
            (spectra.magnitude(values), f"mean $|\\lambda|$ of {name}", {"cmap": "viridis"}),
            (spectra.positive_fraction(values), f"positive fraction of {name}", limits),
        ]
    every = -(-len(labels) // 8)
    for ax, (numbers, title, colours) in zip(axes, shown, strict=True):
        drawn = ax.imshow(numbers.T, aspect="auto", interpolation="nearest", **colours)
        figure.colorbar(drawn, ax=ax)
        ax.set_title(title, fontsize=8)
        ax.set_yticks(range(numbers.shape[1]), [f"{h + 1}" for h in range(numbers.shape[1])])
        ax.set_xticks(range(0, len(labels), every), labels[::every])
    figure.supxlabel(depth, fontsize=8)
    figure.supylabel("head", fontsize=8)
    return figure


def tex(name: str) -> str:
    """W_Q W_K^T as TeX."""
    for plain, subscript in (("up", r"\mathrm{up}"), ("down", r"\mathrm{down}")):
        name = name.replace(f"W_{plain}", f"W_{{{subscript}}}")
    return name


def trajectories(found: dict[str, Clustering], width: float = WIDTH) -> Figure:
    """The first three coordinates of every particle of seed 0, in panels (figures 2c, 2d, 13).

    Each panel is scaled by its own largest |x| at the end.
    """
    kind = {"projection": "3d"}
    figure, panels = make_panels(len(found), width, 2.2, 2.1, subplot_kw=kind)
    axes: list[Any] = list(panels)  # the stubs of matplotlib have no Axes3D
    for ax, (title, each) in zip(axes, found.items(), strict=True):
        paths = each.states[0]
        for particle in range(paths.shape[1]):
            ax.plot(*paths[::4, particle, :3].T, color="#7f8c8d", linewidth=0.35, alpha=0.7)
        for end, size, colour in zip((0, -1), (4, 7), _ENDS.values(), strict=True):
            ax.scatter(*paths[end, :, :3].T, s=size, color=colour, depthshade=False)
        ax.set(xticklabels=[], yticklabels=[], zticklabels=[])
        for axis in (ax.xaxis, ax.yaxis, ax.zaxis):
            axis.set_pane_color((0, 0, 0, 0))
        count = each.clusters[0, -1]
        ax.set_title(
            f"{_tex_power(title)}: {count:.0f} cluster{'' if count == 1 else 's'}", fontsize=8
        )
    dot: dict[str, Any] = {"marker": "o", "linestyle": "", "markersize": 3}
    dots = [Line2D([], [], color=colour, **dot) for colour in _ENDS.values()]
    figure.legend(dots, _ENDS, loc="outside lower right", ncols=2)
    return figure


def clustering_over_time(found: dict[str, Clustering], width: float = WIDTH) -> Figure:
    """Clusters, spread and distance: medians over the seeds, with the middle half shaded.

    The distance has a logarithmic axis, on which there is no place for a distance of 0.
    """
    columns = ("clusters", "spread", "distance")
    figure, axes = make_panels(len(columns), width, 2.2, 1.9)
    for ax, column in zip(axes, columns, strict=True):
        for title, each in found.items():
            quantiles = np.nanquantile(getattr(each, column), (0.25, 0.5, 0.75), axis=0)
            if column == "distance":
                quantiles = np.where(quantiles > 0, quantiles, np.nan)
            low, middle, high = quantiles
            (line,) = ax.plot(each.times, middle, label=_tex_power(title))
            ax.fill_between(each.times, low, high, color=line.get_color(), alpha=0.12, linewidth=0)
        ax.set(xlabel="time", ylabel=column)
        ax.set_ylim(bottom=0) if column != "distance" else ax.set_yscale("log")
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=5)
    return figure


def _tex_power(name: str) -> str:
    return f"${name}$" if "^" in name else name


def perplexity_over_depth(
    results: Sequence[dict], trained: tuple[str, int] | None = None
) -> Figure:
    """Perplexity against the number of solver steps, and against FLOPs, a line per scheme.

    Args:
      results: dicts with `scheme`, `num_steps`, `eval/perplexity` and, unless one lacks it,
        `flops_per_token`.
      trained: scheme and number of solver steps of the training, marked by a ring.
    """
    figure = make_figure(2.4)
    names = {"num_steps": "steps", "flops_per_token": "forward FLOPs per token"}
    names = {key: label for key, label in names.items() if all(key in row for row in results)}
    axes = figure.subplots(1, len(names), sharey=True, squeeze=False)[0]
    for axis, (key, label) in zip(axes, names.items(), strict=True):
        for scheme in dict.fromkeys(row["scheme"] for row in results):
            rows = sorted((r for r in results if r["scheme"] == scheme), key=lambda r: r[key])
            values = [row["eval/perplexity"] for row in rows]
            axis.plot([row[key] for row in rows], values, "o-", markersize=3, label=scheme)
        for row in results:
            if (row["scheme"], row["num_steps"]) == trained:
                ring = {"markersize": 9, "markerfacecolor": "none", "color": "black"}
                axis.plot(row[key], row["eval/perplexity"], "o", label="trained grid", **ring)
        axis.set(xlabel=label, yscale="log")
        axis.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))  # several ticks per decade
        axis.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
        axis.yaxis.set_minor_formatter(NullFormatter())
    if len({row["num_steps"] for row in results}) <= _MOST_TICKS:
        axes[0].set_xticks(sorted({row["num_steps"] for row in results}))
    axes[0].set_ylabel("perplexity")
    named = dict(zip(*reversed(axes[0].get_legend_handles_labels()), strict=True))  # each once
    axes[0].legend(named.values(), named.keys())
    return figure


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
      across: label of the horizontal axis.
      up: label of the vertical axis.
      log: whether the horizontal axis is logarithmic.
      ticks: horizontal coordinates to mark; none: matplotlib chooses them.
    """
    columns = min(len(panels), 3)
    rows = -(-len(panels) // columns)
    figure = make_figure(2.6 * rows + 0.4, WIDTH if columns > 1 else _SINGLE)
    grid = figure.subplots(rows, columns, squeeze=False)
    styles = _styles(dict.fromkeys(name for lines in panels.values() for name in lines))
    for axes, (title, lines) in zip(grid.flat, panels.items(), strict=False):
        _draw_means(axes, lines, styles)
        axes.set_title(title, fontsize=8)
        if not any(isinstance(x, str) for line in lines.values() for x, *_ in line):
            axes.set(xlabel=across, **({"xscale": "log"} if log else {}))
            if ticks:
                axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
                axes.minorticks_off()
    for axes in grid.flat[len(panels) :]:
        axes.set_axis_off()
    for axes in grid[:, 0]:
        axes.set(ylabel=up)
    handles = {
        label: handle
        for axes in grid.flat
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)
    }
    if handles:
        figure.legend(handles.values(), handles, loc="outside lower center", ncols=3)
    return figure


def _styles(names: Iterable[str]) -> dict[str, tuple[str, str]]:
    """Colour and format of each line."""
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


def weight_paths(found: WeightPaths) -> Figure:
    """Each kernel's path as t grows: in a plane, its norm, and its direction.

    Three panels: the first two principal components over the nodes, scaled to the kernel's own
    size; |W(t)| divided by its mean over the nodes; the cosine between W(t) and W at the first
    node.
    """
    figure = make_figure(2.6)
    plane, size, turn = figure.subplots(1, 3)
    for name, centred in found.centred.items():
        inner = found.inner[name]
        norms = np.sqrt(np.maximum(np.diag(inner), 0))
        scale = max(float(norms.mean()), np.finfo(float).tiny)
        path, _ = principal_path(centred)
        (line,) = plane.plot(*(path / scale).T, ".-", markersize=3, label=name)
        plane.plot(*(path[0] / scale), "o", markersize=4, color=line.get_color())
        size.plot(found.times, norms / scale, ".-", markersize=3)
        turn.plot(found.times, cosines(inner)[0], ".-", markersize=3)
    plane.set(xlabel="component 1 / |W|", ylabel="component 2 / |W|")
    plane.set_title("W(t), from the dot on", fontsize=8)
    size.set(xlabel="t", ylabel="|W(t)| / mean")
    turn.set(xlabel="t", ylabel="cos(W(t), W(first))")
    figure.legend(fontsize=6, loc="outside lower center", ncols=4)
    return figure


def product_spectra(found: WeightPaths, product: str) -> Figure:
    """|lambda| of a product over t, a panel per head; see `eigenvalues_over_depth`."""
    values = spectra.eigenvalues(np.asarray(found.products[product], np.float64))
    by_head = values if values.ndim == 3 else values[:, None]
    name = f"${tex(spectra.title_of(product))}$"
    return eigenvalues_over_depth(
        found.product_times, by_head, "magnitude", name, heads=found.heads.get(product)
    )
