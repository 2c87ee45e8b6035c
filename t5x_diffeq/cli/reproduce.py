"""Repeats an experiment of the paper: --experiment=figure5 --output=DIR --text=NAME=PATH.

Each run is done once, even if several experiments in one DIR need it, and the same command again
continues where it stopped. At the end it prints tables and writes them (tables.md) with the figures
(figure1.png, .pdf, ...) to DIR/figure5.
"""

import json
import re
import shlex
from typing import TYPE_CHECKING

from t5x_diffeq.runtime import command_line
from t5x_diffeq.runtime.console import say
from t5x_diffeq.runtime.errors import InputError
from t5x_diffeq.runtime.files import AnyPath, files_matching, parse_path, write_whole
from t5x_diffeq.runtime.keys.values import INT32
from t5x_diffeq.runtime.run_flags import VerbFlags

if TYPE_CHECKING:
    from t5x_diffeq.experiments.experiment import Experiment
    from t5x_diffeq.experiments.runs import ExperimentRun

EXPERIMENTS = (
    *("table1", "table2", "budgets", "equal_time", "ladder", "controls", "table4", "table5"),
    *("figure2", "figure3", "figure4", "figure5", "figure7", "figure8", "figure13", "figure14"),
    *("figure15", "figure18", "appendixE", "appendixF"),
)
_SCALES = ("laptop", "paper")
FLAGS = VerbFlags(__name__)
_EXPERIMENT = FLAGS.define_text("experiment", f"One of {', '.join(EXPERIMENTS)}.")
_OUTPUT = FLAGS.define_text("output", "Folder for workdirs, logs, results, tables and figures.")
_SCALE = FLAGS.define_text("scale", "Scale: laptop, or paper for the paper's sizes.", "laptop")
_TEXT = FLAGS.define_texts(
    "text",
    "NAME=PATH of a text, or NAME=SOURCE:PATH with a SOURCE of data.source; may be repeated. "
    "In PATH, {tokenizer} stands for gpt2 or llama.",
)
_SEEDS = FLAGS.define_integer(
    "seeds",
    "Number of seeds per training. [default: 3 at laptop scale, 1 at paper scale]",
    None,
    1,
    INT32,
)
_TOKENIZERS = FLAGS.define_text(
    "tokenizers",
    "At paper scale: the folder with the paper's tokenizers, gpt2.json and llama.model, or 'own' "
    "to train tokenizers on the text.",
    "tokenizers",
)
_PART = FLAGS.define_part()
_DRY_RUN = FLAGS.define_dry_run()


def main() -> int:
    """Runs the verb."""
    if _SCALE.value not in _SCALES:
        raise InputError(f"--scale={_SCALE.value} must be laptop or paper")
    if _EXPERIMENT.value not in EXPERIMENTS:
        raise InputError(f"--experiment={_EXPERIMENT.value} must be {', '.join(EXPERIMENTS)}")
    output, (i, n) = command_line.parse_folder(_OUTPUT, "reproduce"), command_line.parse_part(_PART)

    from t5x_diffeq.experiments.child import StoppedError  # importing JAX takes seconds
    from t5x_diffeq.experiments.laptop import LAPTOP
    from t5x_diffeq.experiments.paper import PAPER
    from t5x_diffeq.experiments.runs import carry_out, part_of, read_results
    from t5x_diffeq.experiments.tokenizers import check_tokenizer_files, remark

    experiment = {"laptop": LAPTOP, "paper": PAPER}[_SCALE.value][_EXPERIMENT.value]
    of_texts, seeds = _texts(), range(_SEEDS.value or experiment.seeds)
    runs = experiment.runs(of_texts, seeds, read_results(output))
    if _DRY_RUN.value:
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
                present(experiment, shown, output, output / _EXPERIMENT.value, [])
            say(f"stopped, saved; {len(shown)} runs are done; the same command continues")
            return stopped.status
        if others := _remaining_runs(runs, output):
            say(
                f"this part is done; {len(others)} runs of other parts are not; once they are, the "
                "same command makes tables and figures"
            )
            return 0
        runs = experiment.runs(of_texts, seeds, read_results(output))  # a sweep adds runs
    caveats = remark(runs, output) if _SCALE.value == "paper" else []
    present(experiment, runs, output, output / _EXPERIMENT.value, caveats)
    return 0


def _texts() -> dict[str, dict[str, object]]:
    """The keys of the config for each text, by the text's name.

    Raises:
      InputError: if a --text flag is malformed, repeats a name, or names no known source or file.
    """
    from t5x_diffeq.data.sources import SOURCES, WITHOUT_PATH
    from t5x_diffeq.experiments.tokenizers import KEY, OWN

    keys_by_text = {}
    for given in _TEXT.value:
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
        if _SCALE.value == "paper" and source != "tokens" and _TOKENIZERS.value != OWN:
            keys_by_text[name][KEY] = f"{_TOKENIZERS.value}/{{tokenizer_file}}"
    for name, keys in keys_by_text.items():
        if keys["data.source"] == "text_files":
            _check_text(name, keys["data.path"])
    return keys_by_text


def _check_text(name: str, path: str) -> None:
    file = parse_path(path, f"--text={name}")
    if not (file.exists() or files_matching(file)):
        raise InputError(f"--text={name}={path}: there is no such file or folder; check the path")


def _remaining_runs(runs: "list[ExperimentRun]", output: AnyPath) -> "list[ExperimentRun]":
    from t5x_diffeq.experiments.runs import read_results

    done = read_results(output)
    return [run for run in runs if run.name not in done]


def present(
    experiment: "Experiment",
    runs: "list[ExperimentRun]",
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
    from t5x_diffeq.experiments.drawing import draw
    from t5x_diffeq.experiments.present import add_task_scores, format_markdown
    from t5x_diffeq.experiments.runs import read_results

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
