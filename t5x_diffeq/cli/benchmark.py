"""Times a config's train step against its per-layer baseline's, in one run: --config=FILE.

Steps of the two models alternate, so noise on the machine affects both. Prints a table on standard
error and one JSON object per model on standard output. --against, which may be repeated, compares
with other configs instead. --generation times token generation instead, with a cache and without
one. --profile=DIR also traces a few steps of each model into DIR, for TensorBoard (XProf).
"""

from absl import flags
from ml_collections.config_flags import config_flags

from t5x_diffeq.runtime import command_line
from t5x_diffeq.runtime.config import Config
from t5x_diffeq.runtime.config_files import load_config
from t5x_diffeq.runtime.errors import InputError
from t5x_diffeq.runtime.files import parse_path
from t5x_diffeq.runtime.grid import parse_value, split_values
from t5x_diffeq.runtime.keys.values import INT32
from t5x_diffeq.runtime.mistakes import check_keys

FLAGS = flags.FlagValues()
CONFIG = config_flags.DEFINE_config_file(
    "config", None, "Config file of the model.", flag_values=FLAGS
)
_AGAINST = flags.DEFINE_multi_string(
    "against",
    [],
    "Another config to compare with, such as configs/tiny.py:compact or, with other values, "
    "configs/tiny.py:ode,train.velocity_penalty=0.1 (with semicolons if a value has commas); "
    "--config.KEY=VALUE doesn't change it.",
    flag_values=FLAGS,
)
_GENERATION = flags.DEFINE_bool("generation", False, "Time generation.", flag_values=FLAGS)
_ROUNDS = flags.DEFINE_integer(
    "rounds", 20, "Number of timed steps of each model, or of tokens.", 1, INT32, flag_values=FLAGS
)
_PROFILE = flags.DEFINE_string(
    "profile", None, "Folder for traces of some steps of each model.", flag_values=FLAGS
)


def main() -> None:
    """Runs the verb."""
    if CONFIG.value is None:
        raise InputError("benchmark needs --config=FILE; see --help")
    if _GENERATION.value and _PROFILE.value:
        raise InputError(
            f"--profile={_PROFILE.value} traces optimizer steps, which --generation doesn't take; "
            "leave one of them out"
        )
    if _GENERATION.value and _AGAINST.value:
        raise InputError(
            f"--against={_AGAINST.value[0]} compares optimizer steps, which --generation doesn't "
            "take; leave one of them out"
        )
    traces = None if _PROFILE.value is None else parse_path(_PROFILE.value, "--profile")

    from t5x_diffeq.verbs import benchmark  # importing JAX takes seconds

    config = Config.of(CONFIG.value)
    if _GENERATION.value:
        benchmark.show_generation(config, _ROUNDS.value)
    else:
        others = {given: _config_of(given) for given in _AGAINST.value}
        benchmark.show_comparison(config, others, _ROUNDS.value, traces)


def _config_of(given: str) -> Config:
    """The config of `FILE`, `FILE:VARIANT` or `FILE:VARIANT,KEY=VALUE,...`."""
    file, *assignments = split_values(given)
    values = {}
    for key, equals, text in (assignment.partition("=") for assignment in assignments):
        if not equals:
            raise InputError(
                f"--against={given}: {key!r} is not KEY=VALUE; if a value has commas, separate "
                "FILE and all KEY=VALUE by semicolons"
            )
        check_keys(["", f"--config.{key}="])
        values[key] = parse_value(key, text)
    return load_config(file, values)


if __name__ == "__main__":
    command_line.run(main, __doc__, FLAGS)
