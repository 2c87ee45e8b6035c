"""Figures of what changes with depth: spectra, weights, and the perplexity of other grids."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import Complex, Float, Int
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

from t5x_diffeq.analysis import spectra
from t5x_diffeq.analysis.figures import SHADES, WIDTH, make_figure, make_panels
from t5x_diffeq.analysis.weight_paths import WeightPaths, cosines, principal_path

_MOST_TICKS = 8  # on an axis that labels every number of steps


def eigenvalues_over_depth(
    times: Float[np.ndarray, " times"],
    values: Complex[np.ndarray, "times H M"],
    part: str,
    name: str,
    nodes: tuple[Float[np.ndarray, " n"], Complex[np.ndarray, "n H M"]] | None = None,
    depth: str = "depth t",
    width: float = WIDTH,
    heads: Int[np.ndarray, " heads"] | None = None,
) -> Figure:
    """A panel per head: |lambda| or Re lambda of every eigenvalue over depth (figures 2a, 2b, E).

    Args:
      values: the eigenvalues at `times`; each rank by magnitude (or by real part) is one curve.
      part: "magnitude" or "real".
      nodes: the times at which the model was trained, and the eigenvalues at these times, drawn as
        dots. None if `times` are the nodes themselves; dotted lines then join the dots.
      heads: the heads' indices; None: these are all heads.
    """
    figure, axes = make_panels(values.shape[1], width, 1.7, 1.5, sharex=True, sharey=True)
    indices = range(len(axes)) if heads is None else heads
    style = ":" if nodes is None else "-"
    node_times, dots = (times, values) if nodes is None else nodes
    for head, ax in enumerate(axes):
        curves = _sorted_part(values[:, head], part)
        colours = SHADES(np.linspace(0.95, 0.35, curves.shape[1]))
        for curve, colour in zip(curves.T, colours, strict=True):
            ax.plot(times, curve, color=colour, linewidth=0.5, linestyle=style)
        ax.plot(node_times, _sorted_part(dots[:, head], part), ".", color="black", markersize=2)
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
    by_kind: spectra.Spectra,
    times: Float[np.ndarray, " times"],
    depth: str = "depth t",
    width: float = WIDTH,
) -> Figure:
    """A panel per product: mean |lambda| at each node or layer, and each head's mean in grey."""
    figure, axes = make_panels(len(by_kind), width, 1.7, 1.6)
    for ax, (kind, values) in zip(axes, by_kind.items(), strict=True):
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
    by_kind: spectra.Spectra, labels: Sequence[str], depth: str, width: float = WIDTH
) -> Figure:
    """Mean |lambda| and the share of positive real parts, by head and time or layer."""
    figure, axes = make_panels(2 * len(by_kind), width, 3, 1.6, sharex=True)
    limits = {"vmin": 0, "vmax": 1, "cmap": "RdBu"}
    shown: list[tuple[np.ndarray, str, dict[str, Any]]] = []
    for kind, values in by_kind.items():
        name = f"${tex(spectra.title_of(kind))}$"
        shown += [
            (spectra.magnitude(values), f"mean $|\\lambda|$ of {name}", {"cmap": "viridis"}),
            (spectra.positive_fraction(values), f"positive fraction of {name}", limits),
        ]
    every = -(-len(labels) // 8)
    for ax, (numbers, title, colours) in zip(axes, shown, strict=True):
        image = ax.imshow(numbers.T, aspect="auto", interpolation="nearest", **colours)
        figure.colorbar(image, ax=ax)
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


def weight_paths(paths: WeightPaths) -> Figure:
    """Each kernel's path as t grows: in a plane, its norm, and its direction.

    Three panels: the first two principal components over the nodes, scaled to the kernel's own
    size; |W(t)| divided by its mean over the nodes; the cosine between W(t) and W at the first
    node.
    """
    figure = make_figure(2.6)
    plane, size, turn = figure.subplots(1, 3)
    for name, centred in paths.centred.items():
        inner = paths.inner[name]
        norms = np.sqrt(np.maximum(np.diag(inner), 0))
        scale = max(float(norms.mean()), np.finfo(float).tiny)
        path, _ = principal_path(centred)
        (line,) = plane.plot(*(path / scale).T, ".-", markersize=3, label=name)
        plane.plot(*(path[0] / scale), "o", markersize=4, color=line.get_color())
        size.plot(paths.times, norms / scale, ".-", markersize=3)
        turn.plot(paths.times, cosines(inner)[0], ".-", markersize=3)
    plane.set(xlabel="component 1 / |W|", ylabel="component 2 / |W|")
    plane.set_title("W(t), from the dot on", fontsize=8)
    size.set(xlabel="t", ylabel="|W(t)| / mean")
    turn.set(xlabel="t", ylabel="cos(W(t), W(first))")
    figure.legend(fontsize=6, loc="outside lower center", ncols=4)
    return figure


def product_spectra(paths: WeightPaths, product: str) -> Figure:
    """|lambda| of a product over t, a panel per head; see `eigenvalues_over_depth`."""
    values = spectra.eigenvalues(np.asarray(paths.products[product], np.float64))
    by_head = values if values.ndim == 3 else values[:, None]
    name = f"${tex(spectra.title_of(product))}$"
    return eigenvalues_over_depth(
        paths.product_times, by_head, "magnitude", name, heads=paths.heads.get(product)
    )


def perplexity_over_depth(
    results: Sequence[dict], trained: tuple[str, int] | None = None
) -> Figure:
    """Perplexity against the number of solver steps, and against FLOPs, a line per scheme.

    Args:
      results: dicts with `scheme`, `num_steps` and `eval/perplexity`. The panel over FLOPs is drawn
        if all have `flops_per_token`.
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
