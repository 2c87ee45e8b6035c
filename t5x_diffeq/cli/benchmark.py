"""Times a config's train step against its per-layer baseline's, in one run: --config=FILE.

Steps of the two models alternate, so noise on the machine affects both. Prints a table on standard
error and one JSON object per model on standard output. --against, which may be repeated, compares
with other configs instead.
"""

import json
from collections.abc import Mapping
from typing import Any

from t5x_diffeq.cli.verb_flags import VerbFlags
from t5x_diffeq.config.config import Config, check_key, parse_value
from t5x_diffeq.config.config_files import load_config
from t5x_diffeq.config.keys.values import INT32
from t5x_diffeq.experiments.grid import split_values
from t5x_diffeq.system.console import align, format_count, log, print_result
from t5x_diffeq.system.errors import InputError

FLAGS = VerbFlags(__name__)
CONFIG = FLAGS.define_config("Config file of the model.")
_AGAINST = FLAGS.define_texts(
    "against",
    "Another config to compare with, such as configs/tiny.py:compact or, with other values, "
    "configs/tiny.py:ode,train.velocity_penalty=0.1 (with semicolons if a value has commas); "
    "--config.KEY=VALUE doesn't change it.",
)
_ROUNDS = FLAGS.define_integer("rounds", "Number of timed steps of each model.", 20, 1, INT32)


def main() -> None:
    """Runs the verb."""
    if CONFIG.value is None:
        raise InputError("benchmark needs --config=FILE; see --help")
    config = Config.of(CONFIG.value)
    others = {given: _config_of(given) for given in _AGAINST.value}
    show_comparison(config, others, _ROUNDS.value)


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
        check_key(key)
        values[key] = parse_value(key, text)
    if not file or file.startswith(":"):
        raise InputError(f"--against={given} names no file; write FILE:VARIANT")
    try:
        return load_config(file, values)
    except InputError as error:
        raise InputError(f"--against={given}: {error}") from error


def _format_cell(result: dict[str, Any], key: str) -> str:
    from t5x_diffeq.planner.comparison import RATIO

    values = result[key] if isinstance(result[key], list) else [result[key]]
    ratio = result["name"].startswith(RATIO)
    return " to ".join(f"{each:.3f}" if ratio else format_count(each) for each in values)


def show_comparison(config: Config, others: Mapping[str, Config], rounds: int) -> None:
    """Prints a table with a line per model and per ratio."""
    from t5x_diffeq.planner.comparison import compare_models

    results = compare_models(config, others, rounds)
    keys = list(results[0])[1:]
    lines = [["", *keys]]
    lines += [[r["name"], *(_format_cell(r, key) for key in keys)] for r in results]
    log(*align(lines))
    for result in results:
        print_result(json.dumps(result))
