"""Repeats an experiment of the paper: --experiment=figure5 --output=DIR --text=NAME=PATH.

Each run is done once, even if several experiments in one DIR need it, and the same command again
continues where it stopped. At the end it prints tables and writes them (tables.md) with the figures
(figure1.png, .pdf, ...) to DIR/figure5.
"""

from absl import flags

from t5x_diffeq.runtime import command_line, run_flags
from t5x_diffeq.runtime.errors import InputError

EXPERIMENTS = (
    "table1",
    "table2",
    "budgets",
    "equal_time",
    "ladder",
    "controls",
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
FLAGS = flags.FlagValues()
_EXPERIMENT = flags.DEFINE_string(
    "experiment", None, f"One of {', '.join(EXPERIMENTS)}.", flag_values=FLAGS
)
_OUTPUT = flags.DEFINE_string(
    "output", None, "Folder for workdirs, logs, results, tables and figures.", flag_values=FLAGS
)
_SCALE = flags.DEFINE_string(
    "scale", "laptop", "Scale: laptop, or paper for the paper's sizes.", flag_values=FLAGS
)
_TEXT = flags.DEFINE_multi_string(
    "text",
    [],
    "NAME=PATH of a text, or NAME=SOURCE:PATH with a SOURCE of data.source; may be repeated. "
    "In PATH, {tokenizer} stands for gpt2 or llama.",
    flag_values=FLAGS,
)
_SEEDS = flags.DEFINE_integer(
    "seeds",
    None,
    "Number of seeds per training. [default: 3 at laptop scale, 1 at paper scale]",
    flag_values=FLAGS,
)
_TOKENIZERS = flags.DEFINE_string(
    "tokenizers",
    "tokenizers",
    "At paper scale: the folder with the paper's tokenizers, gpt2.json and llama.model, or 'own' "
    "to train tokenizers on the text.",
    flag_values=FLAGS,
)
_PART = run_flags.define_part(FLAGS)
run_flags.define_dry_run(FLAGS)


def main() -> int:
    """Runs the verb."""
    if _SCALE.value not in _SCALES:
        raise InputError(f"--scale={_SCALE.value} must be laptop or paper")
    if _EXPERIMENT.value not in EXPERIMENTS:
        raise InputError(f"--experiment={_EXPERIMENT.value} must be {', '.join(EXPERIMENTS)}")
    output, own_part = (
        command_line.parse_folder(_OUTPUT, "reproduce"),
        command_line.parse_part(_PART),
    )

    from t5x_diffeq.verbs.reproduce import reproduce  # importing JAX takes seconds

    return reproduce(output, own_part, FLAGS)


if __name__ == "__main__":
    command_line.run(main, __doc__, FLAGS)
