"""Looks inside the model of a run every `train.watch_every` steps (`diagnostics/watch.py`)."""

import threading
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, ClassVar

import jax
import numpy as np

from t5x_diffeq.diagnostics.watch import Curves, Programs, compile_programs
from t5x_diffeq.layers.array_types import Weights
from t5x_diffeq.models.language_model import nodes
from t5x_diffeq.runs.hooks import DoneStep, Hook, Training
from t5x_diffeq.runtime.console import say
from t5x_diffeq.runtime.files import describe_error
from t5x_diffeq.training.objective import Batch
from t5x_diffeq.training.state import TrainState

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_PREFIX = "watch/"  # of the curves' names


class Watcher(Hook):
    """Records the curves of the steps to watch.

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
            self.failure = error  # said where the programs are needed

    def _is_watched(self, step: int) -> bool:
        return self.watch_every is not None and step % self.watch_every == 0

    def before_step(self, step: int, state: TrainState, batch: Batch) -> None:
        """Looks at the parameters and into a forward pass."""
        self.weights = None
        if not self._is_watched(step):
            return
        self.compiling.join()
        if self.programs is None:
            if self.failure is not None:
                reason, self.failure = describe_error(self.failure), None
                say(f"warning: train.watch_every: only gradients have curves, because of {reason}")
            return
        # No other program runs beside these two: CPU devices of several processes pair collectives
        # in the order in which they come (Gloo's), and one program then waits for the other's.
        self.weights, curves = jax.block_until_ready(self.programs.before(state.params, batch))
        self.curves[step] = curves

    def after_step(self, step: int, state: TrainState, metrics: Mapping[str, jax.Array]) -> None:
        """Looks at the update."""
        if not self._is_watched(step):
            return
        curves = {name: x for name, x in metrics.items() if x.ndim}
        if self.programs and self.weights is not None:
            weights, self.weights = self.weights, None
            curves |= self.curves[step]
            curves |= jax.block_until_ready(self.programs.after(state.params, weights))
        self.curves[step] = curves

    def go_back(self, step: int) -> None:
        """Forgets the steps that aren't written."""
        self.curves.clear()

    def report(self, done: DoneStep, values: dict[str, float]) -> None:
        """Writes the curves of a step that was watched, and their figure."""
        curves = self.curves.pop(done.step, None)
        if curves is None or jax.process_index() != 0:
            return
        named = {f"{_PREFIX}{name}": x for name, x in jax.device_get(curves).items()}
        self.training.writer.write_summaries(done.step, named)
        config = self.training.setup.model.config
        times = None if config.weights == "per_layer" else nodes(config)
        draw = partial(_draw, done.step, named, times)
        self.training.writer.draw(done.step, f"{_PREFIX}curves", draw)


def _draw(step: int, curves: Mapping[str, np.ndarray], times: np.ndarray | None) -> "Figure":
    """The figure of a step, whose module is imported only here because that takes a second."""
    from t5x_diffeq.analysis.curves import figure_of_curves

    by_layer = {name.removeprefix(_PREFIX): curve for name, curve in curves.items()}
    return figure_of_curves(by_layer, times, f"step {step}")
