"""Results as a table and a figure: means over seeds, with their standard errors.

Seeds that diverged have no number. Tables count them, because a mean over the others looks better
than the model is.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import sqrt
from statistics import mean, stdev

from t5x_diffeq.experiments.runs import Label

# The horizontal coordinate, the mean, and the standard error or None.
PlottedPoint = tuple[float | str, float, float | None]


@dataclass(frozen=True)
class TableSpec:
    """How outcomes are arranged in a table and a figure."""

    row: tuple[str, ...]  # labels that define a row
    column: str  # the label that defines a column; in the figure, the horizontal axis
    value: str  # the number shown, such as "loss"
    # a label, such as the learning rate, of which a cell shows the value with the lowest mean,
    # among the values with the most seeds; or None
    best_of: str | None = None
    log: bool = False  # whether the figure's axis is logarithmic
    # whether a second figure shows the validation loss over optimizer steps
    over_steps: bool = False
    same_seeds: bool = False  # whether a row takes only the seeds that all of its columns have


@dataclass(frozen=True)
class Cell:
    """The mean over several seeds."""

    values: tuple[float, ...]  # the values, one per seed
    at: Label | None = None  # the value of `best_of` at which the mean is lowest
    # the mean standard error of a single value, over the documents of a task; or None
    within: float | None = None
    diverged: int = 0  # the number of further seeds, which diverged

    def __str__(self) -> str:
        parts = [self._format_mean()] if self.values else []
        return ", ".join(parts + [f"{self.diverged} diverged"] * bool(self.diverged))

    def _format_mean(self) -> str:
        value, error = mean_and_error(self.values)
        text = f"{value:.4g}" if error is None else f"{value:.4f} ± {error:.4f}"
        if self.within is not None:
            text += f" ({self.within:.4f})"
        return text if self.at is None else f"{text} ({self.at})"


def mean_and_error(values: Sequence[float]) -> tuple[float, float | None]:
    """The mean, and its standard error; None for a single value."""
    n = len(values)
    return mean(values), stdev(values) / sqrt(n) if n > 1 else None


def add_task_scores(outcomes: Sequence[dict]) -> list[dict]:
    """The outcomes, and one more per task for each outcome of an evaluation on tasks.

    `score` is the accuracy, `score_error` the harness's standard error. Members of a group of
    tasks (`mmlu_anatomy` beside `mmlu`) are left out. What diverged has no score on any task.
    """
    scored = list(outcomes)
    for outcome in outcomes:
        keys = [key.split("/") for key in outcome if key.startswith("tasks/")]
        tasks = [key[1] for key in keys if key[2:] == ["acc"]]
        for task in tasks:
            if not any(task.startswith(f"{group}_") for group in tasks):
                score = outcome[f"tasks/{task}/acc"]
                error = outcome.get(f"tasks/{task}/acc_stderr")
                scored.append({**outcome, "task": task, "score": score, "score_error": error})
    asked = dict.fromkeys(each["task"] for each in scored if "task" in each)
    diverged = [outcome for outcome in outcomes if "diverged" in outcome]
    return scored + [{**outcome, "task": task} for outcome in diverged for task in asked]


Tried = dict[Label | None, list[dict]]  # outcomes by the value of `best_of`


def group_outcomes(outcomes: Sequence[dict], table: TableSpec) -> dict[tuple, dict[Label, Tried]]:
    """Outcomes by row, column and `best_of`; rows and columns in the order of the outcomes."""
    groups: dict[tuple, dict[Label, Tried]] = {}
    for outcome in outcomes:
        if not outcome.keys() >= {*table.row, table.column, table.value}:
            continue  # a run that only other runs need
        row = tuple(outcome[label] for label in table.row)
        tried = groups.setdefault(row, {}).setdefault(outcome[table.column], {})
        tried.setdefault(outcome[table.best_of] if table.best_of else None, []).append(outcome)
    return {row: _with_common_seeds(x) if table.same_seeds else x for row, x in groups.items()}


def _with_common_seeds(columns: dict[Label, Tried]) -> dict[Label, Tried]:
    def seeds(tried: Tried) -> set[int]:
        return {outcome["seed"] for outcomes in tried.values() for outcome in outcomes}

    common = set.intersection(*map(seeds, columns.values()))
    return {
        column: {at: [x for x in outcomes if x["seed"] in common] for at, outcomes in tried.items()}
        for column, tried in columns.items()
    }


def best_choice(tried: Tried, value: str) -> Label | None:
    """The value of `best_of` with the lowest mean, among the values with the most seeds."""
    seeds = max(map(len, tried.values()))
    most = [at for at, outcomes in tried.items() if len(outcomes) == seeds]
    return min(most, key=lambda at: mean(each[value] for each in tried[at]))


def cells(outcomes: Sequence[dict], table: TableSpec) -> dict[tuple, dict[Label, Cell]]:
    """Cells by row and column, in the order of the outcomes; those without a number come last."""
    rows = {
        row: {column: _best(tried, table.value) for column, tried in columns.items()}
        for row, columns in group_outcomes(outcomes, table).items()
    }
    of_diverged = replace(table, value="diverged", same_seeds=False)
    for row, columns in group_outcomes(outcomes, of_diverged).items():
        for column, tried in columns.items():
            cell = rows.setdefault(row, {}).get(column)
            if cell is None:
                rows[row][column] = Cell((), diverged=sum(map(len, tried.values())))
            elif not table.same_seeds:  # else the cell shows none of the seeds that diverged
                rows[row][column] = replace(cell, diverged=len(tried.get(cell.at, ())))
    return rows


def _best(tried: Tried, value: str) -> Cell:
    at = best_choice(tried, value)
    errors = [outcome.get(f"{value}_error") for outcome in tried[at]]
    known = [error for error in errors if error is not None]
    within = mean(known) if len(known) == len(errors) else None
    return Cell(tuple(outcome[value] for outcome in tried[at]), at, within)


def order_columns(rows: dict[tuple, dict[Label, Cell]]) -> list[Label]:
    """All columns: numbers in increasing order, words in the order in which they appear."""
    columns = list(dict.fromkeys(column for row in rows.values() for column in row))
    words = any(isinstance(column, str) for column in columns)
    return columns if words else sorted(columns)


def format_markdown(outcomes: Sequence[dict], table: TableSpec) -> str:
    """The table in Markdown."""
    rows = cells(outcomes, table)
    columns = order_columns(rows)
    heads = [", ".join(table.row), *(f"{table.column} {column}" for column in columns)]
    lines = [heads] + [
        [", ".join(map(str, row)), *(str(by_column.get(column, "")) for column in columns)]
        for row, by_column in rows.items()
    ]
    return format_lines(lines)


def format_lines(lines: Sequence[Sequence[str]]) -> str:
    """A table in Markdown, given its cells; the first line is its head."""
    head, *others = [f"| {' | '.join(line)} |" for line in lines]
    return "\n".join([head, "|---" * len(lines[0]) + "|", *others])


def list_pages(outcomes: Sequence[dict]) -> list[str]:
    """The paths of the analyses' pages, as one paragraph."""
    pages = [f"- {outcome['page']}" for outcome in outcomes if "page" in outcome]
    return ["Pages, with figures and arrays beside them:\n\n" + "\n".join(pages)] if pages else []
