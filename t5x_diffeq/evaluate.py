"""Evaluates a trained run on its validation split: --workdir=DIR [--num_steps=6,12,24].

Prints one JSON object per grid on standard output.
"""

import json

import jax
from absl import flags

from t5x_diffeq import command_line
from t5x_diffeq.data.corpus import load_corpus
from t5x_diffeq.data.examples import eval_examples
from t5x_diffeq.data.pipeline import eval_batches
from t5x_diffeq.errors import InputError
from t5x_diffeq.files import AnyPath
from t5x_diffeq.models.adaptive import SOLVERS, Adaptive, check_adaptive
from t5x_diffeq.report import say
from t5x_diffeq.training.evaluation import evaluate, make_adaptive_eval_step
from t5x_diffeq.training.run import load_run
from t5x_diffeq.training.step import make_eval_step

FLAGS = flags.FlagValues()
WORKDIR = flags.DEFINE_string("workdir", None, "Folder of the run.", flag_values=FLAGS)
NUM_STEPS = flags.DEFINE_list(
    "num_steps", None, "Numbers of steps, 6,12,24; the trained one.", flag_values=FLAGS
)
SCHEME = flags.DEFINE_string(
    "scheme",
    None,
    f"A scheme, or {', '.join(SOLVERS)} (adaptive); the trained one.",
    flag_values=FLAGS,
)
RTOL = flags.DEFINE_float("rtol", 1e-3, "Tolerance of an adaptive solver.", flag_values=FLAGS)
MAX_SOLVER_STEPS = flags.DEFINE_integer(
    "max_solver_steps", 512, "Steps after which an adaptive solver gives up.", flag_values=FLAGS
)
BATCH_SIZE = flags.DEFINE_integer(
    "batch_size", 32, "Sequences of a batch, over all devices.", flag_values=FLAGS
)
CHECKPOINT = flags.DEFINE_integer(
    "checkpoint", None, "Step of the checkpoint; the newest.", flag_values=FLAGS
)


def evaluate_grid(workdir: AnyPath, num_steps: int | None) -> dict:
    """Loss and perplexity on the whole validation split with so many steps."""
    corpus = load_corpus(workdir)
    solver = SCHEME.value if SCHEME.value in SOLVERS else None
    run = load_run(
        workdir,
        corpus.tokenizer.vocab_size,
        batch_size=jax.device_count(),
        num_steps=num_steps,
        scheme=None if solver else SCHEME.value,
        checkpoint=CHECKPOINT.value,
    )
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
    grid = {"step": run.step, **({"scheme": solver, "rtol": RTOL.value} if solver else fixed)}
    return {**grid, **{f"eval/{name}": value for name, value in values.items()}}


def parse_num_steps(values: list[str] | None) -> list[int | None]:
    """The numbers of `--num_steps`; [None] for the trained one.

    Raises:
      InputError: if one isn't a positive number.
    """
    for value in values or ():
        if not value.isdecimal() or int(value) < 1:
            raise InputError(f"--num_steps={value!r} is not a number of steps, 1 or more")
    return [int(value) for value in values] if values else [None]


def main() -> None:
    """The verb."""
    workdir = command_line.folder(WORKDIR, "evaluate")
    if BATCH_SIZE.value < 1:
        raise InputError(f"--batch_size={BATCH_SIZE.value} must be at least 1")
    if NUM_STEPS.value and SCHEME.value in SOLVERS:
        raise InputError(f"--num_steps has no meaning with {SCHEME.value}, which chooses its steps")
    for num_steps in parse_num_steps(NUM_STEPS.value):
        values = evaluate_grid(workdir, num_steps)
        steps = f"{values['num_steps']} steps of " if "num_steps" in values else ""
        say(f"{steps}{values['scheme']}: perplexity {values['eval/perplexity']:.2f}")
        if jax.process_index() == 0:
            print(json.dumps(values), flush=True)


if __name__ == "__main__":
    command_line.run(main, __doc__, FLAGS, several=True)
