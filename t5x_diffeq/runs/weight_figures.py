"""Figures of the weights while a model trains: `train.figure_every`."""

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, ClassVar

from t5x_diffeq.analysis.weight_paths import WeightPaths, make_weight_paths
from t5x_diffeq.runs.hooks import Hook, LoopPosition, Training
from t5x_diffeq.runtime.config import Config
from t5x_diffeq.runtime.errors import InputError
from t5x_diffeq.tracking.figures import check_matplotlib
from t5x_diffeq.training.setup import Setup

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class WeightFigures(Hook):
    """Draws the weights of a run: images `weights/path`, `weights/qk` and the like."""

    name: ClassVar[str] = "figures"

    def __init__(self, training: Training):
        super().__init__(training, training.config.train.figure_every)
        model, mesh = training.setup.model, training.setup.mesh
        self.moves = model.config.weights != "shared"  # whether W(t) does
        self.weight_paths = make_weight_paths(model, mesh)

    @classmethod
    def check(cls, config: Config, setup: Setup) -> None:
        """Refuses figures without matplotlib, or without a tracker that shows them."""
        train = config.train
        if train.figure_every is None:
            return
        if not train.trackers:
            raise InputError(
                f"train.figure_every={train.figure_every} needs a tracker that shows figures; set "
                "train.trackers, or leave it out"
            )
        check_matplotlib(f"train.figure_every={train.figure_every}")

    def run(self, position: LoopPosition) -> None:
        """Computes what is drawn, and has it drawn in the background."""
        step, writer = position.step, self.training.writer
        paths = self.weight_paths(position.state.params)
        if self.moves:
            writer.draw(step, "weights/path", partial(_draw, "weight_paths", paths))
        for product in paths.products:
            make = partial(_draw, "product_spectra", paths, product)
            writer.draw(step, f"weights/{product}", make)


def _draw(name: str, paths: WeightPaths, *arguments: str) -> "Figure":
    """A figure of `analysis.plots`, imported here because that takes a second."""
    from t5x_diffeq.analysis import plots

    make: Callable[..., Figure] = getattr(plots, name)
    return make(paths, *arguments)
