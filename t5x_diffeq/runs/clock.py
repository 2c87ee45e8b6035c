"""How fast optimizer steps are taken."""

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from math import isnan

import jax

from t5x_diffeq.runs.goodput import DATA, STEPS
from t5x_diffeq.runs.history import Stopwatch
from t5x_diffeq.runtime.console import format_count, format_duration


class Clock:
    """Measures rates since the last report, and estimates the time left.

    Args:
      total_steps: the step at which training ends.
      tokens_per_step: tokens in the global batch.
      step: the step at which training starts.
      stopwatch: divides the time among activities.
    """

    def __init__(self, total_steps: int, tokens_per_step: int, step: int, stopwatch: Stopwatch):
        self.total_steps, self.tokens_per_step = total_steps, tokens_per_step
        self.stopwatch = stopwatch
        self.go_back(step)

    def go_back(self, step: int) -> None:
        """Measures from here on, where the run is at `step`."""
        self.step, self.before = step, self.stopwatch.seconds()

    @contextmanager
    def waiting_for_data(self, running: object) -> Iterator[None]:
        """A context in which a batch is waited for.

        Args:
          running: arrays of the step that runs meanwhile, or None. If they are there in the end,
            the devices waited, too, and the time counts as that of the data.
        """
        start = time.perf_counter()
        yield
        if all(array.is_ready() for array in jax.tree.leaves(running)):
            self.stopwatch.move(time.perf_counter() - start, STEPS, DATA)

    def rates(self, step: int) -> dict[str, float]:
        """Rates of training since the last call.

        `tokens_per_second`; `step_seconds`, seconds per step; and `data_wait`, the part of them in
        which the devices waited for a batch.
        """
        now = self.stopwatch.seconds()
        steps, data = (now.get(k, 0) - self.before.get(k, 0) for k in (STEPS, DATA))
        seconds, done = max(steps + data, 1e-9), step - self.step
        self.step, self.before = step, now
        return {
            "tokens_per_second": done * self.tokens_per_step / seconds,
            "step_seconds": seconds / done,
            "data_wait": data / seconds,
        }

    def line(self, step: int, values: Mapping[str, float]) -> str:
        """`step 200/300  67%  loss 3.1416  gradient 0.72  lr 3.0e-03  21.0k tokens/s  0:42 left`.

        Args:
          step: the optimizer steps that are done.
          values: the step's metrics, with `rates`; `gradient` is the norm before clipping, `lr` the
            learning rate. NaN is shown as `none`.
        """
        rate = values["tokens_per_second"]
        left = (self.total_steps - step) * self.tokens_per_step / max(rate, 1e-9)
        width = len(str(self.total_steps))
        return (
            f"step {step:>{width}}/{self.total_steps}  {step / self.total_steps:>4.0%}  "
            f"loss {_measured(values['loss'], 4)}  gradient {_measured(values['grad_norm'], 2)}  "
            f"lr {values['learning_rate']:.1e}  {format_count(rate)} tokens/s  "
            f"{format_duration(left)} left"
        )


def _measured(value: float, digits: int) -> str:
    return "none" if isnan(value) else f"{value:.{digits}f}"
