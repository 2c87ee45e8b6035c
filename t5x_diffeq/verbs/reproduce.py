"""An experiment of the paper: its runs, its tables and its figures."""

import json
import re
import shlex

from absl.flags import FlagValues

from t5x_diffeq.data.sources import SOURCES, WITHOUT_PATH
from t5x_diffeq.experiments.child import StoppedError
from t5x_diffeq.experiments.drawing import draw
from t5x_diffeq.experiments.experiment import Experiment
from t5x_diffeq.experiments.laptop import LAPTOP
from t5x_diffeq.experiments.paper import PAPER
from t5x_diffeq.experiments.present import add_task_scores, format_markdown
from t5x_diffeq.experiments.runs import (
    ExperimentRun,
    carry_out,
    part_of,
    read_results,
)
from t5x_diffeq.experiments.tokenizers import KEY, OWN, check_tokenizer_files, remark
from t5x_diffeq.runtime.console import say
from t5x_diffeq.runtime.errors import InputError
from t5x_diffeq.runtime.files import AnyPath, files_matching, parse_path, write_whole

SCALES = {"laptop": LAPTOP, "paper": PAPER}


def texts(flags: FlagValues) -> dict[str, dict[str, object]]:
    """The keys of the config for each text, by the text's name.

    Raises:
      InputError: if a --text flag is malformed, repeats a name, or names no known source or file.
    """
    keys_by_text = {}
    for given in flags.text:
        name, _, where = given.partition("=")
        source, colon, path = where.partition(":")
        if not colon:
            source, path = (name, "") if name in WITHOUT_PATH else ("text_files", where)
        if not re.fullmatch(r"\w+", name) or (not path and source not in WITHOUT_PATH):
            alone = " or ".join(WITHOUT_PATH)
            raise InputError(f"--text={given} is not NAME=PATH, NAME=SOURCE:PATH, or {alone} alone")
        if name in keys_by_text:
            raise InputError(f"--text={given}: the name {name} is used twice")
        if source not in (*SOURCES, "tokens"):
            raise InputError(
                f"--text={given}: {source!r} is unknown; there are {', '.join(SOURCES)}, tokens"
            )
        keys_by_text[name] = {"data.source": source, **({"data.path": path} if path else {})}
        if flags.scale == "paper" and source != "tokens" and flags.tokenizers != OWN:
            keys_by_text[name][KEY] = f"{flags.tokenizers}/{{tokenizer_file}}"
    for name, keys in keys_by_text.items():
        if keys["data.source"] == "text_files":
            _check_text(name, keys["data.path"])
    return keys_by_text


def _check_text(name: str, path: str) -> None:
    file = parse_path(path, f"--text={name}")
    if not (file.exists() or files_matching(file)):
        raise InputError(f"--text={name}={path}: there is no such file or folder; check the path")


def _seeds_of(experiment: Experiment, seeds: int | None) -> range:
    if seeds is not None and seeds < 1:
        raise InputError(f"--seeds={seeds} must be at least 1")
    return range(seeds or experiment.seeds)


def _remaining_runs(runs: list[ExperimentRun], output: AnyPath) -> list[ExperimentRun]:
    done = read_results(output)
    return [run for run in runs if run.name not in done]


def present(
    experiment: Experiment,
    runs: list[ExperimentRun],
    output: AnyPath,
    folder: AnyPath,
    caveats: list[str],
) -> None:
    """Prints the tables; writes tables, figures and the outcomes that they show to `folder`.

    Args:
      experiment: the experiment.
      runs: all of its runs, which are done.
      output: the folder of the runs.
      folder: the folder to write to.
      caveats: paragraphs on why the numbers don't compare with the paper's; figures then say so.
    """
    folder.mkdir(parents=True, exist_ok=True)
    done = read_results(output)
    # An outcome may come from another experiment, so it is given this one's labels.
    every = [{**done[run.name], **run.labels} for run in runs]
    outcomes = add_task_scores([each for each, run in zip(every, runs, strict=True) if run.labels])
    tables = [f"{each.value}\n\n{format_markdown(outcomes, each)}" for each in experiment.tables]
    notes = [*experiment.notes(every, output), *caveats]
    write_whole(folder / "tables.md", "\n\n".join([*tables, *notes, ""]).encode())
    write_whole(folder / "outcomes.json", json.dumps(outcomes, indent=1).encode())
    for number, table in enumerate(experiment.tables, 1):
        draw(outcomes, table, folder / f"figure{number}", output, comparable=not caveats)
    print(*tables, *notes, sep="\n\n")


def reproduce(
    name: str, experiment: Experiment, output: AnyPath, part: tuple[int, int], flags: FlagValues
) -> int:
    """Carries out the runs of an experiment, then presents them; returns the exit status.

    Args:
      name: the experiment's name, that of the folder of its tables and figures.
      experiment: the experiment.
      output: the folder of the runs.
      part: (i, n), the i-th of n parts of the runs.
      flags: the verb's flags.
    """
    of_texts, seeds, (i, n) = texts(flags), _seeds_of(experiment, flags.seeds), part
    runs = experiment.runs(of_texts, seeds, read_results(output))
    if flags.dry_run:
        print(*(shlex.join(run.command(output)) for run in part_of(runs, i, n)), sep="\n")
        return 0
    check_tokenizer_files(runs)
    results = "results.jsonl" if n == 1 else f"results-{i}.jsonl"
    while _remaining_runs(runs, output):
        try:
            carry_out(part_of(runs, i, n), output, results)
        except StoppedError as stopped:
            done = read_results(output)
            if shown := [run for run in runs if run.name in done]:
                present(experiment, shown, output, output / name, [])
            say(f"stopped, saved; {len(shown)} runs are done; the same command continues")
            return stopped.status
        if others := _remaining_runs(runs, output):
            say(
                f"this part is done; {len(others)} runs of other parts are not; once they are, the "
                "same command makes tables and figures"
            )
            return 0
        runs = experiment.runs(of_texts, seeds, read_results(output))  # a sweep adds runs
    caveats = remark(runs, output) if flags.scale == "paper" else []
    present(experiment, runs, output, output / name, caveats)
    return 0
