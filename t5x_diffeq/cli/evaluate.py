"""Evaluates a trained run on its validation split: --workdir=DIR [--num_steps=6,12,24].

Prints one JSON object per number of steps and scheme on standard output. If there are several,
it also prints a table, and --plot=FILE plots them. With --tasks=piqa,... it runs tasks of the
lm-evaluation-harness instead, prints the harness's table and writes its JSON.
"""

import json
from collections.abc import Sequence
from difflib import get_close_matches
from itertools import product
from typing import TypeAlias

from t5x_diffeq.cli import flag_values
from t5x_diffeq.cli.verb_flags import VerbFlags
from t5x_diffeq.config.config import KEYS, Config
from t5x_diffeq.config.keys.values import ADAPTIVE_SOLVERS, INT32, SCHEMES, STEPS
from t5x_diffeq.system.console import align, format_count, log, print_result
from t5x_diffeq.system.errors import InputError
from t5x_diffeq.system.extras import need_package
from t5x_diffeq.system.files import AnyPath, parse_path

# Schemes and numbers of steps; None: as trained.
_Grids: TypeAlias = list[tuple[str | None, int | None]]
FLAGS = VerbFlags(__name__)
_WORKDIR = FLAGS.define_workdir()
_NUM_STEPS = FLAGS.define_words(
    "num_steps", "Numbers of solver steps, such as 6,12,24. [default: the trained one]"
)
_SCHEME = FLAGS.define_words(
    "scheme",
    f"Schemes, or one of {', '.join(ADAPTIVE_SOLVERS)} (adaptive). [default: the trained one]",
)
_PLOT = FLAGS.define_plot("perplexity over depth")
_RTOL = FLAGS.define_number("rtol", "Tolerance of an adaptive solver.", 1e-3, 1e-12, 1.0)
_BATCH_SIZE = FLAGS.define_integer(
    "batch_size", "Sequences per batch, over all devices.", 32, 1, INT32
)
_EVAL_BATCHES = FLAGS.define_integer(
    "eval_batches", "Number of batches, from the first. [default: the whole split]", None, 1, INT32
)
_CHECKPOINT = FLAGS.define_checkpoint()
_AVERAGES = FLAGS.define_averages()
_TASKS = FLAGS.define_words(
    "tasks", "Tasks of the lm-evaluation-harness; 'paper' is the paper's eleven."
)
_NUM_FEWSHOT = FLAGS.define_integer(
    "num_fewshot", "Number of few-shot examples. [default: the task's own number]", None, 0, INT32
)
_INCLUDE_PATH = FLAGS.define_text("include_path", "Folder with your own task files.")
_LIMIT = FLAGS.define_integer(
    "limit", "Number of documents of each task, from the first. [default: all]", None, 1, INT32
)
_OUTPUT = FLAGS.define_text("output", "Folder for the tasks' JSON. [default: WORKDIR/lm_eval]")


def _check_tasks(adaptive: bool) -> None:
    if not _TASKS.value:
        for flag in (_NUM_FEWSHOT, _INCLUDE_PATH, _LIMIT, _OUTPUT):
            if flag.value is not None:
                raise InputError(f"--{flag.name} needs --tasks; give both or neither")
        return
    if adaptive or _PLOT.value:
        raise InputError("--tasks takes no adaptive scheme and no --plot; leave one of them out")
    if _EVAL_BATCHES.value is not None:
        raise InputError("--eval_batches limits the validation split; with --tasks give --limit")


def _check_schemes(schemes: Sequence[str | None]) -> None:
    values = KEYS["model.scheme"].values
    for scheme in schemes:
        if scheme and scheme not in ADAPTIVE_SOLVERS and values.fault(scheme):
            near = get_close_matches(scheme, (*SCHEMES, *ADAPTIVE_SOLVERS), n=1)
            raise InputError(
                f"--scheme={scheme} is unknown; "
                f"{f'did you mean {near[0]}? T' if near else 't'}here are "
                f"{', '.join(values.choices)}, and the adaptive {', '.join(ADAPTIVE_SOLVERS)}"
            )


def _parse_num_steps(values: list[str] | None) -> list[int | None]:
    """The numbers of `--num_steps`; without the flag [None], which means the trained number."""
    for value in values or ():
        if not (value.isdecimal() and 1 <= int(value) <= STEPS):
            raise InputError(f"--num_steps={value!r} is not a number of steps, from 1 to {STEPS}")
    return [int(value) for value in values] if values else [None]


def main() -> None:
    """Runs the verb."""
    workdir = flag_values.parse_folder(_WORKDIR, "evaluate")
    schemes: Sequence[str | None] = _SCHEME.value or [None]
    _check_schemes(schemes)
    adaptive = [scheme for scheme in schemes if scheme in ADAPTIVE_SOLVERS]
    if adaptive and (_NUM_STEPS.value or _PLOT.value or len(schemes) > 1):
        raise InputError(
            f"--scheme={adaptive[0]} chooses its own steps: give it alone, without --num_steps "
            "and --plot"
        )
    if _RTOL.present and not adaptive:
        raise InputError(f"--rtol needs --scheme={ADAPTIVE_SOLVERS[0]} or another adaptive one")
    flag_values.check_plot(_PLOT)
    _check_tasks(bool(adaptive))
    grids = list(product(schemes, _parse_num_steps(_NUM_STEPS.value)))
    (_evaluate_tasks if _TASKS.value else _evaluate_grids)(workdir, grids)


