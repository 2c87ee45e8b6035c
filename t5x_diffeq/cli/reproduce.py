"""Repeats an experiment of the paper: --experiment=figure5 --output=DIR --text=NAME=PATH.

Each run is done once, even if several experiments in one DIR need it, and the same command again
continues where it stopped. At the end it prints tables and writes them (tables.md) with the figures
(figure1.png, .pdf, ...) to DIR/figure5.
"""

from absl import flags

from t5x_diffeq.runtime import command_line, run_flags
from t5x_diffeq.runtime.errors import InputError
from t5x_diffeq.runtime.files import AnyPath

EXPERIMENTS = (
    "table1",
    "table2",
    "table4",
    "table5",
    "figure2",
    "figure3",
    "figure4",
    "figure5",
    "figure7",
    "figure8",
    "figure13",
    "figure14",
    "figure15",
    "figure18",
    "appendixE",
    "appendixF",
)
_SCALES = ("laptop", "paper")
CHOICES = {"experiment": EXPERIMENTS, "scale": _SCALES}  # for completion


def define_flags(own: flags.FlagValues) -> None:
    """Defines the flags of an experiment, but for its name."""
    flags.DEFINE_string(
        "output", None, "Folder for workdirs, logs, results, tables and figures.", flag_values=own
    )
    flags.DEFINE_string(
        "scale", "laptop", "Scale: laptop, or paper for the paper's sizes.", flag_values=own
    )
    flags.DEFINE_multi_string(
        "text",
        [],
        "NAME=PATH of a text, or NAME=SOURCE:PATH with a SOURCE of data.source; may be repeated. "
        "In PATH, {tokenizer} stands for gpt2 or llama.",
        flag_values=own,
    )
    flags.DEFINE_integer(
        "seeds",
        None,
        "Number of seeds per training. [default: 3 at laptop scale, 1 at paper scale]",
        flag_values=own,
    )
    flags.DEFINE_string(
        "tokenizers",
        "tokenizers",
        "At paper scale: the folder with the paper's tokenizers, gpt2.json and llama.model, or "
        "'own' to train tokenizers on the text.",
        flag_values=own,
    )
    run_flags.define_part(own)
    run_flags.define_dry_run(own)


def check_flags(own: flags.FlagValues) -> tuple[AnyPath, tuple[int, int]]:
    """The folder of the runs, and the part of them that is asked for.

    Raises:
      InputError: if the scale, the folder or the part can't be used.
    """
    if own.scale not in _SCALES:
        raise InputError(f"--scale={own.scale} must be laptop or paper")
    return command_line.parse_folder(own["output"], "reproduce"), command_line.parse_part(
        own["part"]
    )


FLAGS = flags.FlagValues()
_EXPERIMENT = flags.DEFINE_string(
    "experiment", None, f"One of {', '.join(EXPERIMENTS)}.", flag_values=FLAGS
)
define_flags(FLAGS)


def main() -> int:
    """Runs the verb."""
    name = _EXPERIMENT.value
    if name not in EXPERIMENTS:
        raise InputError(f"--experiment={name} must be {', '.join(EXPERIMENTS)}")
    output, part = check_flags(FLAGS)

    from t5x_diffeq.verbs.reproduce import SCALES, reproduce  # importing JAX takes seconds

    return reproduce(name, SCALES[FLAGS.scale][name], output, part, FLAGS)


if __name__ == "__main__":
    command_line.run(main, __doc__, FLAGS)
