"""Figures of particles that cluster."""

from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from t5x_diffeq.analysis.clustering import Clustering
from t5x_diffeq.analysis.figures import WIDTH, make_panels

_ENDS = {"start": "#2980b9", "end": "#c0392b"}  # of a particle's trajectory


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
