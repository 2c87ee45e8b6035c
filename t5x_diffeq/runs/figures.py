"""Figures of the weights while a model trains: `train.figure_every`."""

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from t5x_diffeq.analysis.weight_paths import WeightPaths, make_weight_paths
from t5x_diffeq.runtime.config import TrainKeys
from t5x_diffeq.runtime.errors import InputError
from t5x_diffeq.tracking.figures import check_matplotlib
from t5x_diffeq.tracking.trackers import RunWriter
from t5x_diffeq.training.setup import Setup

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def check_figures(train: TrainKeys) -> None:
    """Checks that figures can be drawn and shown, if the config asks for them.

    Raises:
      InputError: if matplotlib is missing, or there is no tracker.
    """
    if train.figure_every is None:
        return
    if not train.trackers:
        raise InputError(
            f"train.figure_every={train.figure_every} needs a tracker that shows figures; set "
            "train.trackers, or leave it out"
        )
    check_matplotlib(f"train.figure_every={train.figure_every}")


class WeightFigures:
    """Draws the weights of a run.

    Args:
      train: `config.train`.
      setup: the run's setup.
    """

    def __init__(self, train: TrainKeys, setup: Setup):
        self.every = train.figure_every
        self.moves = setup.model.config.weights != "shared"  # whether W(t) does
        self.weight_paths = make_weight_paths(setup.model, setup.mesh)

    def run(self, step: int, params: dict, writer: RunWriter) -> None:
        """Computes what is drawn, which all processes must do, and has it drawn in the background.

        Args:
          step: the optimizer step.
          params: the model's parameters.
          writer: the run's writer; its images are `weights/path` and `weights/qk` and the like.
        """
        found = self.weight_paths(params)
        if self.moves:
            writer.draw(step, "weights/path", partial(_draw, "weight_paths", found))
        for product in found.products:
            make = partial(_draw, "product_spectra", found, product)
            writer.draw(step, f"weights/{product}", make)


def _draw(name: str, found: WeightPaths, *arguments: str) -> "Figure":
    """A figure of `analysis.plots`, imported here because that takes a second."""
    from t5x_diffeq.analysis import plots

    make: Callable[..., Figure] = getattr(plots, name)
    return make(found, *arguments)
