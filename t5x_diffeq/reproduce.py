"""Repeats an experiment of the paper: --experiment=figure5 --output=DIR --text=NAME=PATH.

Each run is done once, also for several experiments in one DIR: the same command again goes on
where it was stopped. Ends with tables on standard output (tables.md) and figures (figure1.png,
.pdf, ...) in DIR/figure5.
"""

import json
import re
import shlex

from absl import flags

from t5x_diffeq import command_line
from t5x_diffeq.data.sources import SOURCES
from t5x_diffeq.errors import InputError
from t5x_diffeq.experiments.drawing import draw
from t5x_diffeq.experiments.experiment import Experiment
from t5x_diffeq.experiments.laptop import LAPTOP
from t5x_diffeq.experiments.paper import PAPER
from t5x_diffeq.experiments.present import markdown, scores
from t5x_diffeq.experiments.runs import Run, StoppedError, carry_out, part_of, read_results
from t5x_diffeq.experiments.tokenizers import KEY, OWN, check_tokenizers, remark
from t5x_diffeq.files import AnyPath, files_matching, place, write_whole
from t5x_diffeq.report import say

EXPERIMENTS = {"laptop": LAPTOP, "paper": PAPER}
FLAGS = flags.FlagValues()
EXPERIMENT = flags.DEFINE_string(
    "experiment", None, f"One of {', '.join(LAPTOP)}.", flag_values=FLAGS
)
OUTPUT = flags.DEFINE_string(
    "output", None, "Folder of workdirs, logs, results, tables and figures.", flag_values=FLAGS
)
SCALE = flags.DEFINE_string(
    "scale", "laptop", "laptop, or paper: its own sizes.", flag_values=FLAGS
)
TEXT = flags.DEFINE_multi_string(
    "text",
    [],
    "NAME=PATH of a text, or NAME=SOURCE:PATH, SOURCE as of data.source; once for each. In PATH, "
    "{tokenizer} stands for gpt2 or llama.",
    flag_values=FLAGS,
)
SEEDS = flags.DEFINE_integer(
    "seeds",
    None,
    "Seeds of each training; 3 on a laptop, 1 at the paper's scale.",
    flag_values=FLAGS,
)
TOKENIZERS = flags.DEFINE_string(
    "tokenizers",
    "tokenizers",
    "At the paper's scale: folder of the paper's tokenizers, gpt2.json and llama.model; or own: "
    "they are trained on the text.",
    flag_values=FLAGS,
)
PART = flags.DEFINE_string(
    "part", "0/1", "The i-th of n parts, i/n, for an array of jobs.", flag_values=FLAGS
)
DRY_RUN = flags.DEFINE_boolean("dry_run", False, "Print the commands only.", flag_values=FLAGS)


def texts() -> dict[str, dict[str, object]]:
    """The keys of the config for each text by its name.

    Raises:
      InputError: if one isn't as it should be.
    """
    found = {}
    for given in TEXT.value:
        name, _, where = given.partition("=")
        source, colon, path = where.partition(":")
        if not colon:
            source, path = ("stdlib", "") if name == "stdlib" else ("text_files", where)
        if not re.fullmatch(r"\w+", name) or (not path and source != "stdlib"):
            raise InputError(f"--text={given} is not NAME=PATH, NAME=SOURCE:PATH, or stdlib alone")
        if name in found:
            raise InputError(f"--text={given}: there is a text of the name {name} already")
        if source not in (*SOURCES, "tokens"):
            raise InputError(
                f"--text={given}: {source!r} is no source; there are {', '.join(SOURCES)}, tokens"
            )
        found[name] = {"data.source": source, **({"data.path": path} if path else {})}
        if SCALE.value == "paper" and source != "tokens" and TOKENIZERS.value != OWN:
            found[name][KEY] = f"{TOKENIZERS.value}/{{tokenizer_file}}"
    for name, keys in found.items():
        if keys["data.source"] == "text_files":
            check_text(name, keys["data.path"])
    return found