def _load_run(workdir: AnyPath, tokenizer, grids: _Grids, methods: tuple[str, ...] = ()):
    import jax

    from t5x_diffeq.training.load import load_run

    return load_run(
        workdir,
        tokenizer.vocab_size,
        batch_size=jax.device_count(),
        checkpoint=_CHECKPOINT.value,
        averages=_AVERAGES.value,
        grids=[(n, None if scheme in ADAPTIVE_SOLVERS else scheme) for scheme, n in grids],
        methods=methods,
    )


def _evaluate_grid(run, corpus, num_steps: int | None, scheme: str | None) -> dict:
    from t5x_diffeq.inference.validation import evaluate_split
    from t5x_diffeq.model.adaptive import Adaptive
    from t5x_diffeq.model.flops import forward_flops
    from t5x_diffeq.model.sub_fields import has_method

    solver = scheme if scheme in ADAPTIVE_SOLVERS else None
    run = run.at_depth(num_steps, None if solver else scheme)
    model = run.placed.model.config
    adaptive = Adaptive(solver, _RTOL.value) if solver else None
    values = evaluate_split(run, corpus, _BATCH_SIZE.value, _EVAL_BATCHES.value, adaptive)
    fixed = {"num_steps": model.num_steps, "scheme": model.scheme}
    if has_method(model, "flops"):
        fixed["flops_per_token"] = forward_flops(model)
    grid = {"step": run.step, **({"scheme": solver, "rtol": _RTOL.value} if solver else fixed)}
    return {**grid, **{f"eval/{name}": value for name, value in values.items()}}


def _show_table(results: list[dict], trained: Config) -> None:
    from t5x_diffeq.inference.notebook import import_plots, write_figure

    per_byte = ["bits/byte"] if "eval/bits_per_byte" in results[0] else []
    lines = [["scheme", "steps", "FLOPs/token", "loss", *per_byte, "perplexity", ""]]
    for values in results:
        flops = values.get("flops_per_token")
        cells = [values["scheme"], str(values["num_steps"])]
        cells += ["unknown" if flops is None else format_count(flops), f"{values['eval/loss']:.4f}"]
        cells += [f"{values['eval/bits_per_byte']:.4f}"] if per_byte else []
        remark = "trained grid" if _is_trained(values, trained) else ""
        lines.append([*cells, f"{values['eval/perplexity']:.2f}", remark])
    log(*align(lines, left=(0, len(lines[0]) - 1)))
    if _PLOT.value:
        figure = import_plots("--plot", "depth_plots").perplexity_over_depth(
            results, (trained.model.scheme, trained.model.num_steps)
        )
        write_figure(figure, parse_path(_PLOT.value, "--plot"))


def _is_trained(values: dict, trained: Config) -> bool:
    from t5x_diffeq.inference.validation import is_trained_grid

    return is_trained_grid(trained, values["scheme"], values.get("num_steps"))


def _evaluate_tasks(workdir: AnyPath, grids: _Grids) -> None:
    need_package("lm_eval", "--tasks", "leave it out")
    import jax

    from t5x_diffeq.data.tokenizer_folder import tokenizer_of_run
    from t5x_diffeq.inference import harness

    tokenizer = tokenizer_of_run(workdir)
    tasks = harness.load_tasks(_TASKS.value, _NUM_FEWSHOT.value, _INCLUDE_PATH.value, _LIMIT.value)
    folder = parse_path(_OUTPUT.value, "--output") if _OUTPUT.value else workdir / "lm_eval"
    run = _load_run(workdir, tokenizer, grids, tasks.methods)
    for scheme, num_steps in grids:
        on_grid = run.at_depth(num_steps, scheme)
        values = harness.evaluate_run_on_tasks(on_grid, tokenizer, _BATCH_SIZE.value, tasks, folder)
        if jax.process_index() == 0:
            print_result(json.dumps(values))


def _evaluate_grids(workdir: AnyPath, grids: _Grids) -> None:
    """Prints a line of JSON per grid, and a table if there are several; draws a figure if asked."""
    import jax

    from t5x_diffeq.data.corpus import load_corpus
    from t5x_diffeq.inference.notebook import import_plots
    from t5x_diffeq.inference.validation import is_smooth, off_grid_warning

    if _PLOT.value:
        import_plots("--plot", "depth_plots")
    corpus = load_corpus(workdir)
    run = _load_run(workdir, corpus.tokenizer, grids)
    results = []
    for scheme, num_steps in grids:
        values = _evaluate_grid(run, corpus, num_steps, scheme)
        results.append(values)
        steps = f"{values['num_steps']} steps of " if "num_steps" in values else ""
        log(f"{steps}{values['scheme']}: perplexity {values['eval/perplexity']:.2f}")
        if jax.process_index() == 0:
            print_result(json.dumps(values))
    if jax.process_index() != 0:
        return
    trained = run.placed.config
    if "num_steps" in results[0] and (len(results) > 1 or _PLOT.value):
        _show_table(results, trained)
    if not is_smooth(trained) and not all(_is_trained(values, trained) for values in results):
        log(f"warning: {off_grid_warning(trained)}")
