"""Figures of outcomes: the table's numbers, and losses over optimizer steps."""

from collections.abc import Sequence

from t5x_diffeq.experiments import present
from t5x_diffeq.experiments.present import PlottedPoint, TableSpec
from t5x_diffeq.experiments.runs import Label
from t5x_diffeq.system.console import log
from t5x_diffeq.system.extras import install_command
from t5x_diffeq.system.files import AnyPath, write_whole
from t5x_diffeq.training.tracking.jsonl import read_metrics

Panels = dict[str, dict[str, list[PlottedPoint]]]  # points by the panel's title, the line's name
_TEXTS = ("text", "trained on", "tuned on")  # labels that name a panel; they come first in a row


def draw(
    outcomes: Sequence[dict],
    table: TableSpec,
    path: AnyPath,
    output: AnyPath,
    comparable: bool = True,
) -> None:
    """Writes the table's figures as .png and .pdf, if matplotlib is installed.

    Args:
      path: path of its files without suffix; a figure over optimizer steps adds `_over_steps`.
      comparable: whether the numbers compare with the paper's; if not, the figures say so.
    """
    try:
        from t5x_diffeq.analysis import figures
    except ImportError:
        log(f"no figure: matplotlib is not installed ({install_command('analysis')})")
        return

    def write(name: str, panels: Panels, across: str, up: str) -> None:
        is_table = across == table.column
        lines = [line for each in panels.values() for line in each.values()] if is_table else []
        ticks = sorted({x for line in lines for x, *_ in line if not isinstance(x, str)})
        log = table.log and is_table
        figure = figures.means_with_errors(panels, across, up + caveat, log, ticks)
        for kind in ("png", "pdf"):
            write_whole(path.with_name(f"{name}.{kind}"), figures.render_image(figure, kind))

    caveat = "" if comparable else " (not comparable with the paper's)"
    if panels := _panels_of_table(outcomes, table):
        write(path.name, panels, table.column, table.value)
    if table.over_steps and (panels := loss_panels(outcomes, table, output)):
        write(f"{path.name}_over_steps", panels, "optimizer steps", "validation loss")


def _panels_of_table(outcomes: Sequence[dict], table: TableSpec) -> Panels:
    """A panel for each text; if the columns are models, a panel for each row."""
    rows = present.cells(outcomes, table)
    columns = present.order_columns(rows)
    words = any(isinstance(column, str) for column in columns)
    panels: Panels = {}
    for row, by_column in rows.items():
        title, name = _split(table.row, row)
        for column in columns:
            if column not in by_column or not by_column[column].values:
                continue
            point = (
                str(column) if words else column,
                *present.mean_and_error(by_column[column].values),
            )
            if table.column == "model":
                panels.setdefault(", ".join(filter(None, (title, name))), {})[str(column)] = [point]
            elif table.column == "text":
                panels.setdefault(str(column), {})[name] = [(name, *point[1:])]
            else:
                panels.setdefault(title, {}).setdefault(name, []).append(point)
    return panels


def _split(labels: Sequence[str], values: Sequence[Label]) -> tuple[str, str]:
    """The title of a panel, made of the texts, and the name of a line in it."""
    named = list(map(_name, labels, values))
    texts = sum(label in _TEXTS for label in labels)
    return ", ".join(named[:texts]), ", ".join(named[texts:])


def _name(label: str, value: Label) -> str:
    """What a figure calls the value of a label; a number alone says little."""
    return value if isinstance(value, str) else f"{label}={value}"


def loss_panels(outcomes: Sequence[dict], table: TableSpec, output: AnyPath) -> Panels:
    """The validation loss over optimizer steps: a line for each cell, the mean over its seeds."""
    panels: Panels = {}
    for row, columns in present.group_outcomes(outcomes, table).items():
        for column, tried in columns.items():
            best = tried[present.best_choice(tried, table.value)]
            curves = [_losses(output / each["run"]) for each in best]
            steps = [step for step in curves[0] if all(step in run for run in curves)]
            title, name = _split((*table.row, table.column), (*row, column))
            if steps:
                panels.setdefault(title, {})[name] = [
                    (step, *present.mean_and_error([run[step] for run in curves])) for step in steps
                ]
    return panels


def _losses(workdir: AnyPath) -> dict[int, float]:
    """Validation losses by optimizer step; {} if the workdir is gone."""
    return {int(line["step"]): line["eval/loss"] for line in read_metrics(workdir, "eval/loss")}
