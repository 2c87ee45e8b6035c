"""How a study is run: with the flags of `reproduce`, in the folder of its runs."""

from absl import flags

from t5x_diffeq.cli.reproduce import check_flags, define_flags
from t5x_diffeq.experiments.experiment import Experiment
from t5x_diffeq.runtime import command_line
from t5x_diffeq.verbs.reproduce import reproduce


def run_study(name: str, doc: str, laptop: Experiment, paper: Experiment) -> None:
    """Carries out a study at the scale that is asked for, and exits.

    Args:
      name: the study's name.
      doc: what `--help` prints above the flags.
      laptop: its experiment at a laptop's scale.
      paper: its experiment at the paper's scale.
    """
    own = flags.FlagValues()
    define_flags(own)
    own.set_default("output", "reproduced")

    def main() -> int:
        output, part = check_flags(own)
        return reproduce(name, paper if own.scale == "paper" else laptop, output, part, own)

    command_line.run(main, doc, own)
