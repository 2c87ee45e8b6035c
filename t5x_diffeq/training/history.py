"""Measures and records where the time of a run goes: a stopwatch, rates, and `history.jsonl`.

The history says what happened to the run at what time, over all of its attempts. An attempt is one
start of the training command. `metrics.jsonl` describes the optimizer steps that led to the present
state, and loses the lines of steps that are taken again. The history only grows: each line is an
event with the time (seconds since 1970) and the optimizer step.

    start      an attempt has restored or made its state; `total_steps`, and when it `began`
    time       `seconds` of the attempt so far, by activity
    save       a checkpoint was written: its `bytes`, for how many seconds training `waited`, and
               after how many `seconds` it was written
    spike      the step was a spike, and its update was left out
    rollback   the run went back to the checkpoint of step `to`
    end        the attempt ended; `error` is the name of an exception, or null
"""

import json
import threading
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import isnan
from typing import Any

import jax

from t5x_diffeq.checkpoints.checkpoint_folder import ASIDE, steps_in
from t5x_diffeq.checkpoints.stored import FinishedSave
from t5x_diffeq.system import json_lines
from t5x_diffeq.system.console import format_count, format_duration, log
from t5x_diffeq.system.errors import InfrastructureError, InputError, RunError
from t5x_diffeq.system.files import AnyPath, absolute_path
from t5x_diffeq.system.growing_file import GrowingFile
from t5x_diffeq.system.json_lines import NUMBER
from t5x_diffeq.training.goodput import (
    COMPILE,
    DATA,
    STARTUP,
    STEPS,
    Attempt,
    add_event,
    attempts_of,
    goodput,
)

FILE = "history.jsonl"
SECONDS_BETWEEN_TIMES = 60
_COMPILATION = (  # JAX's events; tracing, which may be nested, isn't among them
    "/jax/core/compile/jaxpr_to_mlir_module_duration",
    "/jax/core/compile/backend_compile_duration",
)


class Stopwatch:
    """Divides the seconds since its creation among activities, of which one is always going on."""

    def __init__(self, activity: str = STARTUP):
        self.activity, self.since = activity, time.perf_counter()
        self.began = time.time()
        self.elapsed: dict[str, float] = defaultdict(float)

    def turn_to(self, activity: str) -> None:
        """Ends the current activity and begins another."""
        now = time.perf_counter()
        self.elapsed[self.activity] += now - self.since
        self.activity, self.since = activity, now

    @contextmanager
    def during(self, activity: str) -> Iterator[None]:
        """A context in which `activity` goes on instead of the current one."""
        before = self.activity
        self.turn_to(activity)
        try:
            yield
        finally:
            self.turn_to(before)

    def move(self, seconds: float, source: str, target: str) -> None:
        """Counts seconds that were counted as `source` as `target`."""
        self.elapsed[source] -= seconds
        self.elapsed[target] += seconds

    @contextmanager
    def counting_compilation(self) -> Iterator[None]:
        """A context in which the time that this thread spends compiling counts as compilation."""
        thread = threading.get_ident()

        def count(event: str, duration_secs: float, **_: object) -> None:
            if event in _COMPILATION and threading.get_ident() == thread:
                self.move(duration_secs, self.activity, COMPILE)

        jax.monitoring.register_event_duration_secs_listener(count)
        try:
            yield
        finally:
            jax.monitoring.unregister_event_duration_listener(count)

    def seconds(self) -> dict[str, float]:
        """The seconds of each activity so far."""
        self.turn_to(self.activity)
        return dict(self.elapsed)


class Clock:
    """Measures rates since the last report, and estimates the time left to `total_steps`."""

    def __init__(self, total_steps: int, tokens_per_step: int, step: int, stopwatch: Stopwatch):
        self.total_steps, self.tokens_per_step = total_steps, tokens_per_step
        self.stopwatch = stopwatch
        self.go_back(step)

    def go_back(self, step: int) -> None:
        """Measures rates from now on, when the run is at `step`."""
        self.step, self.before = step, self.stopwatch.seconds()

    @contextmanager
    def waiting_for_data(self, running: object) -> Iterator[None]:
        """A context in which the host waits for a batch while a step computes `running`.

        If all arrays of `running` are ready at the end, the devices have waited, too. The time then
        counts as waiting for data, not as time of steps.
        """
        before = self.stopwatch.seconds().get(STEPS, 0.0)
        yield
        if all(array.is_ready() for array in jax.tree.leaves(running)):
            waited = self.stopwatch.seconds().get(STEPS, 0.0) - before
            self.stopwatch.move(waited, STEPS, DATA)

    def rates(self, step: int) -> dict[str, float]:
        """Rates of training since the last call.

        They are `tokens_per_second`; `step_seconds`, seconds per step; and `data_wait`, the share
        of these seconds in which the devices waited for a batch.
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

        The values are the step's metrics, with `rates`; NaN is shown as `none`.
        """
        rate = values["tokens_per_second"]
        seconds_left = (self.total_steps - step) * self.tokens_per_step / max(rate, 1e-9)
        width = len(str(self.total_steps))
        return (
            f"step {step:>{width}}/{self.total_steps}  {step / self.total_steps:>4.0%}  "
            f"loss {_measured(values['loss'], 4)}  gradient {_measured(values['grad_norm'], 2)}  "
            f"lr {values['learning_rate']:.1e}  {format_count(rate)} tokens/s  "
            f"{format_duration(seconds_left)} left"
        )


