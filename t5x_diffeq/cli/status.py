"""Shows the progress of a run, or of several: --workdir=DIR, which may be repeated.

Prints its step, its losses, how each attempt spent its time, its goodput, and when it will finish;
with --json one JSON object per run instead. --plot=FILE draws the losses of all runs in one figure.
It changes nothing in a run, even while the run trains.
"""

import json
import time
from dataclasses import dataclass
from functools import cached_property

from t5x_diffeq.cli import flag_values
from t5x_diffeq.cli.verb_flags import VerbFlags
from t5x_diffeq.system.console import align, format_duration, print_result
from t5x_diffeq.system.errors import InputError
from t5x_diffeq.system.extras import need_package
from t5x_diffeq.system.files import AnyPath, parse_path
from t5x_diffeq.training import goodput

_LOSS, _BITS = "eval/loss", "eval/bits_per_byte"
_SECONDS_OF_SILENCE = 600  # after which a run that never said that it ended may have been killed

FLAGS = VerbFlags(__name__)
_WORKDIR = FLAGS.define_texts(
    "workdir",
    "Folder of a run, or of several runs' folders, here or in a bucket; may be repeated.",
)
_JSON = FLAGS.define_switch("json", "Print a JSON object per run.")
_PLOT = FLAGS.define_plot("training and validation losses over optimizer steps")


def main() -> None:
    """Runs the verb."""
    folders, now = flag_values.parse_folders(_WORKDIR, "status"), time.time()
    flag_values.check_plot(_PLOT)
    if _PLOT.value:
        need_package("matplotlib", "--plot", "leave it out")
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
    """The folder, if it is that of a run, else the runs' folders in it."""
    from t5x_diffeq.checkpoints.identity import CONFIG_FILE
    from t5x_diffeq.training.history import FILE  # importing JAX takes seconds

    def is_run(path: AnyPath) -> bool:
        return (path / FILE).exists() or (path / CONFIG_FILE).exists()

    if is_run(folder):
        return [folder]
    found = [path for path in sorted(folder.iterdir()) if is_run(path)] if folder.is_dir() else []
    if not found:
        raise InputError(
            f"--workdir={folder}: neither it nor a folder in it holds a run ({FILE} or "
            f"{CONFIG_FILE}); name the --workdir of a training"
        )
    return found


