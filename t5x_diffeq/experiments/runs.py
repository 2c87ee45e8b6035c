"""Runs of an experiment: each is a command, done once; its outcome is a line of `results.jsonl`."""

import fcntl
import json
import os
import re
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from os import SEEK_END
from pathlib import Path
from statistics import mean
from typing import Any

from t5x_diffeq.checkpoints.workdir import read_config
from t5x_diffeq.cluster.peers import EXIT_INFRASTRUCTURE
from t5x_diffeq.experiments import same_data
from t5x_diffeq.experiments.commands import Commands
from t5x_diffeq.system import json_lines
from t5x_diffeq.system.console import Progress, format_duration, log
from t5x_diffeq.system.errors import InfrastructureError, InputError, RunError
from t5x_diffeq.system.files import make_folder, parse_json_object
from t5x_diffeq.system.foreign_files import open_inside, read_inside
from t5x_diffeq.system.growing_file import GrowingFile
from t5x_diffeq.system.json_lines import NUMBER
from t5x_diffeq.training.tracking.jsonl import read_metrics

_REFUSED = 2  # the status of an `InputError`
_RESULTS = "results.jsonl"
_BITS, _RATE = "eval/bits_per_byte", "train/tokens_per_second"
_TRAINING = ("train", "finetune")
# In the last line of a training that diverged.
_NOT_FINITE = re.compile(r"\bis (nan|-?inf)\b|^error: spike at step")
# The content of outcomes: numbers that a training has measured, and values of other verbs.
_LOSSES = ("first", "loss", "perplexity", "lowest")
_OTHER_NUMBERS = ("seconds", "bits_per_byte", "tokens_per_second", "training_seconds")
_VALUES = (str, int, float, bool, list, type(None))
_WAY_OUT = "delete the line, and the same command does its run again; or restore the file"
_TAIL = 4096  # bytes at the end of a log, which hold the last steps
Label = str | int | float


@dataclass(frozen=True)
class ExperimentRun:
    """A command of an experiment."""

    name: str  # name of the run, and of its workdir if it has one
    verb: str  # the verb that it calls, or the module of a study
    # arguments of the verb; `{output}` stands for the experiment's folder
    arguments: tuple[str, ...]
    # where its outcome stands in tables and figures
    labels: dict[str, Label] = field(default_factory=dict)
    needs: str | None = None  # the name of a run that must come before it, in the same part

    def command(self, output: Path) -> list[str]:
        """The words of the command; `output` is the experiment's folder."""
        workdir = [f"--workdir={output / self.name}"] if self.verb in _TRAINING else []
        arguments = [argument.replace("{output}", str(output)) for argument in self.arguments]
        module = self.verb if "." in self.verb else f"t5x_diffeq.{self.verb}"
        return [sys.executable, "-m", module, *workdir, *arguments]


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
    chosen = list(dict.fromkeys(roots.values()))[part::parts]
    return [run for run in runs if roots[run.name] in chosen]


def read_results(output: Path) -> dict[str, dict]:
    """Outcomes by the name of their run; an incomplete last line is ignored.

    A run that failed and was done later counts as done.

    Raises:
      InputError: if a line is damaged, or two lines say that the same run is done; names the line.
    """
    outcomes: dict[str, dict] = {}
    places: dict[str, str] = {}
    for path in sorted(output.glob("results*.jsonl")):
        for number, outcome in json_lines.read_json_lines(path, _check_outcome, _WAY_OUT):
            name, place = outcome["run"], f"{path}, line {number}"
            if "failed" in outcomes.get(name, {"failed": ""}):
                outcomes[name], places[name] = outcome, place
            elif "failed" not in outcome:
                raise InputError(
                    f"{place}: run {name} was done before, see {places[name]}; delete one of the "
                    "two lines"
                )
    return outcomes