def _measured(value: float, digits: int) -> str:
    return "none" if isnan(value) else f"{value:.{digits}f}"


class History:
    """A context that appends an attempt's events to `history.jsonl`; only process 0 writes.

    Nothing is written before `start` is called.
    """

    def __init__(self, workdir: AnyPath, stopwatch: Stopwatch):
        self.workdir, self.stopwatch = workdir, stopwatch
        self.file: GrowingFile | None = None
        self.attempts: list[Attempt] = []
        self.step, self.last_time = 0, time.monotonic()

    def start(self, step: int, total_steps: int) -> None:
        """Begins an attempt at `step` of a run that is done at `total_steps`."""
        if jax.process_index() == 0:
            path = self.workdir / FILE
            self.attempts = attempts_of(read_events(self.workdir))
            try:
                # A killed attempt may have left a part of a line.
                self.file = GrowingFile(path, json_lines.end_of_whole_lines(path))
            except (RunError, InfrastructureError) as error:
                self._give_up(error)
        self.write("start", step, total_steps=total_steps, began=round(self.stopwatch.began, 3))

    def write(self, event: str, step: int, **facts: object) -> None:
        """Writes an event."""
        line = {"event": event, "time": round(time.time(), 3), "step": step, **facts}
        add_event(self.attempts, line)
        if self.file is not None:
            try:
                self.file.write(f"{json.dumps(line)}\n".encode())
                if event == "end":
                    self.file.close()
            except (RunError, InfrastructureError) as error:
                self._give_up(error)

    def write_time(self, step: int, at_once: bool = False) -> None:
        """Writes where the seconds went, if the last such line is a minute old, or `at_once`."""
        self.step = step
        if at_once or time.monotonic() - self.last_time > SECONDS_BETWEEN_TIMES:
            self.last_time = time.monotonic()
            self.write("time", step, seconds=self._seconds())

    def write_saves(self, saves: Sequence[FinishedSave]) -> None:
        """Writes what saves have cost."""
        for save in saves:
            cost = {"waited": round(save.waited, 3), "seconds": round(save.seconds, 3)}
            self.write("save", save.step, bytes=save.size, **cost)

    def _give_up(self, error: Exception) -> None:
        """Ends the history with a warning: a run shall not fail for the sake of its history."""
        self.file = None
        log(f"warning: {error}; the run's history ends here")

    def goodput(self) -> float:
        """The run's goodput so far."""
        attempt = self.attempts[-1]
        attempt.seconds, attempt.last_event = self._seconds(), time.time()
        return goodput(self.attempts)

    def _seconds(self) -> dict[str, float]:
        return {name: round(seconds, 3) for name, seconds in self.stopwatch.seconds().items()}

    def __enter__(self) -> "History":
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: object) -> None:
        """Writes how the attempt ended."""
        if self.attempts and self.file is not None:
            self.write_time(self.step, at_once=True)
            self.write("end", self.step, error=kind and kind.__name__)


_FIELDS: dict[str, dict[str, tuple[type, ...]]] = {  # of an event, besides its time and step
    "start": {"total_steps": (int,), "began": NUMBER},
    "time": {"seconds": (dict,)},
    "rollback": {"to": (int,), "count": (int,)},
    "spike": {"count": (int,)},
    "end": {"error": (str, type(None))},
}


def _check_event(event: dict[str, Any]) -> None:
    json_lines.check_types(event, {"event": (str,), "time": NUMBER, "step": (int,)})
    json_lines.check_types(event, _FIELDS.get(event["event"], {}))
    if event["event"] == "time":
        json_lines.check_types(event["seconds"], dict.fromkeys(event["seconds"], NUMBER))


def read_events(workdir: AnyPath) -> list[Mapping]:
    """The events of a run, oldest first; invalid lines are left out, with a warning."""
    return [event for _, event in json_lines.read_json_lines(workdir / FILE, _check_event)]


def check_saves_are_left(workdir: AnyPath) -> None:
    """Raises an InputError if a run has saved checkpoints and none is left."""
    saved = [event["step"] for event in read_events(workdir) if event["event"] == "save"]
    folders = (absolute_path(workdir) / name for name in ("checkpoints", ASIDE))
    if saved and not any(map(steps_in, folders)):
        raise InputError(
            f"workdir {workdir} has saved step {max(saved)} and has no checkpoint left, so it "
            "would begin anew, over its metrics; restore its checkpoints/, choose a new --workdir, "
            f"or delete {FILE} to begin anew"
        )
