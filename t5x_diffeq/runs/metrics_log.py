"""The line of a step, and its metrics: `train.log_every`."""

from math import isfinite
from statistics import fmean
from typing import ClassVar

from t5x_diffeq.runs.hooks import DoneStep, Hook, Training
from t5x_diffeq.runs.progress import utilisation
from t5x_diffeq.runtime.console import say
from t5x_diffeq.tracking.memory import memory_in_use
from t5x_diffeq.training.depths import depths_of, full_grid_from
from t5x_diffeq.training.objective import Batch
from t5x_diffeq.training.state import TrainState


class MetricsLog(Hook):
    """Prints and writes the metrics of steps, with the run's rates, memory and goodput."""

    name: ClassVar[str] = "train"

    def __init__(self, training: Training):
        super().__init__(training)
        self.full_grid_from = full_grid_from(training.config)

    def before_step(self, step: int, state: TrainState, batch: Batch) -> None:
        """Says from where on the run uses its full grid."""
        if step == self.full_grid_from:
            num_steps = self.training.config.model.num_steps
            say(f"step {step}: from here on, {num_steps} solver steps")

    def report(self, done: DoneStep, values: dict[str, float]) -> None:
        """Logs the step, if it is one of those to log."""
        training, step = self.training, done.step
        keys = training.config.train
        if step == training.start + 1:
            seconds = sum(training.stopwatch.seconds().values())
            say(f"first step done {seconds:.1f} s after the start")
        if step % keys.log_every and step != keys.total_steps:
            return
        rates = training.clock.rates(step)
        rate = rates["tokens_per_second"]
        if keys.depths:
            values["num_steps"] = fmean(depths_of(training.config, step))
        values |= {**rates, "goodput": training.history.goodput()}
        values |= {**utilisation(training.setup, rate), **memory_in_use()}
        finite = {f"train/{name}": x for name, x in values.items() if isfinite(x)}
        training.writer.write_scalars(step, finite)
        training.history.write_time(step)
        say(training.clock.line(step, values["loss"], rate))

    def go_back(self, step: int) -> None:
        """Measures rates from there."""
        self.training.clock.go_back(step)