def _check_outcome(outcome: dict[str, Any]) -> None:
    texts = ("verb", "diverged", "failed", "page", same_data.FINGERPRINT, same_data.DATA_KEYS)
    scores = [key for key in outcome if key.startswith(("eval/", "tasks/"))]
    types = {
        **dict.fromkeys(outcome, _VALUES),
        **dict.fromkeys(texts, (str,)),
        **dict.fromkeys((*_LOSSES, *_OTHER_NUMBERS, *scores), NUMBER),
        "arguments": (list,),
    }
    has_loss = outcome.get("verb") in _TRAINING and not outcome.keys() & {"diverged", "failed"}
    needed = {"run": (str,), "verb": (str,), "seconds": NUMBER}
    needed |= dict.fromkeys(_LOSSES, NUMBER) if has_loss else {}
    json_lines.check_types(outcome, {key: types[key] for key in types if key in outcome} | needed)


def carry_out(
    runs: Sequence[ExperimentRun], output: Path, results: str = _RESULTS, go_on: bool = False
) -> None:
    """Carries out the runs that have no outcome yet, one after the other.

    A run whose loss was not finite has `diverged`, which is an outcome. Runs that need it are not
    carried out, and have diverged, too: an earlier checkpoint says nothing of the training's end.

    Args:
      go_on: whether to continue when a run fails otherwise. Its outcome is then `failed`, and the
        same command retries it.

    Raises:
      InputError: if the folder can't be written; if a run is refused, unless `go_on`; or if a
        training's data differs from the data that the same keys named for an earlier training.
      RunError: if a run fails, unless `go_on`; names the run.
      InfrastructureError: if the infrastructure fails during a run; the same command continues with
        this run.
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
            done |= finished(read_results(output))  # also of other parts: their data is compared
            left = time_left(runs[number - 1 :], done)
            log(f"{number} of {len(runs)}: {run.name} (log: {output / run.name}.log){left}")
            outcome = _outcome_of(run, output, commands, go_on, done)
            add_outcome(output / results, outcome)
            if "failed" not in outcome:
                done[run.name] = outcome
            log(f"  {_describe_outcome(outcome)} after {format_duration(outcome['seconds'])}")


def finished(outcomes: Mapping[str, dict]) -> dict[str, dict]:
    """The outcomes of runs that need no retry."""
    return {name: outcome for name, outcome in outcomes.items() if "failed" not in outcome}


def _outcome_of(
    run: ExperimentRun, output: Path, commands: Commands, go_on: bool, done: Mapping[str, dict]
) -> dict:
    """Carries out a run, unless what it needs has diverged; returns its outcome."""
    began = time.perf_counter()
    if run.needs and "diverged" in done.get(run.needs, {}):
        numbers = {"diverged": f"{run.needs} diverged"}
    else:
        numbers = _carry_out_one(run, output, commands, go_on, done)
    outcome: dict[str, Any] = {"run": run.name, "verb": run.verb, **run.labels}
    seconds = time.perf_counter() - began
    return {**outcome, "seconds": seconds, "arguments": run.arguments, **numbers}


def _carry_out_one(
    run: ExperimentRun, output: Path, commands: Commands, go_on: bool, done: Mapping[str, dict]
) -> dict:
    """Carries out a run, with its messages in a log; returns its numbers, or how it ended."""
    log_file = output / f"{run.name}.log"
    with Progress(run.name, unit="steps") as progress:

        def watch() -> None:
            if steps := steps_done(log_file):
                progress.update(*steps)
            if run.verb in _TRAINING:
                same_data.check_same_data(output / run.name, done)

        status, printed = commands.run(run.command(output), log_file, watch)
    if status == 0:
        return read_numbers(run, output, printed)
    lines = read_inside(log_file).decode("utf-8", "replace").strip().splitlines()
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
    return {"diverged" if diverged else "failed": reason}


def steps_done(log_file: Path) -> tuple[int, int] | None:
    """The optimizer steps that the log of a training last reported, and how many it will take."""
    with open_inside(log_file) as file:
        file.seek(max(0, file.seek(0, SEEK_END) - _TAIL))
        matches = re.findall(rb"^step +(\d+)/(\d+) ", file.read(), re.MULTILINE)
    return (int(matches[-1][0]), int(matches[-1][1])) if matches else None


def time_left(runs: Sequence[ExperimentRun], done: dict[str, dict]) -> str:
    """The estimated time of the remaining runs, from the mean time of each verb; else empty."""
    left = [run for run in runs if run.name not in done]
    taken: dict[str, list[float]] = {run.verb: [] for run in left}
    for outcome in done.values():
        if outcome["verb"] in taken:
            taken[outcome["verb"]].append(outcome["seconds"])
    if not all(taken.values()):
        return ""
    seconds = sum(sum(taken[run.verb]) / len(taken[run.verb]) for run in left)
    return f", about {format_duration(seconds)} left for all"


def _describe_differences(run: ExperimentRun, outcome: dict) -> str:
    """How the arguments of an outcome differ from the run's current arguments, if they do."""
    earlier = outcome.get("arguments", run.arguments)
    changed = [each for each in earlier if each not in run.arguments]
    return f", with {' '.join(changed)}" if changed else ""


