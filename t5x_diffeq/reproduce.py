"""Repeats an experiment of the paper: --experiment=figure5 --output=DIR --text=NAME=PATH.

Each run is done once, also for several experiments in one DIR: the same command again goes on
where it was stopped. Ends with tables on standard output (tables.md) and figures (figure1.png,
.pdf, ...) in DIR/figure5.
"""

import importlib
import json
import re
from collections.abc import Sequence

from absl import flags

from t5x_diffeq import command_line
from t5x_diffeq.data.sources import SOURCES
from t5x_diffeq.errors import InputError
from t5x_diffeq.experiments.paper import EXPERIMENTS
from t5x_diffeq.experiments.present import Layout, cells, in_order, markdown, scores
from t5x_diffeq.experiments.runs import Run, StoppedError, carry_out, part_of, read_results
from t5x_diffeq.files import AnyPath, files_matching, place, write_whole
from t5x_diffeq.report import say

FLAGS = flags.FlagValues()
EXPERIMENT = flags.DEFINE_string(
    "experiment", None, f"One of {', '.join(EXPERIMENTS)}.", flag_values=FLAGS
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
    "NAME=PATH of a text, or NAME=SOURCE:PATH, SOURCE as of data.source; once for each.",
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


def draw(outcomes: list[dict], layout: Layout, path: AnyPath) -> None:
    """The figure, .png and .pdf, if matplotlib is installed."""
    found = cells(outcomes, layout)
    columns = in_order(found)
    rows = {
        ", ".join(map(str, row)): [
            (column, of[column].mean, of[column].error) for column in columns if column in of
        ]
        for row, of in found.items()
    }
    try:
        plots = importlib.import_module("t5x_diffeq.analysis.plots")
    except ImportError:
        say("no figure: matplotlib is not installed (pip install -e '.[analysis]')")
        return
    figure = plots.means_with_errors(rows, layout.column, layout.value, layout.log)
    for kind in ("png", "pdf"):
        write_whole(path.with_suffix(f".{kind}"), plots.image(figure, kind))


def todo(runs: list[Run], output: AnyPath) -> list[Run]:
    """Those that have no outcome yet."""
    done = read_results(output)
    return [run for run in runs if run.name not in done]


def present(layouts: Sequence[Layout], runs: list[Run], output: AnyPath, folder: AnyPath) -> None:
    """Tables on standard output and in `folder`, figures, and the outcomes that they show."""
    folder.mkdir(parents=True, exist_ok=True)
    done = read_results(output)
    # An outcome may have been another experiment's first: labels are this one's.
    outcomes = scores([{**done[run.name], **run.labels} for run in runs if run.labels])
    tables = [f"{layout.value}\n\n{markdown(outcomes, layout)}" for layout in layouts]
    write_whole(folder / "tables.md", "\n\n".join([*tables, ""]).encode())
    write_whole(folder / "outcomes.json", json.dumps(outcomes, indent=1).encode())
    for number, layout in enumerate(layouts, 1):
        draw(outcomes, layout, folder / f"figure{number}")
    print(*tables, sep="\n\n")


def main() -> int:
    """The verb."""
    if EXPERIMENT.value not in EXPERIMENTS:
        raise InputError(f"--experiment={EXPERIMENT.value}: there are {', '.join(EXPERIMENTS)}")
    if SCALE.value not in ("laptop", "paper"):
        raise InputError(f"--scale={SCALE.value} is laptop or paper")
    output = command_line.folder(OUTPUT, "reproduce")
    experiment = EXPERIMENTS[EXPERIMENT.value]
    runs, (i, n) = experiment.runs(SCALE.value, texts(), read_results(output)), part()
    if DRY_RUN.value:
        print(*(" ".join(run.command(output)) for run in part_of(runs, i, n)), sep="\n")
        return 0
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
        runs = experiment.runs(SCALE.value, texts(), read_results(output))  # more, of a sweep
    present(experiment.layouts, runs, output, output / EXPERIMENT.value)
    return 0


if __name__ == "__main__":
    command_line.run(main, __doc__, FLAGS)
