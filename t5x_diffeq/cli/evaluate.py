"""Evaluates a trained run on its validation split: --workdir=DIR [--num_steps=6,12,24].

Prints one JSON object per number of steps and scheme on standard output. If there are several,
it also prints a table, and --plot=FILE plots them. With --tasks=piqa,... it runs tasks of the
lm-evaluation-harness instead, prints the harness's table and writes its JSON.
"""

from collections.abc import Sequence
from difflib import get_close_matches
from itertools import product

from absl import flags

from t5x_diffeq.runtime import command_line, run_flags
from t5x_diffeq.runtime.config import KEYS
from t5x_diffeq.runtime.errors import InputError
from t5x_diffeq.runtime.files import parse_path
from t5x_diffeq.runtime.keys.values import ADAPTIVE_SOLVERS, INT32, SCHEMES, STEPS

CHOICES = {"scheme": (*SCHEMES, *ADAPTIVE_SOLVERS)}  # for completion
FLAGS = flags.FlagValues()
_WORKDIR = run_flags.define_workdir(FLAGS)
_NUM_STEPS = flags.DEFINE_list(
    "num_steps",
    None,
    "Numbers of solver steps, such as 6,12,24. [default: the trained one]",
    flag_values=FLAGS,
)
_SCHEME = flags.DEFINE_list(
    "scheme",
    None,
    f"Schemes, or one of {', '.join(ADAPTIVE_SOLVERS)} (adaptive). [default: the trained one]",
    flag_values=FLAGS,
)
_PLOT = flags.DEFINE_string(
    "plot", None, "File for a plot of perplexity over depth: .png, .pdf or .svg.", flag_values=FLAGS
)
_RTOL = flags.DEFINE_float(
    "rtol", 1e-3, "Tolerance of an adaptive solver.", 1e-12, 1.0, flag_values=FLAGS
)
_BATCH_SIZE = flags.DEFINE_integer(
    "batch_size", 32, "Sequences per batch, over all devices.", 1, INT32, flag_values=FLAGS
)
_EVAL_BATCHES = flags.DEFINE_integer(
    "eval_batches",
    None,
    "Number of batches, from the first. [default: the whole split]",
    1,
    INT32,
    flag_values=FLAGS,
)
run_flags.define_checkpoint(FLAGS)
run_flags.define_averages(FLAGS)
run_flags.define_adapters(FLAGS)
_TASKS = flags.DEFINE_list(
    "tasks",
    None,
    "Tasks of the lm-evaluation-harness; 'paper' is the paper's eleven.",
    flag_values=FLAGS,
)
_NUM_FEWSHOT = flags.DEFINE_integer(
    "num_fewshot",
    None,
    "Number of few-shot examples. [default: the task's own number]",
    0,
    INT32,
    flag_values=FLAGS,
)
_INCLUDE_PATH = flags.DEFINE_string(
    "include_path", None, "Folder with your own task files.", flag_values=FLAGS
)
_LIMIT = flags.DEFINE_integer(
    "limit",
    None,
    "Number of documents of each task, from the first. [default: all]",
    1,
    INT32,
    flag_values=FLAGS,
)
_OUTPUT = flags.DEFINE_string(
    "output", None, "Folder for the tasks' JSON. [default: WORKDIR/lm_eval]", flag_values=FLAGS
)


def _check_tasks(adaptive: bool) -> None:
    if not _TASKS.value:
        for flag in (_NUM_FEWSHOT, _INCLUDE_PATH, _LIMIT, _OUTPUT):
            if flag.value is not None:
                raise InputError(f"--{flag.name} needs --tasks; give both or neither")
        return
    if adaptive or _PLOT.value:
        raise InputError("--tasks excludes adaptive schemes and --plot; leave one of them out")
    if _EVAL_BATCHES.value is not None:
        raise InputError("--eval_batches limits the validation split; with --tasks give --limit")


def _check_plot() -> None:
    if not _PLOT.value:
        return
    if not _PLOT.value.endswith((".png", ".pdf", ".svg")):
        raise InputError(f"--plot={_PLOT.value} must end in .png, .pdf or .svg")
    if parse_path(_PLOT.value, "--plot").is_dir():
        raise InputError(f"--plot={_PLOT.value} is a folder; name a file")


def _check_schemes(schemes: Sequence[str | None]) -> None:
    values = KEYS["model.scheme"].values
    for scheme in schemes:
        if scheme and scheme not in ADAPTIVE_SOLVERS and values.fault(scheme):
            near = get_close_matches(scheme, (*SCHEMES, *ADAPTIVE_SOLVERS), n=1)
            raise InputError(
                f"--scheme={scheme} is unknown; {f'did you mean {near[0]}? ' if near else ''}There "
                f"are {', '.join(values.choices)}, and the adaptive {', '.join(ADAPTIVE_SOLVERS)}"
            )


def _parse_num_steps(values: list[str] | None) -> list[int | None]:
    """The numbers of `--num_steps`; [None] for the trained one."""
    for value in values or ():
        if not (value.isdecimal() and 1 <= int(value) <= STEPS):
            raise InputError(f"--num_steps={value!r} is not a number of steps, from 1 to {STEPS}")
    return [int(value) for value in values] if values else [None]


def main() -> None:
    """Runs the verb."""
    workdir = command_line.parse_folder(_WORKDIR, "evaluate")
    schemes: Sequence[str | None] = _SCHEME.value or [None]
    _check_schemes(schemes)
    adaptive = [scheme for scheme in schemes if scheme in ADAPTIVE_SOLVERS]
    if adaptive and (_NUM_STEPS.value or _PLOT.value or len(schemes) > 1):
        raise InputError(
            f"--scheme={adaptive[0]} chooses its own steps: give it alone, without --num_steps "
            "and --plot"
        )
    _check_plot()
    _check_tasks(bool(adaptive))
    grids = list(product(schemes, _parse_num_steps(_NUM_STEPS.value)))

    from t5x_diffeq.verbs import evaluate  # importing JAX takes seconds

    (evaluate.evaluate_tasks if _TASKS.value else evaluate.evaluate_grids)(workdir, grids, FLAGS)


if __name__ == "__main__":
    command_line.run(main, __doc__, FLAGS, several=True)
