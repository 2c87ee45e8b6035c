"""The report's section on clustering."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
from scipy.stats import fisher_exact

from t5x_diffeq.analysis import clustering, clustering_plots
from t5x_diffeq.analysis.figures import make_drawing
from t5x_diffeq.analysis.report import Drawing, Section, Table
from t5x_diffeq.runtime.console import Progress

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
_CHANCE = 0.01  # p-value below which a difference of counts is reported


def clustering_section(seeds: int) -> Section:
    """The section on particles under attention alone, with constant and growing weights."""
    names = {p: "constant" if p == 0 else f"t^{p}" for p in clustering.POWERS}
    with Progress("clustering: trajectories"):
        found = {n: clustering.simulate_clustering(p, seeds=seeds) for p, n in names.items()}
        longer = {
            n: clustering.simulate_clustering(p, horizon=_LONG, seeds=seeds)
            for p, n in names.items()
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
        name="clustering",
        title="Clustering under attention alone",
        conclusion=_conclude(rows, seeds),
        advice="See whether tokens of a trained run come together: the pairwise distances of its "
        "y(t), `td.load(DIR).trajectory(TEXT)`, are those of a model with an MLP and norms.",
        method=_METHOD,
        tables=[_outcome_table(rows, seeds)],
        drawings=_clustering_drawings(found, longer, seeds),
        arrays=arrays,
    )


def _conclude(rows: Sequence[dict[str, Any]], seeds: int) -> str:
    """Whether growing weights keep particles apart at the longest horizon, for the first choice."""
    last = max(rows, key=lambda row: row["horizon"])
    chosen = {key: last[key] for key in ("scale", "horizon", "half_range")}
    few = {r["power"]: r["few"] for r in rows if all(r[key] == chosen[key] for key in chosen)}
    constant, growing = few[0], few[max(few)]
    chance = fisher_exact([[constant, seeds - constant], [growing, seeds - growing]]).pvalue
    verdict = "no significant difference"
    if chance < _CHANCE:
        verdict = "weights that grow " + ("do cluster" if growing > constant else "stay apart")
    return (
        f"At horizon {chosen['horizon']:g} (scale={chosen['scale']}, half range "
        f"{chosen['half_range']:g}), {constant} of {seeds} draws end in 5 clusters or fewer with "
        f"constant weights and {growing} with t^{max(few)}: {verdict} (Fisher's exact test: "
        f"{chance:.2g}). This concerns random weights, not this run."
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
      seeds: number of seeds of each simulation.
    """
    shown = {
        "trajectories": (found, "1, the paper's,"),
        "trajectories_longer": (longer, f"{_LONG:g}"),
    }
    drawings = {
        name: make_drawing(
            partial(clustering_plots.trajectories, runs),
            f"Trajectories of 40 particles up to horizon {horizon} for constant and growing "
            "weights, seed 0; each panel has its own scale.",
        )
        for name, (runs, horizon) in shown.items()
    }
    drawings["over_time"] = make_drawing(
        partial(clustering_plots.clustering_over_time, longer),
        "Number of clusters, mean pairwise distance over the root mean square of |x| (spread) and "
        f"over its initial value (distance): medians and middle half of {seeds} draws, up to "
        f"horizon {_LONG:g}. "
        "A distance of 0 is not on the logarithmic axis.",
    )
    return drawings


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
