"""Evaluates a trained run on its validation split: --workdir=DIR [--num_steps=6,12,24].

Prints one JSON object per grid on standard output; of several grids, a table beside it, and with
--plot=FILE a figure. With --tasks=piqa,... it runs tasks of lm-evaluation-harness instead, shows
its table and keeps its JSON.
"""

import importlib
import json
from itertools import product
from types import ModuleType

import jax
from absl import flags

from t5x_diffeq import command_line
from t5x_diffeq.config_keys import INT32, STEPS
from t5x_diffeq.data.corpus import load_corpus
from t5x_diffeq.data.examples import eval_examples
from t5x_diffeq.data.pipeline import eval_batches
from t5x_diffeq.data.tokenizer import Tokenizer, load_tokenizer
from t5x_diffeq.downstream import check_harness
from t5x_diffeq.errors import InputError
from t5x_diffeq.files import AnyPath, place, write_whole
from t5x_diffeq.models.adaptive import SOLVERS, Adaptive, check_adaptive
from t5x_diffeq.report import count, say
from t5x_diffeq.training.evaluation import evaluate, make_adaptive_eval_step
from t5x_diffeq.training.flops import forward_flops
from t5x_diffeq.training.run import Run, load_run
from t5x_diffeq.training.step import make_eval_step

FLAGS = flags.FlagValues()
WORKDIR = flags.DEFINE_string("workdir", None, "Folder of the run.", flag_values=FLAGS)
NUM_STEPS = flags.DEFINE_list(
    "num_steps", None, "Numbers of steps, 6,12,24; the trained one.", flag_values=FLAGS
)
SCHEME = flags.DEFINE_list(
    "scheme",
    None,
    f"Schemes, or one of {', '.join(SOLVERS)} (adaptive); the trained one.",
    flag_values=FLAGS,
)
PLOT = flags.DEFINE_string(
    "plot", None, "Figure to write, .png, .pdf or .svg: perplexity over depth.", flag_values=FLAGS
)
RTOL = flags.DEFINE_float(
    "rtol", 1e-3, "Tolerance of an adaptive solver.", 1e-12, 1.0, flag_values=FLAGS
)
MAX_SOLVER_STEPS = flags.DEFINE_integer(
    "max_solver_steps",
    512,
    "Steps after which an adaptive solver gives up.",
    1,
    STEPS,
    flag_values=FLAGS,
)
BATCH_SIZE = flags.DEFINE_integer(
    "batch_size", 32, "Sequences of a batch, over all devices.", 1, INT32, flag_values=FLAGS
)
CHECKPOINT = flags.DEFINE_integer(
    "checkpoint", None, "Step of the checkpoint; the newest.", 0, INT32, flag_values=FLAGS
)
ADAPTERS = flags.DEFINE_string(
    "adapters", None, "adapters/ that a finetune trained beside this run.", flag_values=FLAGS
)
TASKS = flags.DEFINE_list(
    "tasks", None, "Tasks of lm-evaluation-harness, or paper: its eleven.", flag_values=FLAGS
)
NUM_FEWSHOT = flags.DEFINE_integer(
    "num_fewshot",
    None,
    "Examples in a task's context; the task's own number.",
    0,
    INT32,
    flag_values=FLAGS,
)
INCLUDE_PATH = flags.DEFINE_string(
    "include_path", None, "Folder of task files of your own.", flag_values=FLAGS
)
LIMIT = flags.DEFINE_integer(
    "limit", None, "Only so many of each task's documents, the first.", 1, INT32, flag_values=FLAGS
)
OUTPUT = flags.DEFINE_string(
    "output", None, "Folder for the tasks' JSON; lm_eval/ in the workdir.", flag_values=FLAGS
)


def load_on(
    workdir: AnyPath, tokenizer: Tokenizer, num_steps: int | None, scheme: str | None
) -> Run:
    """The run on a grid."""
    return load_run(
        workdir,
        tokenizer.vocab_size,
        batch_size=jax.device_count(),
        num_steps=num_steps,
        scheme=scheme,
        checkpoint=CHECKPOINT.value,
        adapters=place(ADAPTERS.value, "--adapters") if ADAPTERS.value else None,
    )


def evaluate_grid(workdir: AnyPath, num_steps: int | None, scheme: str | None) -> dict:
    """Loss and perplexity on the whole validation split with so many steps of the scheme."""
    corpus = load_corpus(workdir)
    solver = scheme if scheme in SOLVERS else None
    run = load_on(workdir, corpus.tokenizer, num_steps, None if solver else scheme)
    model = run.setup.model.config
    parts = eval_examples(run.config.data, corpus)
    with run.setup.context():
        eval_step = make_eval_step(run.setup.model, run.setup.loss_chunk)
        if solver:
            adaptive = Adaptive(solver, RTOL.value, RTOL.value, MAX_SOLVER_STEPS.value)
            check_adaptive(model, adaptive)
            eval_step = make_adaptive_eval_step(run.setup.model, run.setup.loss_chunk, adaptive)
        rows = run.setup.eval_rows(min(BATCH_SIZE.value, sum(map(len, parts))))
        batches = eval_batches(parts, rows, run.setup.rows)
        values = evaluate(eval_step, run.params, batches)
    fixed = {"num_steps": model.num_steps, "scheme": model.scheme}
    fixed["flops_per_token"] = forward_flops(model)
    grid = {"step": run.step, **({"scheme": solver, "rtol": RTOL.value} if solver else fixed)}
    return {**grid, **{f"eval/{name}": value for name, value in values.items()}}


