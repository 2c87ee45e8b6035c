"""Loss and bits per byte of a run on any grid, or tasks of lm-evaluation-harness."""

import json

import jax
from absl.flags import FlagValues

from t5x_diffeq.data.corpus import Corpus, load_corpus
from t5x_diffeq.data.tokenizer import Tokenizer, load_tokenizer
from t5x_diffeq.inference.run_figures import import_plots
from t5x_diffeq.inference.split_loss import evaluate_split
from t5x_diffeq.inference.trained_grids import is_smooth, is_trained_grid, off_grid_warning
from t5x_diffeq.models.adaptive import SOLVERS, Adaptive
from t5x_diffeq.models.sub_fields import has_method
from t5x_diffeq.planner.flops import forward_flops
from t5x_diffeq.runs.load import Run, load_run
from t5x_diffeq.runtime.config import Config
from t5x_diffeq.runtime.console import format_count, say
from t5x_diffeq.runtime.errors import InputError
from t5x_diffeq.runtime.extras import need_package
from t5x_diffeq.runtime.files import AnyPath, parse_path, write_whole

Grids = list[tuple[str | None, int | None]]  # schemes and numbers of steps; None: as trained


def _load_run(
    workdir: AnyPath,
    tokenizer: Tokenizer,
    grids: Grids,
    flags: FlagValues,
    methods: tuple[str, ...] = (),
) -> Run:
    """Loads the run, if it exists on the grids and its block has the methods.

    The flags name the checkpoint and the adapters.
    """
    return load_run(
        workdir,
        tokenizer.vocab_size,
        batch_size=jax.device_count(),
        checkpoint=flags.checkpoint,
        averages=flags.averages,
        grids=[(n, None if scheme in SOLVERS else scheme) for scheme, n in grids],
        methods=methods,
        adapters=parse_path(flags.adapters, "--adapters") if flags.adapters else None,
    )


def _evaluate_grid(
    run: Run, corpus: Corpus, num_steps: int | None, scheme: str | None, flags: FlagValues
) -> dict:
    solver = scheme if scheme in SOLVERS else None
    run = run.at_depth(num_steps, None if solver else scheme)
    model = run.placed.model.config
    adaptive = Adaptive(solver, flags.rtol) if solver else None
    values = evaluate_split(run, corpus, flags.batch_size, flags.eval_batches, adaptive)
    fixed = {"num_steps": model.num_steps, "scheme": model.scheme}
    if has_method(model, "flops"):
        fixed["flops_per_token"] = forward_flops(model)
    grid = {"step": run.step, **({"scheme": solver, "rtol": flags.rtol} if solver else fixed)}
    return {**grid, **{f"eval/{name}": value for name, value in values.items()}}


def _show_table(results: list[dict], plot: str | None, trained: Config) -> None:
    """Prints a line per grid, and draws the figure if one is asked for.

    Args:
      results: results of each grid.
      plot: the figure's file; None for no figure.
      trained: the config with which the model was trained.
    """
    per_byte = "eval/bits_per_byte" in results[0]
    wide = 11 if per_byte else 0
    say(
        f"{'scheme':<12}{'steps':>7}{'FLOPs/token':>13}{'loss':>9}"
        f"{'bits/byte' if per_byte else '':>{wide}}{'perplexity':>12}"
    )
    for values in results:
        flops = values.get("flops_per_token")
        bits = f"{values['eval/bits_per_byte']:.4f}" if per_byte else ""
        say(
            f"{values['scheme']:<12}{values['num_steps']:>7}"
            f"{'unknown' if flops is None else format_count(flops):>13}{values['eval/loss']:>9.4f}"
            f"{bits:>{wide}}{values['eval/perplexity']:>12.2f}"
            f"{'  trained grid' if _is_trained(values, trained) else ''}"
        )
    if plot:
        path = parse_path(plot, "--plot")
        figure = import_plots("--plot", "depth_plots").perplexity_over_depth(
            results, (trained.model.scheme, trained.model.num_steps)
        )
        image = import_plots("--plot", "figures").render_image(figure, path.suffix[1:])
        write_whole(path, image)
        say(f"figure in {path}")


def _is_trained(values: dict, trained: Config) -> bool:
    return is_trained_grid(trained, values["scheme"], values.get("num_steps"))


def evaluate_tasks(workdir: AnyPath, grids: Grids, flags: FlagValues) -> None:
    """Prints a line for each grid with the results of the harness's tasks."""
    need_package("lm_eval", "--tasks", "leave it out")
    from t5x_diffeq.inference import harness

    tokenizer = load_tokenizer(workdir / "tokenizer")  # nothing else of its data is needed
    if tokenizer is None:
        raise InputError(f"workdir {workdir} holds no tokenizer/; train there first, or restore it")
    tasks = harness.load_tasks(flags.tasks, flags.num_fewshot, flags.include_path, flags.limit)
    folder = parse_path(flags.output, "--output") if flags.output else workdir / "lm_eval"
    run = _load_run(workdir, tokenizer, grids, flags, tasks.methods)
    for scheme, num_steps in grids:
        on_grid = run.at_depth(num_steps, scheme)
        values = harness.evaluate_run_on_tasks(on_grid, tokenizer, flags.batch_size, tasks, folder)
        if jax.process_index() == 0:
            print(json.dumps(values), flush=True)


def evaluate_grids(workdir: AnyPath, grids: Grids, flags: FlagValues) -> None:
    """Prints a line of JSON per grid, and a table if there are several; draws a figure if asked."""
    if flags.plot:
        import_plots("--plot", "depth_plots")
    corpus = load_corpus(workdir)
    run = _load_run(workdir, corpus.tokenizer, grids, flags)
    results = []
    for scheme, num_steps in grids:
        values = _evaluate_grid(run, corpus, num_steps, scheme, flags)
        results.append(values)
        steps = f"{values['num_steps']} steps of " if "num_steps" in values else ""
        say(f"{steps}{values['scheme']}: perplexity {values['eval/perplexity']:.2f}")
        if jax.process_index() == 0:
            print(json.dumps(values), flush=True)
    if jax.process_index() != 0:
        return
    trained = run.placed.config
    if "num_steps" in results[0] and (len(results) > 1 or flags.plot):
        _show_table(results, flags.plot, trained)
    if not is_smooth(trained) and not all(_is_trained(values, trained) for values in results):
        say(f"warning: {off_grid_warning(trained)}")
