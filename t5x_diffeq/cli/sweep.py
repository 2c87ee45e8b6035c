"""Trains every point of a grid with several seeds: --config=FILE --output=DIR --grid=KEY=V1,V2.

--grid may be repeated: --grid optimizer.learning_rate=1e-3,2e-3 --grid model.num_steps=6,12. Values
are separated by commas, or by semicolons. Each run is done once, and the same command continues
where it stopped. At the end it prints a table, and writes it (sweep.md) with figures (sweep.png,
sweep_over_steps.png, and .pdf) to DIR. A run whose loss is no longer finite is marked there.
"""

from absl import flags
from ml_collections.config_flags import config_flags

from t5x_diffeq.runtime import command_line, run_flags
from t5x_diffeq.runtime.errors import InputError
from t5x_diffeq.runtime.files import is_in_bucket
from t5x_diffeq.runtime.grid import parse_grid
from t5x_diffeq.runtime.keys.values import INT32, SEEDS

FLAGS = flags.FlagValues()
CONFIG = config_flags.DEFINE_config_file(
    "config", None, "Config file, with a :variant if it has variants.", flag_values=FLAGS
)
_OUTPUT = flags.DEFINE_string(
    "output", None, "Folder for workdirs, logs, results, table and figures.", flag_values=FLAGS
)
_GRID = flags.DEFINE_multi_string(
    "grid",
    [],
    "KEY=V1,V2,... of the config, or variant=V1,V2,... of its file; may be repeated.",
    flag_values=FLAGS,
)
_SEEDS = flags.DEFINE_integer(
    "seeds", 1, "Number of seeds of every point, from config.seed on.", 1, INT32, flag_values=FLAGS
)
_PART = run_flags.define_part(FLAGS)
run_flags.define_dry_run(FLAGS)
_TABLE_ONLY = flags.DEFINE_boolean(
    "table_only",
    False,
    "Only make the table and figures of runs that are done.",
    flag_values=FLAGS,
)


def main() -> int:
    """Runs the verb."""
    if CONFIG.value is None:
        raise InputError("sweep needs --config=FILE, --output=DIR and --grid=KEY=V1,V2; see --help")
    if not _GRID.value and _SEEDS.value == 1:
        raise InputError("sweep needs --grid=KEY=V1,V2, or --seeds=N for seeds alone")
    output, part = command_line.parse_folder(_OUTPUT, "sweep"), command_line.parse_part(_PART)
    if is_in_bucket(output):
        raise InputError(f"--output={output} is in a bucket; name a folder that all machines see")
    overrides = config_flags.get_override_values(FLAGS["config"])
    axes = parse_grid(_GRID.value, overrides)
    file = config_flags.get_config_filename(FLAGS["config"])

    from t5x_diffeq.verbs.sweep import GridSweep, sweep  # importing JAX takes seconds

    tuned = bool(CONFIG.value.init_from or CONFIG.value.model.num_steps is None)
    verb, first = "finetune" if tuned else "train", CONFIG.value.seed
    if first + _SEEDS.value > SEEDS:
        raise InputError(f"--seeds={_SEEDS.value} from config.seed={first} on goes beyond {SEEDS}")
    seeds = range(first, first + _SEEDS.value)
    return sweep(GridSweep(file, verb, overrides, axes, seeds), output, part, FLAGS)


if __name__ == "__main__":
    command_line.run(main, __doc__, FLAGS)
