"""Results as a table and a figure: means over seeds, with their standard errors; a paired test.

The test is over the documents of a task: two models answer the same questions. A hard question is
hard for both models, so the difference of their answers varies less than the answers do, and the
test finds smaller differences than two standard errors of separate means.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import erfc, sqrt
from statistics import mean, stdev
from typing import NamedTuple

import numpy as np
from jaxtyping import Float

from t5x_diffeq.experiments.runs import Label
from t5x_diffeq.system.errors import InputError
from t5x_diffeq.system.files import AnyPath, read_json_object
from t5x_diffeq.system.json_lines import check_types

_PAIRED_HEAD = (
    "Paired test over the same documents (and seeds), ODE against baseline\n\n"
    "| text, task, shots | ODE - baseline | standard error | p | seeds | documents |\n"
    "|---|---|---|---|---|---|"
)

# The horizontal coordinate, the mean, and the standard error or None.
PlottedPoint = tuple[float | str, float, float | None]


@dataclass(frozen=True)
class TableSpec:
    """How outcomes are arranged in a table and a figure."""

    row: tuple[str, ...]  # labels that define a row
    column: str  # the label that defines a column; in the figure, the horizontal axis
    value: str  # the number shown, such as "loss"
    # a label over which the lowest mean is taken, such as the learning rate, among the values with
    # the most seeds; or None
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

    def __str__(self) -> str:
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
    tasks (`mmlu_anatomy` beside `mmlu`) are left out.
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
    return scored


Tried = dict[Label | None, list[dict]]  # outcomes by the value of `best_of`


def group_outcomes(outcomes: Sequence[dict], table: TableSpec) -> dict[tuple, dict[Label, Tried]]:
    """Outcomes by row, column and `best_of`; rows and columns in the order of the outcomes."""
    groups: dict[tuple, dict[Label, Tried]] = {}
    for outcome in outcomes:
        if table.column not in outcome or table.value not in outcome:
            continue  # a run that is only there for others
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
    """The value of `best_of` with the lowest mean, among those with the most seeds."""
    seeds = max(map(len, tried.values()))
    most = [at for at, outcomes in tried.items() if len(outcomes) == seeds]
    return min(most, key=lambda at: mean(each[value] for each in tried[at]))


def cells(outcomes: Sequence[dict], table: TableSpec) -> dict[tuple, dict[Label, Cell]]:
    """Cells by row and column; rows and columns in the order of the outcomes."""
    return {
        row: {column: _best(tried, table.value) for column, tried in columns.items()}
        for row, columns in group_outcomes(outcomes, table).items()
    }


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


class PairedDifference(NamedTuple):
    """The difference of two models' accuracies."""

    difference: float
    error: float
    p: float  # two-sided p-value by the normal approximation, so it takes hundreds of documents


def compare_pairs(
    a: Float[np.ndarray, "seeds documents"], b: Float[np.ndarray, "seeds documents"]
) -> PairedDifference:
    """The paired difference a - b, seed by seed and document by document.

    The variance over documents (of the mean over seeds) and, with several seeds, the variance over
    seeds (of the mean over documents) are added: the claim is about other documents and other
    seeds. The sum counts the part of a single seed and document twice, so it is conservative.
    """
    d = a - b
    variance = sum(
        np.var(d.mean(axis), ddof=1) / d.shape[1 - axis] for axis in (0, 1) if d.shape[1 - axis] > 1
    )
    difference, error = float(d.mean()), sqrt(variance)
    p = erfc(abs(difference) / error / sqrt(2)) if error else float(difference == 0)
    return PairedDifference(difference, error, p)


def paired_table(outcomes: Sequence[dict], output: AnyPath) -> list[str]:
    """The table of paired tests, ODE against baseline, as one paragraph."""
    answers: dict[tuple, dict[tuple[str, int], list[float]]] = {}
    for outcome in outcomes:
        if "shots" in outcome and "task" not in outcome:
            for task, scores in _read_answers(output / outcome["run"]).items():
                named = [outcome[x] for x in ("text", "architecture") if x in outcome]
                by_model = answers.setdefault((*named, task, outcome["shots"]), {})
                by_model[outcome["model"], outcome["seed"]] = scores
    lines = []
    for row, by_model in answers.items():
        if seeds := sorted(s for m, s in by_model if m == "ode" and ("baseline", s) in by_model):
            ode = np.array([by_model["ode", seed] for seed in seeds], float)
            baseline = np.array([by_model["baseline", seed] for seed in seeds], float)
            test = compare_pairs(ode, baseline)
            lines.append(
                f"| {', '.join(map(str, row))} | {test.difference:+.4f} | {test.error:.4f} | "
                f"{test.p:.2g} | {len(seeds)} | {ode.shape[1]} |"
            )
    return ["\n".join([_PAIRED_HEAD, *lines])] if lines else []


def _read_answers(folder: AnyPath) -> dict[str, list[float]]:
    """Each task's accuracies by document, from the newest JSON of `evaluate`; {} if it has none.

    All subjects of MMLU are one task, as the paper counts them.
    """
    files = sorted(folder.glob("*.json"), key=lambda path: path.name.rpartition("-")[2])
    if not files:
        return {}
    try:
        documents = read_json_object(files[-1]).get("documents", {})
        check_types(documents, dict.fromkeys(documents, (list,)))
    except ValueError as error:
        raise InputError(
            f"{files[-1]} is damaged: {error}; delete it and its run's line in results.jsonl, and "
            "the same command evaluates again"
        ) from error
    tasks: dict[str, list[float]] = {}
    for task in sorted(documents):
        name = "mmlu" if task.startswith("mmlu_") else task
        tasks.setdefault(name, []).extend(documents[task])
    return tasks