def show_table(results: list[dict]) -> None:
    """A line per grid, and the figure if one is asked for."""
    say(f"{'scheme':<12}{'steps':>6}{'FLOPs/token':>13}{'loss':>9}{'perplexity':>12}")
    for values in results:
        say(
            f"{values['scheme']:<12}{values['num_steps']:>6}"
            f"{count(values['flops_per_token']):>13}{values['eval/loss']:>9.4f}"
            f"{values['eval/perplexity']:>12.2f}"
        )
    if PLOT.value:
        path = place(PLOT.value, "--plot")
        figure = plots().perplexity_over_depth(results)
        write_whole(path, plots().image(figure, path.suffix[1:]))
        say(f"figure in {path}")


def check_tasks(adaptive: bool) -> None:
    """The flags of tasks go together, and the harness is there.

    Raises:
      InputError: if not.
    """
    if not TASKS.value:
        for flag in (NUM_FEWSHOT, INCLUDE_PATH, LIMIT, OUTPUT):
            if flag.value is not None:
                raise InputError(f"--{flag.name} goes with --tasks; give both or neither")
        return
    if adaptive or PLOT.value:
        raise InputError("--tasks goes with fixed schemes and without --plot; leave the other out")
    check_harness("--tasks")


def plots() -> ModuleType:
    """The module that draws.

    Raises:
      InputError: if matplotlib isn't installed.
    """
    try:
        return importlib.import_module("t5x_diffeq.analysis.plots")
    except ImportError as error:
        raise InputError(
            "--plot needs the package matplotlib; pip install -e '.[analysis]', or leave it out"
        ) from error


def check_plot() -> None:
    """The figure can be drawn.

    Raises:
      InputError: if not.
    """
    if not PLOT.value:
        return
    plots()
    if not PLOT.value.endswith((".png", ".pdf", ".svg")):
        raise InputError(f"--plot={PLOT.value} must end in .png, .pdf or .svg")
    if place(PLOT.value, "--plot").is_dir():
        raise InputError(f"--plot={PLOT.value} is a folder; name a file")


def parse_num_steps(values: list[str] | None) -> list[int | None]:
    """The numbers of `--num_steps`; [None] for the trained one.

    Raises:
      InputError: if one isn't a number of steps.
    """
    for value in values or ():
        if not (value.isdecimal() and 1 <= int(value) <= STEPS):
            raise InputError(f"--num_steps={value!r} is not a number of steps, from 1 to {STEPS}")
    return [int(value) for value in values] if values else [None]


def evaluate_tasks(workdir: AnyPath, grids: list[tuple[str | None, int | None]]) -> None:
    """A line for each grid: what the harness's tasks gave."""
    from t5x_diffeq import harness

    tokenizer = load_tokenizer(workdir / "tokenizer")  # of its data nothing else is needed
    if tokenizer is None:
        raise InputError(f"workdir {workdir} holds no tokenizer/; train there first, or restore it")
    tasks = harness.load_tasks(TASKS.value, NUM_FEWSHOT.value, INCLUDE_PATH.value, LIMIT.value)
    folder = place(OUTPUT.value, "--output") if OUTPUT.value else workdir / "lm_eval"
    for scheme, num_steps in grids:
        run = load_on(workdir, tokenizer, num_steps, scheme)
        values = harness.evaluate_run(run, tokenizer, BATCH_SIZE.value, tasks, folder)
        if jax.process_index() == 0:
            print(json.dumps(values), flush=True)


def main() -> None:
    """The verb."""
    workdir = command_line.folder(WORKDIR, "evaluate")
    adaptive = [scheme for scheme in SCHEME.value or () if scheme in SOLVERS]
    if adaptive and (NUM_STEPS.value or PLOT.value or len(SCHEME.value) > 1):
        raise InputError(
            f"--scheme={adaptive[0]} chooses its steps itself: give it alone, without --num_steps "
            "and --plot"
        )
    check_plot()
    check_tasks(bool(adaptive))
    grids = list(product(SCHEME.value or [None], parse_num_steps(NUM_STEPS.value)))
    if TASKS.value:
        return evaluate_tasks(workdir, grids)
    results = []
    for scheme, num_steps in grids:
        values = evaluate_grid(workdir, num_steps, scheme)
        results.append(values)
        steps = f"{values['num_steps']} steps of " if "num_steps" in values else ""
        say(f"{steps}{values['scheme']}: perplexity {values['eval/perplexity']:.2f}")
        if jax.process_index() == 0:
            print(json.dumps(values), flush=True)
    if not adaptive and (len(results) > 1 or PLOT.value) and jax.process_index() == 0:
        show_table(results)


if __name__ == "__main__":
    command_line.run(main, __doc__, FLAGS, several=True)
