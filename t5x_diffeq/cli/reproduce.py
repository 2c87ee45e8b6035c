"""Repeats an experiment of the paper: --experiment=figure5 --output=DIR --text=NAME=PATH.

Each run is done once, even if several experiments in one DIR need it, and the same command again
continues where it stopped. At the end it prints tables and writes them (tables.md) with the figures
(figure1.png, .pdf, ...) to DIR/figure5.
"""

import json
import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from t5x_diffeq.cli import flag_values
from t5x_diffeq.cli.verb_flags import VerbFlags
from t5x_diffeq.config.keys.values import INT32
from t5x_diffeq.system.console import log, print_result
from t5x_diffeq.system.errors import InputError
from t5x_diffeq.system.files import AnyPath, files_in, files_matching, parse_path, write_whole

if TYPE_CHECKING:
    from t5x_diffeq.experiments.experiment import Experiment
    from t5x_diffeq.experiments.runs import ExperimentRun

EXPERIMENTS = (
    *("table1", "table2", "table4", "table5", "figure2", "figure3", "figure4", "figure5"),
    *("figure7", "figure8", "figure13", "figure14", "figure15", "figure18"),
    *("appendixE", "appendixF"),
)
_SCALES = ("laptop", "paper")


class ExperimentFlags(VerbFlags):
    """The flags of a set of runs, the same for the paper's experiments and for studies."""

    def __init__(self, module: str, output: str | None = None):
        super().__init__(module)
        what = "Folder for workdirs, logs, results, tables and figures."
        self.define_text("output", what, output)
        self.define_text("scale", "Scale: laptop, or paper for the paper's sizes.", "laptop")
        self.define_texts(
            "text",
            "NAME=PATH of a text, or NAME=SOURCE:PATH with a SOURCE of data.source; may be "
            "repeated. In PATH, {tokenizer} stands for gpt2 or llama.",
        )
        self.define_integer(
            "seeds",
            "Number of seeds per training. [default: 3 at laptop scale, 1 at paper scale]",
            None,
            1,
            INT32,
        )
        self.define_text(
            "tokenizers",
            "At paper scale: the folder with the paper's tokenizers, gpt2.json and llama.model, "
            "or 'own' to train tokenizers on the text.",
            "tokenizers",
        )
        self.define_part()
        self.define_dry_run()


FLAGS = ExperimentFlags(__name__)
_EXPERIMENT = FLAGS.define_text("experiment", f"One of {', '.join(EXPERIMENTS)}.")


def main() -> int:
    """Runs the verb."""
    name = _EXPERIMENT.value
    if name not in EXPERIMENTS:
        raise InputError(f"--experiment={name} must be {', '.join(EXPERIMENTS)}")

    def experiment(scale: str) -> "Experiment":
        from t5x_diffeq.experiments.paper import LAPTOP, PAPER  # importing JAX takes seconds

        if scale == "laptop" and name not in LAPTOP:
            raise InputError(
                f"--experiment={name} is not for small models, which know nothing of the paper's "
                "tasks; set --scale=paper, or run studies.own_tasks of a clone"
            )
        return {"laptop": LAPTOP, "paper": PAPER}[scale][name]

    return carry_out_at_scale(name, experiment, FLAGS)


def carry_out_at_scale(
    name: str, at_scale: Callable[[str], "Experiment"], flags: ExperimentFlags
) -> int:
    """Carries out the runs of an experiment, then presents them; returns the exit status."""
    if flags.scale not in _SCALES:
        raise InputError(f"--scale={flags.scale} must be laptop or paper")
    output = flag_values.parse_output_of_runs(flags["output"], "reproduce")
    i, n = flag_values.parse_part(flags["part"])

    from t5x_diffeq.experiments.commands import StoppedError
    from t5x_diffeq.experiments.runs import carry_out, part_of, read_results
    from t5x_diffeq.experiments.tokenizers import check_tokenizer_files, remark

    experiment = at_scale(flags.scale)
    texts, seeds = _texts(flags), range(flags.seeds or experiment.seeds)
    runs = experiment.runs(texts, seeds, read_results(output))
    if flags.dry_run:
        print_result("\n".join(shlex.join(each.command(output)) for each in part_of(runs, i, n)))
        return 0
    check_tokenizer_files(runs)
    results = "results.jsonl" if n == 1 else f"results-{i}.jsonl"
    while _remaining(runs, read_results(output)):
        try:
            carry_out(part_of(runs, i, n), output, results)
        except StoppedError as stopped:
            done = read_results(output)
            if shown := [run for run in runs if run.name in done]:
                present(experiment, shown, output, output / name, [])
            log(f"stopped, saved; {len(shown)} runs are done; the same command continues")
            return stopped.status
        if others := _remaining(runs, read_results(output)):
            log(
                f"this part is done; {len(others)} runs of other parts are not; once they are, the "
                "same command makes tables and figures"
            )
            return 0
        runs = experiment.runs(texts, seeds, read_results(output))  # a sweep adds runs
    caveats = remark(runs, output) if flags.scale == "paper" else []
    present(experiment, runs, output, output / name, caveats)
    return 0


def _texts(flags: ExperimentFlags) -> dict[str, dict[str, object]]:
    from t5x_diffeq.data.named_source import WITHOUT_PATH
    from t5x_diffeq.data.sources import SOURCES
    from t5x_diffeq.experiments.tokenizers import KEY, OWN

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
            file = parse_path(keys["data.path"], f"--text={name}")
            inside = files_in(file) if file.is_dir() else files_matching(file)
            texts = [file] if file.is_file() else inside
            if not (file.exists() or texts):
                raise InputError(f"--text={name}={file}: there is no such file or folder; check it")
            if isinstance(file, Path) and not any(
                each.exists() and each.stat().st_size for each in texts
            ):
                raise InputError(f"--text={name}={file} has no text; name another file or folder")
    return keys_by_text


def _remaining(runs: "list[ExperimentRun]", done: dict[str, dict]) -> "list[ExperimentRun]":
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
      caveats: paragraphs on why the numbers don't compare with the paper's; figures then say so.
    """
    from t5x_diffeq.experiments.drawing import draw
    from t5x_diffeq.experiments.present import add_task_scores, format_markdown
    from t5x_diffeq.experiments.runs import read_results

    folder.mkdir(parents=True, exist_ok=True)
    done = read_results(output)
    # An outcome may come from another experiment, so it gets the labels of this experiment.
    labelled = [{**done[run.name], **run.labels} for run in runs]
    outcomes = add_task_scores(
        [outcome for outcome, run in zip(labelled, runs, strict=True) if run.labels]
    )
    tables = [f"{each.value}\n\n{format_markdown(outcomes, each)}" for each in experiment.tables]
    notes = [*experiment.notes(labelled, output), *caveats]
    write_whole(folder / "tables.md", "\n\n".join([*tables, *notes, ""]).encode())
    write_whole(folder / "outcomes.json", json.dumps(outcomes, indent=1).encode())
    for number, table in enumerate(experiment.tables, 1):
        draw(outcomes, table, folder / f"figure{number}", output, comparable=not caveats)
    print_result("\n\n".join([*tables, *notes]))
