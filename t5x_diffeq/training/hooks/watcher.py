"""Hooks that record curves over depth and figures of the weights while a model trains."""

import threading
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, ClassVar

import jax
import numpy as np

from t5x_diffeq.analysis.weight_paths import WeightPaths, make_weight_paths
from t5x_diffeq.checkpoints.stored import TrainState
from t5x_diffeq.cluster.processes import gather
from t5x_diffeq.config.config import Config
from t5x_diffeq.model.language_model import nodes
from t5x_diffeq.model.layers.array_types import Weights
from t5x_diffeq.model.ode.sources import source_of
from t5x_diffeq.system.console import log
from t5x_diffeq.system.extras import need_package
from t5x_diffeq.system.files import describe_error
from t5x_diffeq.training.hooks.hook import DoneStep, Hook, LoopPosition, Training
from t5x_diffeq.training.objective import Batch
from t5x_diffeq.training.setup import Setup
from t5x_diffeq.training.watch import Curves, Programs, compile_programs

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_PREFIX = "watch/"  # the prefix of the curves' names


class Watcher(Hook):
    """Records the curves of every `train.watch_every`-th step (`training/watch.py`).

    Its two programs run around such a step. They are compiled in a thread.
    """

    name: ClassVar[str] = "watch"

    def __init__(self, training: Training):
        super().__init__(training)
        self.watch_every = training.config.train.watch_every
        self.curves: dict[int, Curves] = {}  # by step, until they are written
        self.weights: Weights | None = None  # before the step under way, if it is watched
        self.programs: Programs | None = None
        self.failure: Exception | None = None
        self.is_ready: bool | None = None  # whether all processes have programs; None: not asked
        self.compiling = threading.Thread(target=self._compile, daemon=True)

    def __enter__(self) -> "Watcher":
        if self.watch_every:
            self.compiling.start()
        return self

    def _compile(self) -> None:
        setup, batch_size = self.training.setup, self.training.config.train.batch_size
        try:
            with setup.context():
                self.programs = compile_programs(setup, batch_size)
        except Exception as error:
            self.failure = error  # `_wait_for_programs` reports it

    def _wait_for_programs(self) -> bool:
        """Whether all processes have their programs.

        One process may compile for a minute longer than another, and Gloo's collectives don't wait
        that long.
        """
        self.compiling.join()
        if self.failure is not None:
            reason = describe_error(self.failure)
            log(f"warning: train.watch_every: only gradients have curves, because of {reason}")
        return all(gather("whether train.watch_every is compiled", self.programs is not None))

    def _is_watched(self, step: int) -> bool:
        return self.watch_every is not None and step % self.watch_every == 0

    def before_step(self, step: int, state: TrainState, batch: Batch) -> None:
        """Computes the curves of the parameters and of a forward pass."""
        self.weights = None
        if not self._is_watched(step):
            return
        if self.is_ready is None:
            self.is_ready = self._wait_for_programs()
        if not self.is_ready:
            return
        # No other program may run beside these two: with Gloo, processes pair collectives in the
        # order in which they come, so a program could wait for a collective of the other program.
        assert self.programs is not None
        self.weights, curves = jax.block_until_ready(self.programs.before(state.params, batch))
        self.curves[step] = curves

    def after_step(self, step: int, state: TrainState, metrics: Mapping[str, jax.Array]) -> None:
        """Adds the curves of the update."""
        if not self._is_watched(step):
            return
        curves = {name: x for name, x in metrics.items() if x.ndim}
        if self.programs is not None and self.weights is not None:
            weights, self.weights = self.weights, None
            curves |= self.curves[step]
            curves |= jax.block_until_ready(self.programs.after(state.params, weights))
        self.curves[step] = curves

    def go_back(self, step: int) -> None:
        """Forgets the curves that aren't written."""
        self.curves.clear()

    def report(self, done: DoneStep, values: dict[str, float]) -> None:
        """Writes the curves of a step that was watched, and their figure."""
        curves = self.curves.pop(done.step, None)
        if curves is None or jax.process_index() != 0:
            return
        named = {f"{_PREFIX}{name}": x for name, x in jax.device_get(curves).items()}
        self.training.writer.write_summaries(done.step, named)
        config = self.training.setup.model.config
        times = nodes(config) if source_of(config).any_time else None
        draw = partial(_draw_curves, done.step, named, times)
        self.training.writer.draw(done.step, f"{_PREFIX}curves", draw)


def _draw_curves(step: int, curves: Mapping[str, np.ndarray], times: np.ndarray | None) -> "Figure":
    """The figure of a step; matplotlib is imported only here, because its import takes a second."""
    from t5x_diffeq.analysis.run_plots import figure_of_curves

    by_layer = {name.removeprefix(_PREFIX): curve for name, curve in curves.items()}
    return figure_of_curves(by_layer, times, f"step {step}")


class WeightFigures(Hook):
    """Draws the weights: `weights/path`, `weights/qk` and the like (`train.figure_every`)."""

    name: ClassVar[str] = "figures"

    def __init__(self, training: Training):
        super().__init__(training, training.config.train.figure_every)
        model, mesh = training.setup.model, training.setup.mesh
        self.moves = not source_of(model.config).constant  # whether W(t) changes with t
        self.weight_paths = make_weight_paths(model, mesh)

    @classmethod
    def check(cls, config: Config, setup: Setup) -> None:
        """Checks that matplotlib is installed, if figures are asked for."""
        if (every := config.train.figure_every) is not None:
            need_package("matplotlib", f"train.figure_every={every}", "leave it out")

    def run(self, position: LoopPosition) -> None:
        """Computes what is drawn, and has it drawn in the background."""
        step, writer = position.step, self.training.writer
        paths = self.weight_paths(position.state.params)
        if self.moves:
            writer.draw(step, "weights/path", partial(_draw_weights, "weight_paths", paths))
        for product in paths.products:
            make = partial(_draw_weights, "product_spectra", paths, product)
            writer.draw(step, f"weights/{product}", make)


def _draw_weights(name: str, paths: WeightPaths, *arguments: str) -> "Figure":
    """A figure of `analysis.depth_plots`, whose import takes a second and is left until here."""
    from t5x_diffeq.analysis import depth_plots

    make: Callable[..., Figure] = getattr(depth_plots, name)
    return make(paths, *arguments)
