"""Looks inside the model of a run every `train.watch_every` steps (`training/watch.py`)."""

import threading
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import jax
import numpy as np

from t5x_diffeq.models.language_model import nodes
from t5x_diffeq.runtime.console import say
from t5x_diffeq.runtime.files import describe_error
from t5x_diffeq.training.setup import Setup
from t5x_diffeq.training.state import TrainState
from t5x_diffeq.training.watch import Curves, Programs, compile_programs

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_PREFIX = "watch/"  # of the curves' names


@runtime_checkable
class CurveWriter(Protocol):
    """What curves are written to."""

    def write_summaries(self, step: int, values: Mapping[str, np.ndarray]) -> None:
        """Writes arrays by name."""

    def draw(self, step: int, name: str, make: Callable[[], "Figure"]) -> None:
        """Has a figure made and written, in the background."""


class Watcher:
    """Runs the optimizer steps, and records the curves of those to watch.

    Args:
      setup: the run's setup; the programs are compiled in a thread, in its context.
      batch_size: sequences per step.
    """

    def __init__(self, setup: Setup, batch_size: int):
        self.every, self.setup = setup.config.train.watch_every, setup
        self.found: dict[int, Curves] = {}  # by step, until they are written
        self.programs: Programs | None = None
        self.failure: Exception | None = None
        self.compiling = threading.Thread(target=self._compile, args=(batch_size,), daemon=True)
        if self.every:
            self.compiling.start()

    def _compile(self, batch_size: int) -> None:
        try:
            with self.setup.context():
                self.programs = compile_programs(self.setup, batch_size)
        except Exception as error:
            self.failure = error  # said where the programs are needed

    def run(
        self, step: int, train_step: Callable[..., tuple], state: TrainState, *arguments: Any
    ) -> tuple:
        """The state after `step`, and its metrics; every process must call it.

        Args:
          step: the optimizer step.
          train_step: the compiled train step.
          state: the state before; it is donated.
          *arguments: the batch and, with a teacher, the teacher's parameters.
        """
        if not self.every:
            return train_step(state, *arguments)
        if step % self.every:
            return train_step(state, *arguments)[:2]
        self.compiling.join()
        if self.programs is None:
            return self._watch_the_gradient(step, train_step, state, *arguments)
        # No other program runs beside these two: CPU devices of several processes pair collectives
        # in the order in which they come (Gloo's), and one program then waits for the other's.
        kept, curves = jax.block_until_ready(self.programs.before(state.params, arguments[0]))
        state, metrics, of_gradient = train_step(state, *arguments)
        change = jax.block_until_ready(self.programs.after(state.params, kept))
        self.found[step] = {**of_gradient, **curves, **change}
        return state, metrics

    def _watch_the_gradient(
        self, step: int, train_step: Callable[..., tuple], state: TrainState, *arguments: Any
    ) -> tuple:
        """What `run` does if the programs can't be compiled: only the gradient is watched."""
        if self.failure is not None:
            reason, self.failure = describe_error(self.failure), None
            say(f"warning: train.watch_every: only the gradient has curves, because of {reason}")
        state, metrics, self.found[step] = train_step(state, *arguments)
        return state, metrics

    def forget(self) -> None:
        """Forgets the steps that aren't written, because the run goes back."""
        self.found.clear()

    def write(self, step: int, writer: CurveWriter) -> None:
        """Writes the curves of `step`, if it was watched and they haven't been written yet."""
        found = self.found.pop(step, None)
        if found is None or jax.process_index() != 0:
            return
        curves = {f"{_PREFIX}{name}": x for name, x in jax.device_get(found).items()}
        writer.write_summaries(step, curves)
        config = self.setup.model.config
        depth = None if config.weights == "per_layer" else nodes(config)
        writer.draw(step, f"{_PREFIX}curves", partial(_draw, step, curves, depth))


def _draw(step: int, curves: Mapping[str, np.ndarray], times: np.ndarray | None) -> "Figure":
    """The figure of a step, whose module is imported only here because that takes a second."""
    from t5x_diffeq.analysis.curves import figure_of_curves

    own = {name.removeprefix(_PREFIX): curve for name, curve in curves.items()}
    return figure_of_curves(own, times, f"step {step}")
