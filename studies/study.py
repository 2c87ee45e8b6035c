"""How a study is run: with the flags of `reproduce`, in the folder of its runs."""

from t5x_diffeq.cli import command_line
from t5x_diffeq.cli.reproduce import ExperimentFlags, carry_out_at_scale
from t5x_diffeq.experiments.experiment import Experiment


def run_study(name: str, doc: str, laptop: Experiment, paper: Experiment) -> None:
    """Carries out a study at the scale that is asked for, and exits.

    Args:
      name: the study's name.
      doc: what `--help` prints above the flags.
      laptop: its experiment at a laptop's scale.
      paper: its experiment at the paper's scale.
    """
    flags = ExperimentFlags(__name__, output="reproduced")
    scales = {"laptop": laptop, "paper": paper}
    command_line.run(lambda: carry_out_at_scale(name, scales.__getitem__, flags), doc, flags)
