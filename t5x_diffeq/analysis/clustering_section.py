"""The report's section on clustering, and its figures."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from scipy.stats import fisher_exact

from t5x_diffeq.analysis import clustering
from t5x_diffeq.analysis.clustering import Clustering
from t5x_diffeq.analysis.figures import WIDTH, make_drawing, make_panels
from t5x_diffeq.analysis.report import Analysis, DataTable, Drawing
from t5x_diffeq.system.console import Progress

_METHOD = (
    "Particle x_i has the velocity of attention alone: the sum over j of A_ij V x_j, where A_ij is "
    "the softmax over j of x_i Q^T K x_j / sqrt 3. There are 40 particles in 3 dimensions, and 200 "
    "Euler steps. Q, K and V are standard normal times a(t). In figures, particles start in the "
    "cube from -1 to 1, and a is t^p at horizon 1, which is the paper's, and t^p / 10^p at "
    "horizon 10.",
    "The paper's range and scale of growth are lost from its text; the table has several, and "
    "longer horizons. scale=peak: a is 1 at the end. scale=work: the integral of a is that of "
    "constant weights. scale=time: a = t^p. A link is a distance below 0.05 of the root mean "
    "square of |x|, a cluster what is linked.",
)
_LONG = 10.0  # the horizon of the figure in which constant weights form clusters
_ENDS = {"start": "#2980b9", "end": "#c0392b"}  # of a particle's trajectory


def clustering_section(seeds: int) -> Analysis:
    """The section on particles under attention alone, with constant and growing weights."""
    names = {p: "constant" if p == 0 else f"t^{p}" for p in clustering.POWERS}
    with Progress("clustering: trajectories"):
        clusterings = {n: clustering.simulate_clustering(p, seeds=seeds) for p, n in names.items()}
        longer = {
            n: clustering.simulate_clustering(p, horizon=_LONG, seeds=seeds)
            for p, n in names.items()
        }
    rows = []
    with Progress("clustering", 18 * len(names), "simulations") as progress:
        for row in clustering.outcomes(seeds=seeds):
            rows.append(row)
            progress.update(len(rows))
    arrays = {"times": (clusterings["constant"].times, "[state], in units of the horizon's time")}
    for power, each in zip(names, clusterings.values(), strict=True):
        arrays[f"states_{power}"] = (
            each.states.astype(np.float32),
            f"[seed, state, token, dim] for t^{power}",
        )
        arrays[f"clusters_{power}"] = (each.clusters, f"[seed, state] for t^{power}")
    return Analysis(
        name="clustering",
        title="Clustering under attention alone",
        method=_METHOD,
        tables=[_outcome_table(rows, seeds)],
        drawings=_clustering_drawings(clusterings, longer, seeds),
        arrays=arrays,
    )


def _clustering_drawings(
    clusterings: dict[str, Clustering], longer: dict[str, Clustering], seeds: int
) -> dict[str, Drawing]:
    shown = {
        "trajectories": (clusterings, "1, the paper's,"),
        "trajectories_longer": (longer, f"{_LONG:g}"),
    }
    drawings = {
        name: make_drawing(
            partial(trajectories, runs),
            f"Trajectories of 40 particles up to horizon {horizon} for constant and growing "
            "weights, seed 0; each panel has its own scale.",
        )
        for name, (runs, horizon) in shown.items()
    }
    drawings["over_time"] = make_drawing(
        partial(clustering_over_time, longer),
        "Number of clusters, mean pairwise distance over the root mean square of |x| (spread) and "
        f"over its initial value (distance): medians and middle half of {seeds} draws, up to "
        f"horizon {_LONG:g}. "
        "A distance of 0 is not on the logarithmic axis.",
    )
    return drawings


def _outcome_table(rows: Sequence[dict[str, Any]], seeds: int) -> DataTable:
    choices: dict[tuple, list[dict[str, Any]]] = {}
    for row in rows:
        choices.setdefault((row["scale"], row["horizon"], row["half_range"]), []).append(row)
    powers = [f"t^{p}" if p else "constant" for p in clustering.POWERS]
    title = (
        f"Clusters at the end: median over {seeds} seeds (how many ended in 5 or fewer); lost: "
        "beyond what float32 holds; p: Fisher's exact test of these counts, constant against "
        f"{powers[-1]}"
    )
    table = [
        (*choice, *(_ending(row, seeds) for row in grouped), _chance(grouped, seeds))
        for choice, grouped in choices.items()
    ]
    return DataTable(title, ("scale", "horizon", "half range", *powers, "p"), table)


def _ending(row: dict[str, Any], seeds: int) -> str:
    lost = seeds - row["finite"]
    if not row["finite"]:
        return "all lost"
    return f"{row['clusters']:g} ({row['few']})" + (f", {lost} lost" if lost else "")


def _chance(by_power: Sequence[dict[str, Any]], seeds: int) -> float:
    counts = [by_power[end]["few"] for end in (0, -1)]
    return float(fisher_exact([[few, seeds - few] for few in counts]).pvalue)


def trajectories(clusterings: dict[str, Clustering], width: float = WIDTH) -> Figure:
    """The first three coordinates of every particle of seed 0, in panels (figures 2c, 2d, 13).

    Each panel is scaled by its own largest |x| at the end.
    """
    kind = {"projection": "3d"}
    figure, panels = make_panels(len(clusterings), width, 2.2, 2.1, subplot_kw=kind)
    axes: list[Any] = list(panels)  # the stubs of matplotlib have no Axes3D
    for ax, (title, each) in zip(axes, clusterings.items(), strict=True):
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


def clustering_over_time(clusterings: dict[str, Clustering], width: float = WIDTH) -> Figure:
    """Clusters, spread and distance: medians over the seeds, with the middle half shaded.

    The distance has a logarithmic axis, on which there is no place for a distance of 0.
    """
    columns = ("clusters", "spread", "distance")
    figure, axes = make_panels(len(columns), width, 2.2, 1.9)
    for ax, column in zip(axes, columns, strict=True):
        for title, each in clusterings.items():
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
