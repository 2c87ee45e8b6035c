"""Trains every point of a grid with several seeds: --config=FILE --output=DIR --grid=KEY=V1,V2.

--grid may be repeated: --grid optimizer.learning_rate=1e-3,2e-3 --grid model.num_steps=6,12. Values
are separated by commas, or by semicolons. Each run is done once, and the same command continues
where it stopped. At the end it prints a table, and writes it (sweep.md) with figures (sweep.png,
sweep_over_steps.png, and .pdf) to DIR. A run whose loss is no longer finite is marked there.
"""

import shlex

from ml_collections.config_flags import config_flags

from t5x_diffeq.cli import flag_values
from t5x_diffeq.cli.verb_flags import VerbFlags
from t5x_diffeq.config.config import TUNES
from t5x_diffeq.config.config_files import make_config
from t5x_diffeq.config.keys.values import INT32, SEEDS
from t5x_diffeq.config.unread import notes
from t5x_diffeq.experiments.grid import parse_grid, points
from t5x_diffeq.system.console import log, print_result
from t5x_diffeq.system.errors import InputError, RunError
from t5x_diffeq.system.files import BUCKETS, AnyPath, write_whole

FLAGS = VerbFlags(__name__)
CONFIG = FLAGS.define_config("Config file, with a :variant if it has variants.")
_OUTPUT = FLAGS.define_text("output", "Folder for workdirs, logs, results, table and figures.")
_GRID = FLAGS.define_texts(
    "grid", "KEY=V1,V2,... of the config, or variant=V1,V2,... of its file; may be repeated."
)
_SEEDS = FLAGS.define_integer(
    "seeds", "Number of seeds of every point, from config.seed on.", 1, 1, INT32
)
_PART = FLAGS.define_part()
_DRY_RUN = FLAGS.define_dry_run()
_TABLE_ONLY = FLAGS.define_switch(
    "table_only", "Only make the table and figures of runs that are done."
)


def main() -> int:
    """Runs the verb."""
    if CONFIG.value is None:
        raise InputError("sweep needs --config=FILE, --output=DIR and --grid=KEY=V1,V2; see --help")
    if not _GRID.value and _SEEDS.value == 1:
        raise InputError("sweep needs --grid=KEY=V1,V2, or --seeds=N for seeds alone")
    output = flag_values.parse_output_of_runs(_OUTPUT, "sweep")
    part = flag_values.parse_part(_PART)
    overrides = config_flags.get_override_values(FLAGS["config"])
    axes = parse_grid(_GRID.value, overrides)
    file = config_flags.get_config_filename(FLAGS["config"])
    tuned = bool(CONFIG.value.init_from or CONFIG.value.model.num_steps is None)
    verb, first = "finetune" if tuned else "train", CONFIG.value.seed
    if first + _SEEDS.value > SEEDS:
        raise InputError(
            f"--seeds={_SEEDS.value}: with config.seed={first}, seeds go beyond {SEEDS}; lower one"
        )
    seeds = range(first, first + _SEEDS.value)

    from t5x_diffeq.experiments.commands import StoppedError  # importing JAX takes seconds
    from t5x_diffeq.experiments.grid_runs import GridSweep, check_same
    from t5x_diffeq.experiments.runs import carry_out, finished, part_of, read_results

    plan = GridSweep(file, verb, overrides, axes, seeds)
    if verb == "train":
        _check_points(plan)
    runs, (i, n) = plan.runs(), part
    part_runs = part_of(runs, i, n)
    if _DRY_RUN.value:
        print_result("\n".join(shlex.join(run.command(output)) for run in part_runs))
        return 0
    check_same(runs, finished(read_results(output)))
    if _TABLE_ONLY.value:
        if not read_results(output):
            raise InputError(f"--output={output}: no run is done there yet; leave out --table_only")
        _present(plan, output)
        return 0
    results = "results.jsonl" if n == 1 else f"results-{i}.jsonl"
    try:
        carry_out(part_runs, output, results, go_on=True)
    except StoppedError as stopped:
        log("stopped, saved; the same command continues")
        return stopped.status
    outcomes = read_results(output)
    if missing := [run for run in runs if run.name not in outcomes]:
        log(
            f"this part is done; {len(missing)} runs of other parts are not; once they are, the "
            "same command makes the table (--table_only makes it now)"
        )
    else:
        _present(plan, output)
    if failed := [run.name for run in part_runs if "failed" in outcomes[run.name]]:
        raise RunError(
            f"{len(failed)} of {len(part_runs)} runs failed: {', '.join(failed)}; their logs in "
            f"{output} say why, and the same command tries them again"
        )
    return 0


def _check_points(plan) -> None:
    """Checks every point's config before a run begins.

    The checks must not start JAX's devices, because the runs, which are other processes, need them.
    """
    from t5x_diffeq.data.sources import find_text_files
    from t5x_diffeq.model.config import ModelConfig
    from t5x_diffeq.training.checks import run_checks
    from t5x_diffeq.training.setup import expected_vocab_size

    paths: set[str] = set()  # of texts on this machine
    lines: dict[str, None] = {}  # notes, each once
    for point in points(plan.axes):
        config = make_config(*plan.config_of(point))
        lines |= dict.fromkeys(notes(config.flat(), point))
        ModelConfig.of(config.model, expected_vocab_size(config), config.data.sequence_length)
        run_checks("sweep", config)
        if config.init_from:
            raise InputError(
                f"--grid=init_from={config.init_from}: {TUNES}, or to a sweep with --config="
                "configs/finetune.py:full and --config.init_from"
            )
        if config.data.source == "text_files" and BUCKETS not in str(config.data.path):
            paths.add(str(config.data.path))
    log(*lines)
    for path in sorted(paths):
        find_text_files("path", path)


def _present(plan, output: AnyPath) -> None:
    from t5x_diffeq.experiments.drawing import draw
    from t5x_diffeq.experiments.grid_runs import best_of, figure_spec, format_table, summarise
    from t5x_diffeq.experiments.runs import read_results

    runs, axes, results = plan.runs(), plan.axes, read_results(output)
    summaries = summarise(runs, results, axes)
    table = format_table(summaries, axes)
    write_whole(output / "sweep.md", f"{table}\n".encode())
    outcomes = [{**results[run.name], **run.labels} for run in runs if run.name in results]
    draw(outcomes, figure_spec(axes), output / "sweep", output)
    print_result(table)
    where = f"table and figures in {output}: sweep.md, sweep.png"
    if axes and (best := best_of(summaries)):
        choices = zip(axes, best.labels, strict=True)
        values = ", ".join(f"{axis.key}={label}" for axis, label in choices)
        where = f"best: {values}; {where}"
    log(where)
    if axes and len(plan.seeds) == 1:
        log("with one seed, a difference may be chance: --seeds=3 gives means and standard errors")
