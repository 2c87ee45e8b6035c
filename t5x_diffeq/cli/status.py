"""Shows the progress of a run, or of several: --workdir=DIR, which may be repeated.

Prints its step, its losses, how each attempt spent its time, its goodput, and when it will finish;
with --json one JSON object per run instead. --plot=FILE draws the losses of all runs in one figure.
It changes nothing in a run, even while the run trains.
"""

import json
import time
from typing import TYPE_CHECKING

from t5x_diffeq.cli import flag_values
from t5x_diffeq.cli.verb_flags import VerbFlags
from t5x_diffeq.config.config import CONFIG_FILE, is_run
from t5x_diffeq.system.console import align, format_duration, print_result
from t5x_diffeq.system.errors import InputError
from t5x_diffeq.system.extras import need_package
from t5x_diffeq.system.files import AnyPath, parse_path
from t5x_diffeq.training import goodput

if TYPE_CHECKING:
    from t5x_diffeq.training.run_status import RunStatus

FLAGS = VerbFlags(__name__)
_WORKDIR = FLAGS.define_texts(
    "workdir", "Folder of a run, or of several runs' folders, here or in a bucket; may be repeated."
)
_JSON = FLAGS.define_switch("json", "Print a JSON object per run.")
_PLOT = FLAGS.define_plot("training and validation losses over optimizer steps")


def main() -> None:
    """Runs the verb."""
    folders, now = flag_values.parse_folders(_WORKDIR, "status"), time.time()
    flag_values.check_plot(_PLOT)
    if _PLOT.value:
        need_package("matplotlib", "--plot", "leave it out")
    from t5x_diffeq.training.run_status import RunStatus  # importing JAX takes seconds

    workdirs = list(dict.fromkeys(workdir for folder in folders for workdir in _runs_in(folder)))
    runs = [RunStatus(workdir, now) for workdir in workdirs]
    if _JSON.value:
        print_result("\n".join(json.dumps(run.facts()) for run in runs))
    else:
        alone = workdirs == folders[:1]
        print_result("\n".join(_lines_of_run(runs[0]) if alone else _table_of_runs(runs)))
    if _PLOT.value:
        from t5x_diffeq.inference.compare import Comparison
        from t5x_diffeq.inference.notebook import write_figure

        write_figure(Comparison(workdirs).plot(), parse_path(_PLOT.value, "--plot"))


def _runs_in(folder: AnyPath) -> list[AnyPath]:
    """The folder itself if it is a run's, else the folders of runs in it."""
    from t5x_diffeq.training.history import FILE

    def began(path: AnyPath) -> bool:
        return (path / FILE).exists() or is_run(path)

    if began(folder):
        return [folder]
    workdirs = [path for path in sorted(folder.iterdir()) if began(path)] if folder.is_dir() else []
    if not workdirs:
        raise InputError(
            f"--workdir={folder}: neither it nor a folder in it holds a run ({FILE} or "
            f"{CONFIG_FILE}); name the --workdir of a training"
        )
    return workdirs


def _lines_of_run(run: "RunStatus") -> list[str]:
    title = f"{run.workdir}: {run.state} at step {run.step}"
    if not run.attempts:
        if run.state == "converted":
            return [f"{run.workdir}: converted, and not trained since"]
        why = "it has no history.jsonl, so where its time went is unknown"
        return [f"{title}; {why}", _losses_of(run)]
    lines = [f"{title} of {run.attempts[-1].total_steps}{_end_of(run)}", _losses_of(run)]
    lines += _table_of_attempts(run)
    if run.spikes:
        lines.append(f"spikes: {run.spikes}, rollbacks: {run.rollbacks}")
    wall = goodput.wall_seconds(run.attempts)
    return [*lines, f"goodput {goodput.goodput(run.attempts):.1%} of {format_duration(wall)}"]


def _losses_of(run: "RunStatus") -> str:
    """`validation loss 7.6501 -> 3.8102, lowest 3.8102 at step 300`."""
    if not run.losses:
        return "no evaluation is recorded"
    losses, bits = run.losses, run.bits_per_byte
    curve, lowest = list(losses.values()), min(losses, key=losses.__getitem__)
    return (
        f"validation loss {curve[0]:.4f} -> {curve[-1]:.4f}, lowest {losses[lowest]:.4f} at step "
        f"{lowest}{'' if bits is None else f'; {bits:.4f} bits per byte'}"
    )


def _end_of(run: "RunStatus") -> str:
    """`, 1:02:03 left, until 2026-01-31 14:05`; empty if that isn't known."""
    if run.seconds_left is None:
        return ""
    end = time.strftime("%Y-%m-%d %H:%M", time.localtime(run.now + run.seconds_left))
    return f", {format_duration(run.seconds_left)} left, until {end}"


def _table_of_attempts(run: "RunStatus") -> list[str]:
    """A line per attempt and one for all; columns in which nothing happened are left out."""
    total = goodput.total_columns(run.attempts)
    shown = [name for name in goodput.COLUMNS if total[name] >= 0.5]
    lines = [["began", "steps", *shown, "ended"]]
    for each in run.attempts:
        began = time.strftime("%Y-%m-%d %H:%M", time.localtime(each.began))
        cells = [format_duration(each.columns()[name]) for name in shown]
        lines.append([began, f"{each.first} to {each.last}", *cells, each.error or "normally"])
    cells = [format_duration(total[name]) for name in shown]
    lines.append(["all", f"0 to {run.step}", *cells, ""])
    return align(lines, left=(0, 1, len(shown) + 2))


def _table_of_runs(runs: "list[RunStatus]") -> list[str]:
    from t5x_diffeq.checkpoints.workdir import short_names

    lines = [["run", "state", "step", "loss", "lowest", "bits/byte", "goodput", "time", "left"]]
    for name, run in zip(short_names([run.workdir for run in runs]), runs, strict=True):
        losses, bits = list(run.losses.values()), run.bits_per_byte
        attempts = run.attempts
        wall = goodput.wall_seconds(attempts) if attempts else 0.0
        lines.append(
            [
                name,
                run.state,
                f"{run.step}/{attempts[-1].total_steps}" if attempts else str(run.step),
                f"{losses[-1]:.4f}" if losses else "-",
                f"{min(losses):.4f}" if losses else "-",
                "-" if bits is None else f"{bits:.4f}",
                f"{goodput.goodput(attempts):.1%}" if attempts else "-",
                format_duration(wall) if attempts else "-",
                format_duration(run.seconds_left) if run.seconds_left is not None else "-",
            ]
        )
    return align(lines, left=(0, 1))