@dataclass(frozen=True)
class RunStatus:
    """What the files of a run say at some time."""

    workdir: AnyPath
    now: float  # seconds since 1970

    @cached_property
    def events(self) -> list:
        """The events of its history."""
        from t5x_diffeq.training.history import read_events

        return read_events(self.workdir)

    @cached_property
    def attempts(self) -> list[goodput.Attempt]:
        """Its attempts, oldest first; none if it is older than histories."""
        return goodput.attempts_of(self.events)

    @cached_property
    def evaluations(self) -> dict[int, dict[str, float]]:
        """The lines of its evaluations by step, in the order of the steps."""
        from t5x_diffeq.training.tracking.jsonl import read_metrics

        lines = {int(line["step"]): line for line in read_metrics(self.workdir, _LOSS)}
        return {step: lines[step] for step in sorted(lines)}

    @property
    def losses(self) -> dict[int, float]:
        """Its evaluation losses by step, in the order of the steps."""
        return {step: line[_LOSS] for step, line in self.evaluations.items()}

    @property
    def bits_per_byte(self) -> float | None:
        """Its bits per byte at the last evaluation, if that has them."""
        last = list(self.evaluations.values())[-1:]
        return last[0].get(_BITS) if last else None

    @property
    def step(self) -> int:
        """The last step that is known to be done."""
        from t5x_diffeq.checkpoints.checkpoint_folder import whole_steps

        if self.attempts:
            return self.attempts[-1].last
        return max([*self.losses, *whole_steps(self.workdir / "checkpoints")], default=0)

    @property
    def state(self) -> str:
        """`done`, `running`, `stopped`, `failed (...)`, `silent for ...` or `converted`."""
        if not self.attempts:
            is_new = (self.workdir / "checkpoints" / "0").exists()  # which training doesn't save
            return "converted" if is_new else "unknown"
        last = self.attempts[-1]
        if last.error == goodput.UNKNOWN:
            silence = self.now - last.last_event
            is_long = silence > _SECONDS_OF_SILENCE
            return f"silent for {format_duration(silence)}" if is_long else "running"
        if last.error:
            return f"failed ({last.error})"
        return "done" if last.last >= last.total_steps else "stopped"

    @property
    def seconds_left(self) -> float | None:
        """The estimated time left; None if it isn't running, or has no pace yet."""
        return goodput.seconds_left(self.attempts[-1]) if self.state == "running" else None

    @property
    def spikes(self) -> int:
        """The number of spikes; one that recurs after a restart counts once."""
        counts = [each["count"] for each in self.events if each["event"] == "spike"]
        return counts[-1] if counts else 0

    @property
    def rollbacks(self) -> int:
        """How many rollbacks they caused."""
        return len({each["count"] for each in self.events if each["event"] == "rollback"})

    def facts(self) -> dict[str, object]:
        """Everything as one JSON object; times in seconds."""
        losses = self.losses
        facts: dict[str, object] = {
            "workdir": str(self.workdir),
            "state": self.state,
            "step": self.step,
            "loss": list(losses.values())[-1] if losses else None,
            "lowest": min(losses.values()) if losses else None,
            "bits_per_byte": self.bits_per_byte,
        }
        if self.attempts:
            facts |= {
                "total_steps": self.attempts[-1].total_steps,
                "goodput": goodput.goodput(self.attempts),
                "seconds": goodput.total_columns(self.attempts),
                "attempts": [each.columns() for each in self.attempts],
                "spikes": self.spikes,
                "rollbacks": self.rollbacks,
                "seconds_left": self.seconds_left,
            }
        return facts


def _lines_of_run(run: RunStatus) -> list[str]:
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


def _losses_of(run: RunStatus) -> str:
    """`validation loss 7.6501 -> 3.8102, lowest 3.8102 at step 300`."""
    if not run.losses:
        return "no evaluation is recorded"
    losses, bits = run.losses, run.bits_per_byte
    curve, lowest = list(losses.values()), min(losses, key=losses.__getitem__)
    return (
        f"validation loss {curve[0]:.4f} -> {curve[-1]:.4f}, lowest {losses[lowest]:.4f} at step "
        f"{lowest}{'' if bits is None else f'; {bits:.4f} bits per byte'}"
    )


def _end_of(run: RunStatus) -> str:
    """`, 1:02:03 left, until 2026-01-31 14:05`; empty if that isn't known."""
    if run.seconds_left is None:
        return ""
    end = time.strftime("%Y-%m-%d %H:%M", time.localtime(run.now + run.seconds_left))
    return f", {format_duration(run.seconds_left)} left, until {end}"


def _table_of_attempts(run: RunStatus) -> list[str]:
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


def _table_of_runs(runs: list[RunStatus]) -> list[str]:
    from t5x_diffeq.checkpoints.workdir import short_names

    lines = [["run", "state", "step", "loss", "lowest", "bits/byte", "goodput", "time", "left"]]
    for name, run in zip(short_names([run.workdir for run in runs]), runs, strict=True):
        losses, bits = list(run.losses.values()), run.bits_per_byte
        known = run.attempts
        wall = goodput.wall_seconds(known) if known else 0.0
        lines.append(
            [
                name,
                run.state,
                f"{run.step}/{known[-1].total_steps}" if known else str(run.step),
                f"{losses[-1]:.4f}" if losses else "-",
                f"{min(losses):.4f}" if losses else "-",
                "-" if bits is None else f"{bits:.4f}",
                f"{goodput.goodput(known):.1%}" if known else "-",
                format_duration(wall) if known else "-",
                format_duration(run.seconds_left) if run.seconds_left is not None else "-",
            ]
        )
    return align(lines, left=(0, 1))
