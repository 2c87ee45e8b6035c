"""How a study is run: with the flags of `reproduce`, in the folder of its runs."""

from collections.abc import Callable, Mapping

from t5x_diffeq.cli import command_line
from t5x_diffeq.cli.reproduce import ExperimentFlags, carry_out_at_scale
from t5x_diffeq.experiments.experiment import RATE_NAME, Experiment, Keys, Sweep, Trainee
from t5x_diffeq.experiments.present import TableSpec

Models = Mapping[str, tuple[str, Keys]]  # by name, the variant and the keys that it sets
_MUON_RATES = (1.6e-2, 8e-3, 3.2e-2)  # with which a sweep begins


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


def sweep_of_widths(
    models: Callable[[int], Models], every: Keys, widths: tuple[int, ...] = (48, 64), seeds: int = 3
) -> Sweep:
    """The same sweep of Muon's learning rate for each of the models, on configs/ladder.py.

    Args:
      models: the models of a width.
      every: the keys that all models set, which a model's own may replace.
      widths: the widths.
      seeds: the number of seeds.
    """
    keys = {"optimizer.name": "muon", "optimizer.weight_decay": 0.1, **every}
    return Sweep(
        trainings=tuple(
            Trainee(
                f"{variant}-{width}", {**keys, **own}, f"{name}, {width}", "ladder.py", _MUON_RATES
            )
            for width in widths
            for name, (variant, own) in models(width).items()
        ),
        tables=(TableSpec(("model",), "text", "loss", RATE_NAME),),
        seeds=seeds,
    )