def read_numbers(run: ExperimentRun, output: Path, printed: str) -> dict:
    """The numbers of an outcome: a training's last evaluation, or what another verb printed.

    If the verb printed several lines, each with a name, a key is `name: key`. If `evaluate` printed
    a line for each number of solver steps, the numbers are their losses (`12 steps`) and the mean
    of these (`loss`).
    """
    if run.verb not in _TRAINING:
        lines = [parse_json_object(line) for line in printed.splitlines() if line.startswith("{")]
        if run.verb == "analyze":  # the last line that it prints is its page's path
            return {"page": printed.splitlines()[-1], **(lines[0] if lines else {})}
        if len(lines) == 1:
            return lines[0]
        if run.verb == "evaluate":
            losses = {f"{line['num_steps']} steps": line["eval/loss"] for line in lines}
            return {"loss": mean(losses.values()), **losses}
        return {f"{line['name']}: {key}": line[key] for line in lines for key in line}
    workdir = output / run.name
    # Whoever started the training has named the plug-ins that it ran.
    config = read_config(workdir, trust_plugins=True)
    tokens = config.train.batch_size * config.data.sequence_length
    evaluations = list(read_metrics(workdir, "eval/loss"))
    rates = {line["step"]: line[_RATE] for line in read_metrics(workdir, _RATE)}
    if not (evaluations and rates):
        raise RunError(f"run {run.name} is done, but {workdir} has lost its metrics; delete it")
    first, last = evaluations[0], evaluations[-1]
    bits = {"bits_per_byte": last[_BITS]} if _BITS in last else {}
    return {
        "first": first["eval/loss"],
        "loss": last["eval/loss"],
        "perplexity": last["eval/perplexity"],
        "lowest": min(line["eval/loss"] for line in evaluations),
        **bits,
        "tokens_per_second": sorted(rates.values())[len(rates) // 2],
        "training_seconds": training_seconds(rates, tokens),
        **same_data.data_facts(workdir),
    }


def training_seconds(rates: Mapping[float, float], tokens: int) -> float:
    """The seconds of the optimizer steps alone; `rates` are tokens/s by step, `tokens` per step."""
    spans = zip(rates, (0, *rates), strict=False)
    return sum((step - before) * tokens / rates[step] for step, before in spans)


def _describe_outcome(outcome: dict) -> str:
    for how in ("diverged", "failed"):
        if how in outcome:
            return f"{how}: {outcome[how]}"
    if "loss" not in outcome:
        return "done"
    first = f"{outcome['first']:.4f} -> " if "first" in outcome else ""  # training's alone
    return f"loss {first}{outcome['loss']:.4f}"


def add_outcome(path: Path, outcome: dict[str, Any]) -> None:
    """Appends an outcome, on disk before the next run begins, in place of an incomplete line."""
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)  # another experiment may add to the same file
        kept = json_lines.end_of_whole_lines(path)
        GrowingFile(path, kept).write(f"{json.dumps(outcome)}\n".encode())
    finally:
        os.close(folder)
