"""Turns documents into token shards: --config=FILE --output=DIR [--shard=3/64].

Tokenises the documents that `config.data` describes once, on all cores. Then train with
--config.data.source=tokens --config.data.path=DIR. The same command again makes only the shards
that are missing. The same input gives the same bytes with any number of workers. --shard=3/64 makes
part 3 of 64 (0 to 63), for an array of jobs; afterwards the command without --shard completes the
folder.
"""

from absl import flags
from ml_collections.config_flags import config_flags

from t5x_diffeq.runtime import command_line
from t5x_diffeq.runtime.config import DataKeys
from t5x_diffeq.runtime.errors import InputError
from t5x_diffeq.runtime.keys.values import MOST_SHARDS, THREADS

FLAGS = flags.FlagValues()
CONFIG = config_flags.DEFINE_config_file(
    "config", None, "Config file; its `data` section describes the documents.", flag_values=FLAGS
)
_OUTPUT = flags.DEFINE_string("output", None, "Folder for the shards.", flag_values=FLAGS)
_SHARDS = flags.DEFINE_integer(
    "shards", 16, "Number of shards of each split.", 1, MOST_SHARDS, flag_values=FLAGS
)
_SHARD = flags.DEFINE_string("shard", None, "Make only part i of n, as i/n.", flag_values=FLAGS)
_WORKERS = flags.DEFINE_integer(
    "workers",
    None,
    "Number of processes. [default: one per core for a large source, else one]",
    1,
    THREADS,
    flag_values=FLAGS,
)


def main() -> None:
    """Runs the verb."""
    if CONFIG.value is None:
        raise InputError("prepare_data needs --config=FILE and --output=DIR; see --help")
    data = DataKeys(**CONFIG.value.data)  # the rest of the config may be incomplete
    folder, part = (
        command_line.parse_folder(_OUTPUT, "prepare_data"),
        command_line.parse_part(_SHARD),
    )
    if part[1] > 2 * _SHARDS.value:
        raise InputError(
            f"--shard={_SHARD.value}: --shards={_SHARDS.value} of each split are too few for "
            f"{part[1]} parts; give every part, and the last command, --shards={part[1]}"
        )

    from t5x_diffeq.verbs.prepare_data import prepare_data  # importing JAX takes seconds

    prepare_data(data, folder, _SHARDS.value, _WORKERS.value, part)


if __name__ == "__main__":
    command_line.run(main, __doc__, FLAGS)
