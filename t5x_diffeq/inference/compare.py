"""Several runs beside each other: a table, and their loss curves in one figure."""

import html
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from os import PathLike
from typing import TYPE_CHECKING

from t5x_diffeq.checkpoints.workdir import read_config, short_names
from t5x_diffeq.config.config import is_run
from t5x_diffeq.data.corpus import explain_no_run, is_hugging_face
from t5x_diffeq.data.tokenizer_folder import load_tokenizer
from t5x_diffeq.inference.notebook import check_reported, import_plots, shown_in_notebooks
from t5x_diffeq.inference.trained_run import TrainedRun, describe_model
from t5x_diffeq.system.arguments import checked
from t5x_diffeq.system.console import align, format_count, log
from t5x_diffeq.system.errors import InputError
from t5x_diffeq.system.files import AnyPath, parse_path
from t5x_diffeq.training.tracking.jsonl import read_hyperparameters, read_metrics

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_COLUMNS = ("run", "model", "parameters", "steps", "last loss", "lowest loss", "tokens/s")


@dataclass(frozen=True, repr=False, eq=False)
class Comparison:
    """Runs as their workdirs describe them; its repr is a table, with a line for each run."""

    workdirs: Sequence[AnyPath]

    @cached_property
    def metrics(self) -> dict[str, list[dict[str, float]]]:
        """The lines of each run's `metrics.jsonl` by the run's name, oldest first."""
        lines = [list(read_metrics(workdir)) for workdir in self.workdirs]
        return dict(zip(short_names(self.workdirs), lines, strict=True))

    @cached_property
    def rows(self) -> list[dict[str, str]]:
        """The table: a dict for each run, by column; `-` for an unknown value."""
        runs = zip(self.metrics.items(), self.workdirs, strict=True)
        return [
            dict(zip(_COLUMNS, _cells(name, lines, workdir), strict=True))
            for (name, lines), workdir in runs
        ]

    def __repr__(self) -> str:
        return "\n".join(align([_COLUMNS, *(list(row.values()) for row in self.rows)], left=(0, 1)))

    def _repr_html_(self) -> str:
        head = "".join(f"<th>{name}</th>" for name in _COLUMNS)
        rows = ("".join(f"<td>{html.escape(x)}</td>" for x in row.values()) for row in self.rows)
        return f"<table><tr>{'</tr><tr>'.join((head, *rows))}</tr></table>"

    def plot(self) -> "Figure":
        """The training and validation losses over optimizer steps, a colour for each run.

        Raises:
          InputError: if matplotlib isn't installed, or no run has reported a loss.
        """
        plots = import_plots("a plot of losses", "run_plots")
        check_reported(self.metrics)
        return shown_in_notebooks(plots.losses_over_steps(self.metrics))


def _cells(name: str, lines: Sequence[dict[str, float]], workdir: AnyPath) -> Iterator[str]:
    model = read_config(workdir).model
    size = read_hyperparameters(workdir).get("model/parameters")
    losses = [line["eval/loss"] for line in lines if "eval/loss" in line]
    rates = [line["train/tokens_per_second"] for line in lines if "train/loss" in line]
    yield name
    # The source of W(t) isn't asked to describe itself: another package's code would run.
    weights = f"{model.weights} weights"
    yield f"{describe_model(model, weights)}, {model.num_steps} steps of {model.scheme}"
    yield "-" if size is None else format_count(size)
    yield f"{max((line['step'] for line in lines), default=0):.0f}"
    yield f"{losses[-1]:.4f}" if losses else "-"
    yield f"{min(losses):.4f}" if losses else "-"
    yield format_count(statistics.median(rates)) if rates else "-"


@checked
def compare(runs: Sequence[str | PathLike | TrainedRun]) -> Comparison:
    """Runs beside each other: a table of their models and losses, and `.plot()`.

    Losses are of the training's own evaluations, in nats per token on each run's validation split;
    tokens/s is the median of the training's reports.

    Args:
      runs: workdirs, on this machine or in a bucket, or loaded runs in place of their workdirs.

    Raises:
      InputError: if there is no run, or a workdir holds none.
    """
    workdirs = [
        run.workdir if isinstance(run, TrainedRun) else parse_path(str(run), "workdir")
        for run in runs
    ]
    for run in runs:
        if isinstance(run, TrainedRun) and run.num_steps != run.config.model.num_steps:
            raise InputError(
                f"runs has {run.workdir} at {run.num_steps} steps, which is the same training; "
                "run.plot.depths() compares numbers of steps"
            )
    if not workdirs:
        raise InputError("runs=[]: there is nothing to compare; give at least one workdir")
    for workdir in workdirs:
        if not is_run(workdir) or is_hugging_face(workdir):
            raise InputError(explain_no_run(workdir))
    tokenizers = {_tokenizer_in(workdir) for workdir in workdirs}
    if len(tokenizers - {None}) > 1:
        log(
            "note: these runs have different tokenizers, so their losses per token can't be "
            "compared; bits per byte can"
        )
    return Comparison(list(dict.fromkeys(workdirs)))


def _tokenizer_in(workdir: AnyPath) -> str | None:
    """What identifies a run's tokenizer; None if the run has lost it."""
    try:
        tokenizer = load_tokenizer(workdir / "tokenizer")
    except InputError:
        return None
    return tokenizer.fingerprint if tokenizer else None
