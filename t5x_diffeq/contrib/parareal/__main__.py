"""Compares parareal with a trained run's serial pass: --workdir=DIR --output=OUT.

Writes arrays, a figure and one page that shows them, parareal.html. Prints the iterations that are
needed and the speed as JSON, and then the path of the page. Needs matplotlib:
pip install 't5x_diffeq[analysis]'.
"""

from absl import flags

from t5x_diffeq.runtime import command_line, run_flags
from t5x_diffeq.runtime.extras import need_package
from t5x_diffeq.runtime.keys.values import STEPS

FLAGS = flags.FlagValues()
_WORKDIR = run_flags.define_workdir(FLAGS)
_OUTPUT = flags.DEFINE_string("output", None, "Folder for the results.", flag_values=FLAGS)
_SLICES = flags.DEFINE_integer(
    "slices",
    None,
    "Number of slices of depth that are integrated in parallel. [default: that with which one "
    "iteration has the fewest steps in sequence]",
    1,
    STEPS,
    flag_values=FLAGS,
)
_NUM_STEPS = run_flags.define_num_steps(FLAGS)
_CHECKPOINT = run_flags.define_checkpoint(FLAGS)


def main() -> None:
    """The command."""
    workdir = command_line.parse_folder(_WORKDIR, "parareal")
    output = command_line.parse_folder(_OUTPUT, "parareal")
    need_package("matplotlib", "parareal")

    from t5x_diffeq.contrib.parareal import report  # JAX and the rest take seconds

    report.write(workdir, output, _SLICES.value, _NUM_STEPS.value, _CHECKPOINT.value)


if __name__ == "__main__":
    command_line.run(main, __doc__, FLAGS)
