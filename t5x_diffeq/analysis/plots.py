"""Print-quality figures. Only this module, `prompt_plots` and `run_plots` need matplotlib."""

import io
from collections.abc import Mapping, Sequence
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
_HEADS_PER_ROW = 4
_MOST_TICKS = 8  # on an axis that labels every number of steps
WIDTH = 7.0  # width of a page's text, in inches


def render_image(figure: Figure, kind: str = "png") -> bytes:
    """The figure as a file's content: "png", "pdf" or "svg"."""
    content = io.BytesIO()
    figure.savefig(content, format=kind)
    return content.getvalue()


def make_drawing(figure: Figure, caption: str) -> Drawing:
    """Both files of a figure, with its caption."""
    return Drawing(caption, render_image(figure, "png"), render_image(figure, "pdf"))


def make_figure(height: float) -> Figure:
    """An empty figure as wide as the text; `height` is in inches."""
    return Figure(figsize=(WIDTH, height), layout="constrained")


def _make_panels(count: int, height: float = 1.5) -> tuple[Figure, list]:
    """A figure of `count` panels, in rows of at most `_HEADS_PER_ROW`."""
    columns = min(count, _HEADS_PER_ROW)
    rows = -(-count // columns)
    figure = make_figure(height * rows + 0.4)
    grid = figure.subplots(rows, columns, squeeze=False, sharex=True, sharey=True)
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
) -> Figure:
    """A panel per head: |lambda| or Re lambda of every eigenvalue over depth (figures 2a, 2b, E).

    Args:
      times: times of the curves, or layer numbers.
      values: the eigenvalues there; each rank by magnitude (or by real part) is one curve.
      part: "magnitude" or "real".
      name: name of the product.
      nodes: times at which the model was trained, and the eigenvalues there, drawn as dots.
      depth: label of the horizontal axis.
      heads: the heads' indices; None: these are all heads.
    """
    figure, axes = _make_panels(values.shape[1])
    indices = range(len(axes)) if heads is None else heads
    for head, ax in enumerate(axes):
        curves = _sorted_part(values[:, head], part)
        colours = SHADES(np.linspace(0.95, 0.35, curves.shape[1]))
        for curve, colour in zip(curves.T, colours, strict=True):
            ax.plot(times, curve, color=colour, linewidth=0.5 if nodes else 0.7)
        dots = (
            (times, curves) if nodes is None else (nodes[0], _sorted_part(nodes[1][:, head], part))
        )
        ax.plot(*dots, ".", color="black", markersize=2)
        ax.axhline(0, color="grey", linewidth=0.4)
        ax.set_title(f"head {indices[head] + 1}" if values.shape[1] > 1 else "", fontsize=8)
    symbol = "$|\\lambda|$" if part == "magnitude" else "Re $\\lambda$"
    figure.supylabel(f"{symbol} of {name}", fontsize=8)
    figure.supxlabel(depth, fontsize=8)
    return figure


def _sorted_part(values: Complex[np.ndarray, "times M"], part: str) -> Float[np.ndarray, "times M"]:
    """|lambda| or Re lambda, decreasing along the last axis."""
    return -np.sort(-(np.abs(values) if part == "magnitude" else values.real), axis=-1)