def check_text(name: str, path: str) -> None:
    """There is a text at the path.

    Raises:
      InputError: if not.
    """
    file = place(path, f"--text={name}")
    if not (file.exists() or files_matching(file)):
        raise InputError(f"--text={name}={path}: there is no such file or folder; check the path")


def part() -> tuple[int, int]:
    """i and n of --part.

    Raises:
      InputError: if it isn't i/n with 0 <= i < n.
    """
    found = re.fullmatch(r"(\d+)/(\d+)", PART.value)
    if not found or not int(found[1]) < int(found[2]):
        raise InputError(f"--part={PART.value} is not i/n with 0 <= i < n")
    return int(found[1]), int(found[2])


def seeds_of(experiment: Experiment) -> range:
    """The seeds.

    Raises:
      InputError: if --seeds isn't a positive number.
    """
    if SEEDS.value is not None and SEEDS.value < 1:
        raise InputError(f"--seeds={SEEDS.value} must be at least 1")
    return range(SEEDS.value or experiment.seeds)


def todo(runs: list[Run], output: AnyPath) -> list[Run]:
    """Those that have no outcome yet."""
    done = read_results(output)
    return [run for run in runs if run.name not in done]


def present(
    experiment: Experiment, runs: list[Run], output: AnyPath, folder: AnyPath, caveats: list[str]
) -> None:
    """Tables on standard output and in `folder`, figures, and the outcomes that they show.

    Args:
      experiment: whose they are.
      runs: all of its runs, done.
      output: the folder of the runs.
      folder: of what is shown.
      caveats: paragraphs on why the numbers are not the paper's; figures then say so, too.
    """
    folder.mkdir(parents=True, exist_ok=True)
    done = read_results(output)
    # An outcome may have been another experiment's first: labels are this one's.
    every = [{**done[run.name], **run.labels} for run in runs]
    outcomes = scores([each for each, run in zip(every, runs, strict=True) if run.labels])
    tables = [f"{each.value}\n\n{markdown(outcomes, each)}" for each in experiment.layouts]
    notes = [*experiment.notes(every, output), *caveats]
    write_whole(folder / "tables.md", "\n\n".join([*tables, *notes, ""]).encode())
    write_whole(folder / "outcomes.json", json.dumps(outcomes, indent=1).encode())
    for number, layout in enumerate(experiment.layouts, 1):
        draw(outcomes, layout, folder / f"figure{number}", output, comparable=not caveats)
    print(*tables, *notes, sep="\n\n")


def main() -> int:
    """The verb."""
    if SCALE.value not in EXPERIMENTS:
        raise InputError(f"--scale={SCALE.value} is laptop or paper")
    if EXPERIMENT.value not in LAPTOP:
        raise InputError(f"--experiment={EXPERIMENT.value}: there are {', '.join(LAPTOP)}")
    output = command_line.folder(OUTPUT, "reproduce")
    experiment = EXPERIMENTS[SCALE.value][EXPERIMENT.value]
    of_texts, seeds, (i, n) = texts(), seeds_of(experiment), part()
    runs = experiment.runs(of_texts, seeds, read_results(output))
    if DRY_RUN.value:
        print(*(shlex.join(run.command(output)) for run in part_of(runs, i, n)), sep="\n")
        return 0
    check_tokenizers(runs)
    results = "results.jsonl" if n == 1 else f"results-{i}.jsonl"
    while todo(runs, output):
        try:
            carry_out(part_of(runs, i, n), output, results)
        except StoppedError as stopped:
            say("stopped, saved; the same command continues")
            return stopped.status
        if others := todo(runs, output):
            say(f"this part is done; others have {len(others)} runs to do, then the same command")
            return 0
        runs = experiment.runs(of_texts, seeds, read_results(output))  # more, of a sweep
    caveats = remark(runs, output) if SCALE.value == "paper" else []
    present(experiment, runs, output, output / EXPERIMENT.value, caveats)
    return 0


if __name__ == "__main__":
    command_line.run(main, __doc__, FLAGS)
