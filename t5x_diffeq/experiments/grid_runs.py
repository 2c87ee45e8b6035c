"""The runs of a sweep, every point of a grid with several seeds; their table and their figure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import mean
from typing import Any

from t5x_diffeq.experiments.grid import VARIANT, Axis, Point, points
from t5x_diffeq.experiments.present import TableSpec, format_lines, mean_and_error
from t5x_diffeq.experiments.runs import ExperimentRun, Label, format_flags, name_choices
from t5x_diffeq.system.errors import InputError

_SEED, _LINE = "seed", "line"  # labels; the second names a line of the figure
_COLUMNS = {  # of the table, by the number of an outcome that each shows
    "loss": "last loss",
    "lowest": "lowest loss",
    "bits_per_byte": "bits per byte",
    "tokens_per_second": "tokens/s",
}


@dataclass(frozen=True)
class GridSweep:
    """Trainings of every point of a grid, each with several seeds.

    Raises:
      InputError: if both the file and the grid name a variant.
    """

    file: str
    verb: str  # train or finetune
    overrides: Mapping[str, object]  # keys of the config that all runs set
    axes: tuple[Axis, ...]
    seeds: Sequence[int]  # seeds of the config

    def __post_init__(self) -> None:
        if ":" in self.file and any(axis.key == VARIANT for axis in self.axes):
            raise InputError(
                f"--config={self.file} and --grid=variant both name variants; leave one out"
            )

    def config_of(self, point: Point) -> tuple[str, dict[str, object]]:
        """The config file of a point, with its variant, and the keys that the point's runs set."""
        common = {key: value for key, value in self.overrides.items() if key != _SEED}
        overrides = {key: value for key, value in point.items() if key != VARIANT}
        variant = f":{point[VARIANT]}" if VARIANT in point else ""
        return f"{self.file}{variant}", {**common, **overrides}

    def runs(self) -> list[ExperimentRun]:
        """A run for every seed and point.

        All points are trained with the first seed, then all with the second. So the table of a
        sweep that isn't done yet compares all points.
        """
        return [self._run(point, seed) for seed in self.seeds for point in points(self.axes)]

    def _run(self, point: Point, seed: int) -> ExperimentRun:
        file, keys = self.config_of(point)
        others = {axis.key: point[axis.key] for axis in self.axes[1:]}
        labels: dict[str, Label] = {_LINE: ", ".join(name_choices(others)) or file}
        for axis in self.axes:
            value = point[axis.key]
            labels[axis.key] = value if axis.numeric else str(value)
        name = "-".join([*name_choices(point), f"{_SEED}={seed}"])
        arguments = (f"--config={file}", *format_flags({**keys, _SEED: seed}))
        return ExperimentRun(name, self.verb, arguments, {**labels, _SEED: seed})


@dataclass(frozen=True)
class PointSummary:
    """The outcomes of a point."""

    labels: tuple[Label, ...]  # its value on each axis
    outcomes: tuple[dict, ...]  # the outcome of each of its seeds; {} of one that was not run

    def values(self, key: str) -> list[float]:
        """The number `key` of every seed that ended with a loss; empty if such a seed lacks it."""
        done = [outcome.get(key) for outcome in self.outcomes if "loss" in outcome]
        return [value for value in done if value is not None] if None not in done else []

    @property
    def state(self) -> str:
        """`3 of 3`, and how many diverged, failed or have not been run."""
        counts = {how: sum(how in each for each in self.outcomes) for how in ("diverged", "failed")}
        counts["not run"] = self.outcomes.count({})
        notes = [f"{count} {how}" for how, count in counts.items() if count]
        return ", ".join([f"{len(self.values('loss'))} of {len(self.outcomes)}", *notes])


def summarise(
    runs: Sequence[ExperimentRun], outcomes: Mapping[str, dict], axes: Sequence[Axis]
) -> list[PointSummary]:
    """A summary of each point, in the order of the runs."""
    by_point: dict[tuple[Label, ...], list[dict]] = {}
    for run in runs:
        labels = tuple(run.labels[axis.key] for axis in axes)
        by_point.setdefault(labels, []).append(outcomes.get(run.name, {}))
    return [PointSummary(labels, tuple(each)) for labels, each in by_point.items()]


def best_of(summaries: Sequence[PointSummary]) -> PointSummary | None:
    """The point with the lowest mean of the last loss, among the points with the most seeds done.

    None if no point has more than one seed done: two runs may differ because of their seeds.
    """
    seeds = max((len(each.values("loss")) for each in summaries), default=0)
    full = [each for each in summaries if seeds > 1 and len(each.values("loss")) == seeds]
    return min(full, key=lambda each: mean(each.values("loss")), default=None)


def format_table(summaries: Sequence[PointSummary], axes: Sequence[Axis]) -> str:
    """The table in Markdown: means over seeds with standard errors; the best point is bold."""
    columns = [key for key in _COLUMNS if any(each.values(key) for each in summaries)]
    lines = [[*(axis.key for axis in axes), *(_COLUMNS[key] for key in columns), "seeds"]]
    best = best_of(summaries) if len(summaries) > 1 else None
    for each in summaries:
        cells = [*map(str, each.labels), *(_format_mean(each.values(key), key) for key in columns)]
        if each is best:
            cells = [f"**{cell}**" if cell else "" for cell in cells]
        lines.append([*cells, each.state])
    return format_lines(lines)


def _format_mean(values: Sequence[float], key: str) -> str:
    """`1.2345 ± 0.0012`: the mean and its standard error; no error for a single value."""
    if not values:
        return ""
    form = ",.0f" if key == "tokens_per_second" else ".4f"
    value, error = mean_and_error(values)
    return f"{value:{form}}" + ("" if error is None else f" ± {error:{form}}")


def figure_spec(axes: Sequence[Axis]) -> TableSpec:
    """The figure: the last loss against the first axis, a line for each choice of the others."""
    column, log = (axes[0].key, axes[0].geometric) if axes else (_SEED, False)
    return TableSpec((_LINE,), column, "loss", log=log, over_steps=bool(axes))


def check_same(runs: Sequence[ExperimentRun], done: Mapping[str, dict[str, Any]]) -> None:
    """Checks that the runs that are done had the settings of `runs` (else: InputError)."""
    for run in runs:
        earlier = set(done.get(run.name, {}).get("arguments", run.arguments))
        if differing := sorted(earlier ^ set(run.arguments)):
            raise InputError(
                f"--output: run {run.name} exists there with different settings: "
                f"{' '.join(differing)}; choose another --output"
            )
