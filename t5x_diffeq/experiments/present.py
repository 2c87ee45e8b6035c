"""Results as a table and a figure: means over seeds, with their standard errors."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import sqrt
from statistics import mean, stdev

from t5x_diffeq.experiments.runs import Label

# For each point its horizontal coordinate, the mean, and the standard error or None.
Line = Sequence[tuple[float | str, float, float | None]]


@dataclass(frozen=True)
class TableSpec:
    """How outcomes are arranged in a table and a figure.

    Attributes:
      row: labels that define a row.
      column: the label that defines a column; in the figure, the horizontal axis.
      value: the number shown, such as "loss".
      best_of: a label over which the lowest mean is taken, such as the learning rate, among the
        values with the most seeds; or None.
      log: whether the figure's axis is logarithmic.
      over_steps: whether a second figure shows the validation loss over optimizer steps.
      panels: how many of the row's labels select a panel of the figure, from the first on.
    """

    row: tuple[str, ...]
    column: str
    value: str
    best_of: str | None = None
    log: bool = False
    over_steps: bool = False
    panels: int = 0


@dataclass(frozen=True)
class Chart:
    """A figure that isn't a table's.

    Attributes:
      across: label of the horizontal axis.
      up: label of the vertical axis.
      panels: by title, the lines of each panel by name.
      log: whether the horizontal axis is logarithmic.
    """

    across: str
    up: str
    panels: dict[str, dict[str, Line]]
    log: bool = False


@dataclass(frozen=True)
class Cell:
    """The mean over several seeds.

    Attributes:
      values: the values, one per seed.
      within: the mean standard error of a single value, over the documents of a task; or None.
      at: the value of `best_of` at which the mean is lowest.
      interior: whether the neighbours of `at` on both sides were tried.
    """

    values: tuple[float, ...]
    at: Label | None = None
    interior: bool = True
    within: float | None = None

    @property
    def mean(self) -> float:
        """The mean over seeds."""
        return mean(self.values)

    @property
    def error(self) -> float | None:
        """The standard error of the mean; None for a single seed."""
        return mean_and_error(self.values)[1]

    def __str__(self) -> str:
        text = f"{self.mean:.4g}" if self.error is None else f"{self.mean:.4f} ± {self.error:.4f}"
        if self.within is not None:
            text += f" ({self.within:.4f})"
        if self.at is None:
            return text
        return f"{text} ({self.at}{'' if self.interior else ', at the edge'})"


def mean_and_error(values: Sequence[float]) -> tuple[float, float | None]:
    """The mean, and its standard error; None for a single value."""
    n = len(values)
    return mean(values), stdev(values) / sqrt(n) if n > 1 else None


def add_task_scores(outcomes: Sequence[dict]) -> list[dict]:
    """The outcomes, and one more per task for each outcome of an evaluation on tasks.

    `score` is the accuracy, `score_error` the harness's standard error. Members of a group of
    tasks (`mmlu_anatomy` beside `mmlu`) are left out.
    """
    found = list(outcomes)
    for outcome in outcomes:
        keys = [key.split("/") for key in outcome if key.startswith("tasks/")]
        tasks = [key[1] for key in keys if key[2:] == ["acc"]]
        for task in tasks:
            if any(task.startswith(f"{group}_") for group in tasks):
                continue
            score = {"task": task, "score": outcome[f"tasks/{task}/acc"]}
            error = outcome.get(f"tasks/{task}/acc_stderr")
            found.append({**outcome, **score, "score_error": error})
    return found


OutcomeGroups = dict[tuple, dict[Label, dict[Label | None, list[dict]]]]


def group_outcomes(outcomes: Sequence[dict], table: TableSpec) -> OutcomeGroups:
    """Outcomes by row, column and `best_of`; rows and columns in the order of the outcomes."""
    found: OutcomeGroups = {}
    for outcome in outcomes:
        if table.column not in outcome or table.value not in outcome:
            continue  # a run that is only there for others
        row = tuple(outcome[label] for label in table.row)
        tried = found.setdefault(row, {}).setdefault(outcome[table.column], {})
        tried.setdefault(outcome[table.best_of] if table.best_of else None, []).append(outcome)
    return found


def cells(outcomes: Sequence[dict], table: TableSpec) -> dict[tuple, dict[Label, Cell]]:
    """Cells by row and column; rows and columns in the order of the outcomes."""
    return {
        row: {column: _best(tried, table.value) for column, tried in columns.items()}
        for row, columns in group_outcomes(outcomes, table).items()
    }


def best_choice(tried: dict[Label | None, list[dict]], value: str) -> Label | None:
    """The value of `best_of` with the lowest mean, among those with the most seeds."""
    seeds = max(map(len, tried.values()))
    most = [at for at, found in tried.items() if len(found) == seeds]
    return min(most, key=lambda at: mean(each[value] for each in tried[at]))


def _best(tried: dict[Label | None, list[dict]], value: str) -> Cell:
    at = best_choice(tried, value)
    order = sorted(tried, key=lambda each: (each is not None, each))
    interior = len(order) == 1 or at not in (order[0], order[-1])
    error = f"{value}_error"
    given = all(each.get(error) is not None for each in tried[at])
    within = mean(each[error] for each in tried[at]) if given else None
    return Cell(tuple(each[value] for each in tried[at]), at, interior, within)


def order_columns(rows: dict[tuple, dict[Label, Cell]]) -> list[Label]:
    """All columns: numbers in increasing order, words in the order in which they appear."""
    columns = list(dict.fromkeys(column for row in rows.values() for column in row))
    words = any(isinstance(column, str) for column in columns)
    return columns if words else sorted(columns)


def format_markdown(outcomes: Sequence[dict], table: TableSpec) -> str:
    """The table in Markdown."""
    rows = cells(outcomes, table)
    columns = order_columns(rows)
    lines = [
        f"| {', '.join(table.row)} | " + " | ".join(f"{table.column} {c}" for c in columns) + " |",
        "|---" * (len(columns) + 1) + "|",
    ]
    for row, found in rows.items():
        values = [str(found[column]) if column in found else "" for column in columns]
        lines.append(f"| {', '.join(map(str, row))} | " + " | ".join(values) + " |")
    return "\n".join(lines)
