"""Runs of an experiment: commands, each run once, with its outcome a line of `results.jsonl`."""

import json
import re
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from os import SEEK_END
from pathlib import Path
from typing import Any

from t5x_diffeq.checkpoints.workdir import read_config
from t5x_diffeq.cluster.peers import EXIT_INFRASTRUCTURE
from t5x_diffeq.experiments.commands import Commands
from t5x_diffeq.experiments.same_data import check_same_data, data_facts
from t5x_diffeq.system.console import Progress, format_duration, log
from t5x_diffeq.system.errors import InfrastructureError, InputError, RunError
from t5x_diffeq.system.files import make_folder, write_whole

_REFUSED = 2  # the status of an `InputError`
_RESULTS = "results.jsonl"
_BITS = "eval/bits_per_byte"
_TRAINING = ("train", "finetune")
# What a training that diverges ends with.
_NOT_FINITE = re.compile(r"\bis (nan|-?inf)\b|^error: spike at step")
_TAIL = 4096  # bytes at the end of a log, which hold the last steps
Label = str | int | float


@dataclass(frozen=True)
class ExperimentRun:
    """A command of an experiment."""

    name: str  # name of the run, and of its workdir if it has one
    verb: str  # the verb that it calls
    # arguments of the verb; `{output}` stands for the experiment's folder
    arguments: tuple[str, ...]
    # where its outcome stands in tables and figures
    labels: dict[str, Label] = field(default_factory=dict)
    needs: str | None = None  # the name of a run that must come before it, in the same part

    def command(self, output: Path) -> list[str]:
        """The whole command."""
        workdir = [f"--workdir={output / self.name}"] if self.verb in _TRAINING else []
        arguments = [argument.replace("{output}", str(output)) for argument in self.arguments]
        return [sys.executable, "-m", f"t5x_diffeq.{self.verb}", *workdir, *arguments]


def name_choices(values: Mapping[str, object]) -> list[str]:
    """The words for some keys of a config in a run's name: `learning_rate=0.001`."""
    last = {key: key.rpartition(".")[2] for key in values}
    unique = len(set(last.values())) == len(last)
    words = []
    for key, value in values.items():
        text = "+".join(map(str, value)) if isinstance(value, tuple | list) else str(value)
        file_name = re.sub(r"[/\s]", "_", text)
        words.append(f"{last[key] if unique else key}={file_name}")
    return words


def format_flags(values: Mapping[str, object]) -> tuple[str, ...]:
    """`--config.KEY=VALUE` for each value."""
    return tuple(f"--config.{key}={value}" for key, value in values.items())


def part_of(runs: Sequence[ExperimentRun], part: int, parts: int) -> list[ExperimentRun]:
    """The runs of one of several parts; a run and all runs that need it stay together."""
    roots: dict[str, str] = {}  # by a run's name, the first run of its chain
    for run in runs:
        roots[run.name] = roots[run.needs] if run.needs else run.name
    mine = list(dict.fromkeys(roots.values()))[part::parts]
    return [run for run in runs if roots[run.name] in mine]


def read_results(output: Path) -> dict[str, dict]:
    """Outcomes by the name of their run; an incomplete last line is ignored.

    A run that failed and was done later counts as done.
    """
    outcomes: dict[str, dict] = {}
    for path in sorted(output.glob("results*.jsonl")):
        for line in path.read_bytes().splitlines(keepends=True):
            if line.endswith(b"\n"):
                outcome = json.loads(line)
                if "failed" not in outcome or "failed" in outcomes.get(outcome["run"], outcome):
                    outcomes[outcome["run"]] = outcome
    return outcomes


def carry_out(
    runs: Sequence[ExperimentRun], output: Path, results: str = _RESULTS, go_on: bool = False
) -> None:
    """Carries out the runs that have no outcome yet, one after the other.

    A run whose loss was not finite has `diverged`, which is an outcome.

    Args:
      go_on: whether to continue when a run fails otherwise. Its outcome is then `failed`, and the
        same command retries it.

    Raises:
      InputError: if the folder can't be written; if a run is refused, unless `go_on`; or if a
        training's data isn't that of earlier ones which name the same.
      RunError: if a run fails, naming it and its log, unless `go_on`.
      InfrastructureError: if it failed under a run; the same command continues with that run.
      StoppedError: if a run was stopped and saved.
    """
    make_folder(output, "--output")
    done = finished(read_results(output))
    with Commands() as commands:
        for number, run in enumerate(runs, 1):
            if run.name in done:
                log(
                    f"{number} of {len(runs)}: {run.name} is "
                    f"done{_describe_differences(run, done[run.name])}"
                )
                continue
            commands.check()
            done |= finished(read_results(output))  # of the other parts, whose data is compared
            left = time_left(runs[number - 1 :], done)
            log(f"{number} of {len(runs)}: {run.name} (log: {output / run.name}.log){left}")
            outcome = _outcome_of(run, output, commands, go_on, done)
            _add_line(output / results, outcome)
            if "failed" not in outcome:
                done[run.name] = outcome
            log(f"  {_describe_outcome(outcome)} after {format_duration(outcome['seconds'])}")


def finished(outcomes: Mapping[str, dict]) -> dict[str, dict]:
    """The outcomes of runs that need no retry."""
    return {name: outcome for name, outcome in outcomes.items() if "failed" not in outcome}


