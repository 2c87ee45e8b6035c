"""Results as a table and a figure: means over seeds, with their standard errors."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import sqrt
from statistics import mean, stdev

from t5x_diffeq.experiments.runs import Label


@dataclass(frozen=True)
class Layout:
    """Where outcomes stand.

    Attributes:
      row: labels that make a row.
      column: the label that makes a column; in the figure, the axis.
      value: the figure shown, such as "loss".
      best_of: a label over which the lowest mean is taken, such as the learning rate, of those
        with the most seeds; or None.
      log: whether the figure's axis is logarithmic.
    """

    row: tuple[str, ...]
    column: str
    value: str
    best_of: str | None = None
    log: bool = False


@dataclass(frozen=True)
class Cell:
    """Several seeds' mean.

    Attributes:
      values: of the seeds.
      at: of `best_of`, where the mean is lowest.
      interior: whether its neighbours on both sides were tried.
    """

    values: tuple[float, ...]
    at: Label | None = None
    interior: bool = True

    @property
    def mean(self) -> float:
        """Over seeds."""
        return mean(self.values)

    @property
    def error(self) -> float | None:
        """The standard error of the mean; None of one seed."""
        n = len(self.values)
        return stdev(self.values) / sqrt(n) if n > 1 else None

    def __str__(self) -> str:
        text = f"{self.mean:.4g}" if self.error is None else f"{self.mean:.4f} ± {self.error:.4f}"
        if self.at is None:
            return text
        return f"{text} ({self.at}{'' if self.interior else ', at the edge'})"


def scores(outcomes: Sequence[dict]) -> list[dict]:
    """The outcomes, and of each that ran tasks one more per task: its accuracy as `score`."""
    found = list(outcomes)
    for outcome in outcomes:
        for key, score in outcome.items():
            if key.startswith("tasks/") and key.endswith("/acc"):
                found.append({**outcome, "task": key.split("/")[1], "score": score})
    return found


def cells(outcomes: Sequence[dict], layout: Layout) -> dict[tuple, dict[Label, Cell]]:
    """Cells by row and column; rows and columns in the order of the outcomes."""
    grouped: dict[tuple, dict[Label, dict[Label | None, list[float]]]] = {}
    for outcome in outcomes:
        if layout.column not in outcome or layout.value not in outcome:
            continue  # a run that only others need
        row = tuple(outcome[label] for label in layout.row)
        tried = grouped.setdefault(row, {}).setdefault(outcome[layout.column], {})
        at = outcome[layout.best_of] if layout.best_of else None
        tried.setdefault(at, []).append(outcome[layout.value])
    return {
        row: {column: best(tried) for column, tried in columns.items()}
        for row, columns in grouped.items()
    }


def best(tried: dict[Label | None, list[float]]) -> Cell:
    """The cell of the lowest mean, of those with the most seeds."""
    seeds = max(map(len, tried.values()))
    at = min(
        (each for each in tried if len(tried[each]) == seeds), key=lambda each: mean(tried[each])
    )
    order = sorted(tried, key=lambda each: (each is not None, each))
    interior = len(order) == 1 or at not in (order[0], order[-1])
    return Cell(tuple(tried[at]), at, interior)


def in_order(rows: dict[tuple, dict[Label, Cell]]) -> list[Label]:
    """All columns: numbers from low to high, words as they come."""
    columns = list(dict.fromkeys(column for row in rows.values() for column in row))
    words = any(isinstance(column, str) for column in columns)
    return columns if words else sorted(columns)


def markdown(outcomes: Sequence[dict], layout: Layout) -> str:
    """The table."""
    rows = cells(outcomes, layout)
    columns = in_order(rows)
    lines = [
        f"| {', '.join(layout.row)} | "
        + " | ".join(f"{layout.column} {c}" for c in columns)
        + " |",
        "|---" * (len(columns) + 1) + "|",
    ]
    for row, found in rows.items():
        values = [str(found[column]) if column in found else "" for column in columns]
        lines.append(f"| {', '.join(map(str, row))} | " + " | ".join(values) + " |")
    return "\n".join(lines)
