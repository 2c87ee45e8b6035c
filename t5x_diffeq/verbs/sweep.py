"""Trains every point of a grid with several seeds, and shows the results."""

import shlex
from collections.abc import Sequence

from absl.flags import FlagValues

from t5x_diffeq.data.examples import check_data
from t5x_diffeq.data.sources import check_paths
from t5x_diffeq.experiments.child import StoppedError
from t5x_diffeq.experiments.drawing import draw
from t5x_diffeq.experiments.grid_runs import (
    GridSweep,
    best_of,
    check_same,
    figure_spec,
    format_table,
    summarise,
)
from t5x_diffeq.experiments.runs import ExperimentRun, carry_out, finished, part_of, read_results
from t5x_diffeq.models.config import ModelConfig
from t5x_diffeq.runtime.config_files import load_config
from t5x_diffeq.runtime.console import say
from t5x_diffeq.runtime.errors import InputError, RunError
from t5x_diffeq.runtime.files import AnyPath, write_whole
from t5x_diffeq.runtime.grid import points
from t5x_diffeq.training.config_checks import check_new
from t5x_diffeq.training.depths import check_depths
from t5x_diffeq.training.setup import expected_vocab_size


def sweep(plan: GridSweep, output: AnyPath, part: tuple[int, int], flags: FlagValues) -> int:
    """Carries out the runs of a sweep, then presents them; returns the exit status.

    Args:
      plan: the sweep.
      output: the folder of the runs.
      part: (i, n), the i-th of n parts of the runs.
      flags: the verb's flags.

    Raises:
      InputError: if a point can't be trained, or runs were done with other settings.
      RunError: if runs failed for another reason than a loss that isn't finite.
    """
    if plan.verb == "train":
        _check_points(plan)
    runs, (i, n) = plan.runs(), part
    mine = part_of(runs, i, n)
    if flags.dry_run:
        print(*(shlex.join(run.command(output)) for run in mine), sep="\n")
        return 0
    check_same(runs, finished(read_results(output)))
    if flags.table_only:
        if not read_results(output):
            raise InputError(f"--output={output}: no run is done there yet; leave out --table_only")
        _present(plan, output)
        return 0
    results = "results.jsonl" if n == 1 else f"results-{i}.jsonl"
    try:
        carry_out(mine, output, results, go_on=True)
    except StoppedError as stopped:
        say("stopped, saved; the same command continues")
        return stopped.status
    missing = [run for run in runs if run.name not in read_results(output)]
    if missing:
        say(
            f"this part is done; {len(missing)} runs of other parts are not; once they are, the "
            "same command makes the table (--table_only makes it now)"
        )
    else:
        _present(plan, output)
    _check_failed(mine, output)
    return 0


def _check_points(plan: GridSweep) -> None:
    """Checks what can be checked of every point's config before any of them is trained.

    It must not start JAX's devices, which the runs need for themselves.
    """
    for point in points(plan.axes):
        config = load_config(*plan.config_of(point))
        ModelConfig.of(config.model, expected_vocab_size(config), config.data.sequence_length)
        check_new(config)
        check_depths(config)
        check_data(config.data)
        check_paths(config.data)


def _check_failed(runs: Sequence[ExperimentRun], output: AnyPath) -> None:
    """Raises a `RunError` if some of the runs failed."""
    found = read_results(output)
    if failed := [run.name for run in runs if "failed" in found[run.name]]:
        raise RunError(
            f"{len(failed)} of {len(runs)} runs failed: {', '.join(failed)}; their logs in "
            f"{output} say why, and the same command tries them again"
        )


def _present(plan: GridSweep, output: AnyPath) -> None:
    """Prints the table; writes it and the figures."""
    runs, axes, found = plan.runs(), plan.axes, read_results(output)
    summaries = summarise(runs, found, axes)
    table = format_table(summaries, axes)
    write_whole(output / "sweep.md", f"{table}\n".encode())
    outcomes = [{**found[run.name], **run.labels} for run in runs if run.name in found]
    spec = figure_spec(axes)
    draw(outcomes, spec, output / "sweep", output)
    print(table, flush=True)
    best = best_of(summaries)
    where = f"table and figures in {output}: sweep.md, sweep.png"
    if best and axes:
        choices = zip(axes, best.labels, strict=True)
        said = ", ".join(f"{axis.key}={label}" for axis, label in choices)
        say(f"best: {said}; {where}")
    else:
        say(where)
    if axes and len(plan.seeds) == 1:
        say("with one seed, a difference may be chance: --seeds=3 gives means and standard errors")