def heat_maps(found: spectra.Spectra, labels: Sequence[str], depth: str) -> Figure:
    """Mean |lambda| and the share of positive real parts, by head and time or layer."""
    figure = make_figure(1.8 * len(found))
    axes = figure.subplots(len(found), 2, sharex=True, sharey="row", squeeze=False)
    for row, (kind, values) in enumerate(found.items()):
        name = spectra.title_of(kind)
        limits = {"vmin": 0, "vmax": 1, "cmap": "RdBu"}
        shown: tuple[tuple[np.ndarray, str, dict[str, Any]], ...] = (
            (spectra.magnitude(values), f"mean $|\\lambda|$ of ${tex(name)}$", {"cmap": "viridis"}),
            (spectra.positive_fraction(values), f"positive fraction of ${tex(name)}$", limits),
        )
        for ax, (numbers, title, colours) in zip(axes[row], shown, strict=True):
            drawn = ax.imshow(numbers.T, aspect="auto", interpolation="nearest", **colours)
            figure.colorbar(drawn, ax=ax)
            ax.set_title(title, fontsize=8)
            ax.set_yticks(range(numbers.shape[1]), [f"{h + 1}" for h in range(numbers.shape[1])])
            every = -(-len(labels) // 12)
            ax.set_xticks(range(0, len(labels), every), labels[::every])
    figure.supxlabel(depth, fontsize=8)
    figure.supylabel("head", fontsize=8)
    return figure


def tex(name: str) -> str:
    """W_Q W_K^T as TeX."""
    for plain, subscript in (("up", r"\mathrm{up}"), ("down", r"\mathrm{down}")):
        name = name.replace(f"W_{plain}", f"W_{{{subscript}}}")
    return name


def trajectories(found: dict[str, Clustering], seed: int = 0) -> Figure:
    """The first three coordinates of every particle, in panels (figures 2c, 2d, 13).

    Each panel is scaled by its own largest |x| at the end.
    """
    figure = make_figure(2.1 * -(-len(found) // 3))
    axes = figure.subplots(-(-len(found) // 3), min(len(found), 3), subplot_kw={"projection": "3d"})
    for ax in np.ravel(axes):
        ax.set_axis_off()
    for ax, (title, each) in zip(np.ravel(axes), found.items(), strict=False):
        paths = each.states[seed]
        for particle in range(paths.shape[1]):
            ax.plot(*paths[:, particle, :3].T, color="#7f8c8d", linewidth=0.35, alpha=0.7)
        ax.scatter(*paths[0, :, :3].T, s=4, color="#2980b9", depthshade=False)
        ax.scatter(*paths[-1, :, :3].T, s=7, color="#c0392b", depthshade=False)
        ax.set_axis_on()
        ax.set(xticklabels=[], yticklabels=[], zticklabels=[])
        ax.set_title(f"{title}: {each.clusters[seed, -1]:.0f} clusters", fontsize=8)
    ends = (("#2980b9", "start"), ("#c0392b", "end"))
    dots = [Line2D([], [], color=c, marker="o", linestyle="", markersize=3) for c, _ in ends]
    figure.legend(dots, [name for _, name in ends], loc="lower right")
    return figure


def clustering_over_time(found: dict[str, Clustering]) -> Figure:
    """Clusters, spread and distance: medians over the seeds, with the middle half shaded."""
    figure = make_figure(2.3)
    columns = ("clusters", "spread", "distance")
    axes = figure.subplots(1, len(columns))
    for ax, column in zip(axes, columns, strict=True):
        for title, each in found.items():
            low, middle, high = np.nanquantile(getattr(each, column), (0.25, 0.5, 0.75), axis=0)
            (line,) = ax.plot(each.times, middle, label=title)
            ax.fill_between(each.times, low, high, color=line.get_color(), alpha=0.12, linewidth=0)
        ax.set(xlabel="time", ylabel=column, yscale="log" if column == "distance" else "linear")
    axes[0].legend(fontsize=6)
    return figure


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
    """A line per row of a table, or only points if the horizontal coordinates aren't numbers.

    Args:
      panels: by title, lines by name: lists of (horizontal coordinate, mean, standard error or
        None). All panels have the same axes.
      across: label of the horizontal axis.
      up: label of the vertical axis.
      log: whether the horizontal axis is logarithmic.
      ticks: horizontal coordinates to mark; none: matplotlib chooses them.
    """
    columns = min(len(panels), 3)
    rows = -(-len(panels) // columns)
    figure = make_figure(3.0 if rows == 1 else 2.2 * rows)
    grid = figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False)
    for axes, (title, lines) in zip(grid.flat, panels.items(), strict=False):
        _draw_means(axes, lines)
        axes.set_title(title, fontsize=8)
    for axes in grid.flat[len(panels) :]:
        axes.set_axis_off()
    for axes in grid[-1]:
        axes.set(xlabel=across, **({"xscale": "log"} if log else {}))
        if ticks:
            axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
            axes.minorticks_off()
    for axes in grid[:, 0]:
        axes.set(ylabel=up)
    grid.flat[0].legend(fontsize=6)
    return figure


def _draw_means(axes: Axes, rows: _Lines) -> None:
    form = "o-"
    words = list(dict.fromkeys(point[0] for points in rows.values() for point in points))
    if isinstance(words[0], str):
        form = "o"
        axes.set_xticks(range(len(words)), [str(word) for word in words])
    for number, (name, points) in enumerate(rows.items()):
        positions, means, errors = map(list, zip(*points, strict=True))
        if form == "o":
            positions = [
                words.index(position) + 0.4 * (number / len(rows) - 0.5) for position in positions
            ]
        shown = [error or 0 for error in errors]
        axes.errorbar(positions, means, yerr=shown, fmt=form, markersize=3, capsize=2, label=name)


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