def _outcome_of(
    run: ExperimentRun, output: Path, commands: Commands, go_on: bool, done: Mapping[str, dict]
) -> dict:
    """Carries out a run, with its messages in a log; returns its outcome."""
    began, log_file = time.perf_counter(), output / f"{run.name}.log"
    with Progress(run.name, unit="steps") as progress:

        def watch() -> None:
            if steps := steps_done(log_file):
                progress.update(*steps)
            if run.verb in _TRAINING:
                check_same_data(output / run.name, done)

        status, printed = commands.run(run.command(output), log_file, watch)
    if status == 0:
        numbers = read_numbers(run, output, printed)
    else:
        lines = log_file.read_text("utf-8", errors="replace").strip().splitlines()
        line = lines[-1] if lines else f"{log_file} is empty"
        reason = line.removeprefix("error: ")
        if status == EXIT_INFRASTRUCTURE:
            raise InfrastructureError(f"run {run.name}: {reason}")
        if status == _REFUSED and not go_on:
            raise InputError(f"run {run.name}: {reason}")
        diverged = _NOT_FINITE.search(line) is not None
        if not (diverged or go_on):
            raise RunError(
                f"run {run.name} failed with status {status}: {line}; the same command again "
                "continues with it"
            )
        numbers = {"diverged" if diverged else "failed": reason}
    outcome: dict[str, Any] = {"run": run.name, "verb": run.verb, **run.labels}
    seconds = time.perf_counter() - began
    return {**outcome, "seconds": seconds, "arguments": run.arguments, **numbers}


def steps_done(log_file: Path) -> tuple[int, int] | None:
    """The optimizer steps that the log of a training last reported, and how many it will take."""
    with log_file.open("rb") as words:
        words.seek(max(0, words.seek(0, SEEK_END) - _TAIL))
        matches = re.findall(rb"^step +(\d+)/(\d+) ", words.read(), re.MULTILINE)
    return (int(matches[-1][0]), int(matches[-1][1])) if matches else None


def time_left(runs: Sequence[ExperimentRun], done: dict[str, dict]) -> str:
    """An estimate for the remaining runs: each takes its verb's mean time so far."""
    left = [run for run in runs if run.name not in done]
    taken: dict[str, list[float]] = {run.verb: [] for run in left}
    for outcome in done.values():
        if (verb := outcome.get("verb")) in taken:
            taken[verb].append(outcome["seconds"])
    if not all(taken.values()):
        return ""
    seconds = sum(sum(taken[run.verb]) / len(taken[run.verb]) for run in left)
    return f", about {format_duration(seconds)} left for all"


def _describe_differences(run: ExperimentRun, outcome: dict) -> str:
    """How the arguments behind an outcome differ from the run's current ones, if they do."""
    then = outcome.get("arguments", run.arguments)
    changed = [each for each in then if each not in run.arguments]
    return f", with {' '.join(changed)}" if changed else ""


def read_numbers(run: ExperimentRun, output: Path, printed: str) -> dict:
    """The numbers of an outcome: a training's last evaluation, or what another verb printed.

    If the verb printed several lines, each with a name, a key is `name: key`.
    """
    if run.verb not in _TRAINING:
        lines = [json.loads(line) for line in printed.splitlines() if line.startswith("{")]
        if run.verb == "analyze":  # the last line that it prints is its page's path
            return {"page": printed.splitlines()[-1], **(lines[0] if lines else {})}
        if len(lines) == 1:
            return lines[0]
        return {f"{line['name']}: {key}": line[key] for line in lines for key in line}
    lines = (output / run.name / "metrics.jsonl").read_text("utf-8").splitlines()
    metrics = [json.loads(line) for line in lines]
    # Whoever started the training has named the plug-ins that it ran.
    config = read_config(output / run.name, trust_plugins=True)
    tokens = config.train.batch_size * config.data.sequence_length
    evaluations = [line for line in metrics if "eval/loss" in line]
    last = evaluations[-1]
    bits = {"bits_per_byte": last[_BITS]} if _BITS in last else {}
    rates = sorted(line["train/tokens_per_second"] for line in metrics if "train/loss" in line)
    return {
        "first": evaluations[0]["eval/loss"],
        "loss": last["eval/loss"],
        "perplexity": last["eval/perplexity"],
        "lowest": min(line["eval/loss"] for line in evaluations),
        **bits,
        "tokens_per_second": rates[len(rates) // 2],
        "training_seconds": training_seconds(metrics, tokens),
        **data_facts(output / run.name),
    }


def training_seconds(metrics: list[dict], tokens: int) -> float:
    """The time that the optimizer steps took, without start, compilation and evaluations."""
    seconds, before = 0.0, 0
    for line in metrics:
        if "train/tokens_per_second" in line:
            seconds += (line["step"] - before) * tokens / line["train/tokens_per_second"]
            before = line["step"]
    return seconds


def _describe_outcome(outcome: dict) -> str:
    for how in ("diverged", "failed"):
        if how in outcome:
            return f"{how}: {outcome[how]}"
    if "loss" in outcome:
        return f"loss {outcome['first']:.4f} -> {outcome['loss']:.4f}"
    return "done"


def _add_line(path: Path, outcome: dict) -> None:
    """Appends an outcome, which is on disk before the next run begins; drops a line cut short."""
    content = path.read_bytes() if path.exists() else b""
    whole_lines = content[: content.rfind(b"\n") + 1]
    write_whole(path, whole_lines + json.dumps(outcome).encode() + b"\n")
