"""How a study is run: with the flags of `reproduce`, in the folder of its runs."""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import NamedTuple

from t5x_diffeq.cli import command_line
from t5x_diffeq.cli.reproduce import ExperimentFlags, carry_out_at_scale
from t5x_diffeq.experiments.experiment import RATE_NAME, Experiment, Keys, Sweep, Trainee
from t5x_diffeq.experiments.present import TableSpec


class Model(NamedTuple):
    """A model of a study."""

    variant: str
    keys: Keys = MappingProxyType({})  # that it sets
    steps: float = 1.0  # its optimizer steps, over GPT's


Models = Mapping[str, Model]  # by name
_STEPS = "train.total_steps"
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


class Scale(NamedTuple):
    """The widths at which models train, and their optimizer steps, over those of the ladder."""

    widths: tuple[int, ...]
    length: float


_LAPTOP = Scale((32, 48), 0.5)  # as in `studies.structures`
_PAPER = Scale((48, 64), 1.0)


def sweeps_at_two_scales(
    models: Callable[[int], Models],
    every: Keys | None = None,
    seeds: int = 3,
    laptop: Scale = _LAPTOP,
    paper: Scale = _PAPER,
) -> tuple[Sweep, Sweep]:
    """The same sweep of Muon's learning rate for each of the models, on configs/ladder.py.

    Args:
      models: the models of a width.
      every: the keys that all models set, which a model's own may replace.
      seeds: the number of seeds.
      laptop: the scale of the first sweep.
      paper: the scale of the second sweep.
    """
    keys = {
        "optimizer.name": "muon",
        "optimizer.weight_decay": 0.1,
        "train.velocity_penalty": 0.0,
        **(every or {}),
    }

    def sweep(scale: Scale) -> Sweep:
        return Sweep(
            trainings=tuple(
                Trainee(
                    f"{model.variant}-{width}",
                    {**keys, **lengthened(scale.length * model.steps), **model.keys},
                    f"{name}, {width}",
                    "ladder.py",
                    _MUON_RATES,
                )
                for width in scale.widths
                for name, model in models(width).items()
            ),
            tables=(TableSpec(("model",), "text", "loss", RATE_NAME),),
            seeds=seeds,
        )

    return sweep(laptop), sweep(paper)


def lengthened(times: float) -> Keys:
    """The key that makes a training so many times as long as its config has it."""
    return {_STEPS: lambda values: round(times * values[_STEPS])}
