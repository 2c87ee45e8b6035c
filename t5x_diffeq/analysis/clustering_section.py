"""The report's section on clustering."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from t5x_diffeq.analysis import clustering, plots
from t5x_diffeq.analysis.plots import make_drawing
from t5x_diffeq.analysis.report import Drawing, Section, Table
from t5x_diffeq.runtime.console import Progress

_METHOD = (
    "dx_i/dt = sum_j softmax_j(x_i Q^T K x_j / sqrt 3) V x_j, 40 particles in 3 dimensions, "
    "200 Euler steps; Q, K and V standard normal times a(t). The figures have the paper's step, "
    "dt = 1/200, so horizon 1, particles from [-1, 1]^3 and a = t^p; one has horizon 10, and "
    "a = (t/10)^p.",
    "The paper's range and scale of growth are lost from its text; the table has several, and "
    "longer horizons. scale=peak: a is 1 at the end. scale=work: the integral of a is that of "
    "constant weights. scale=time: a = t^p. A link is a distance below 0.05 of the root mean "
    "square of |x|, a cluster what is linked.",
)
_LONG = 10.0  # the horizon of the figure in which constant weights form clusters


def clustering_section(seeds: int) -> Section:
    """The section on particles under attention alone, with constant and growing weights."""
    names = {p: "constant" if p == 0 else f"t^{p}" for p in clustering.POWERS}
    with Progress("clustering: trajectories"):
        found = {n: clustering.simulate_clustering(p, seeds=seeds) for p, n in names.items()}
        longer = {
            n: clustering.simulate_clustering(p, horizon=_LONG)
            for p, n in names.items()
            if n in ("constant", "t^4")
        }
    rows = []
    with Progress("clustering", 18 * len(names), "simulations") as progress:
        for row in clustering.outcomes(seeds=seeds):
            rows.append(row)
            progress.update(len(rows))
    arrays = {"times": (found["constant"].times, "[state], in units of the horizon's time")}
    for power, each in zip(names, found.values(), strict=True):
        arrays[f"states_{power}"] = (
            each.states.astype(np.float32),
            f"[seed, state, token, dim] for t^{power}",
        )
        arrays[f"clusters_{power}"] = (each.clusters, f"[seed, state] for t^{power}")
    return Section(
        "clustering",
        "Clustering",
        [_clustering_findings(rows, seeds)],
        _METHOD,
        [_outcome_table(rows, seeds)],
        _clustering_drawings(found, longer, seeds),
        arrays,
    )


def _clustering_findings(rows: Sequence[dict[str, Any]], seeds: int) -> str:
    """How many seeds end in few clusters at the longest horizon, by the growth of the weights."""
    longest = max(row["horizon"] for row in rows)
    scale, half_range = rows[0]["scale"], rows[0]["half_range"]
    chosen = {"horizon": longest, "scale": scale, "half_range": half_range}
    ends = [row for row in rows if all(row[key] == value for key, value in chosen.items())]
    told = ", ".join(
        f"{row['few']} with {'constant weights' if row['power'] == 0 else 't^' + str(row['power'])}"
        for row in ends
    )
    return (
        f"Of {seeds} draws, so many end in 5 clusters or fewer at horizon {longest:g} "
        f"(scale={scale}, half range {half_range:g}): {told}."
    )


def _clustering_drawings(
    found: dict[str, clustering.Clustering],
    longer: dict[str, clustering.Clustering],
    seeds: int,
) -> dict[str, Drawing]:
    """Trajectories of the first seed, and measures over all seeds.

    Args:
      found: the simulations by name, at the paper's horizon.
      longer: the simulations by name, at a longer horizon.
      seeds: number of seeds of each simulation in `found`.
    """
    pair = {name: each for name, each in found.items() if name in ("constant", "t^4")}
    return {
        "constant_and_t4": make_drawing(
            plots.trajectories(pair), "Constant weights, and t^4; seed 0."
        ),
        "constant_and_t4_longer": make_drawing(
            plots.trajectories(longer), f"Constant weights, and t^4, at horizon {_LONG:g}; seed 0."
        ),
        "trajectories": make_drawing(plots.trajectories(found), "All growths; seed 0."),
        "over_time": make_drawing(
            plots.clustering_over_time(found), f"Medians and middle half over {seeds} seeds."
        ),
    }


def _outcome_table(rows: Sequence[dict[str, Any]], seeds: int) -> Table:
    choices: dict[tuple, dict[int, str]] = {}
    for row in rows:
        key = (row["scale"], row["horizon"], row["half_range"])
        lost = seeds - row["finite"]
        cell = f"{row['clusters']:g} ({row['few']})" + (f", {lost} lost" if lost else "")
        cell = cell if row["finite"] else "all lost"
        choices.setdefault(key, {})[row["power"]] = cell
    powers = [f"t^{p}" if p else "constant" for p in clustering.POWERS]
    title = (
        f"Clusters at the end: median over {seeds} seeds (how many ended in 5 or fewer); lost: "
        "beyond what float32 holds"
    )
    table = [(*key, *by_power.values()) for key, by_power in choices.items()]
    return Table(title, ("scale", "horizon", "half range", *powers), table)
