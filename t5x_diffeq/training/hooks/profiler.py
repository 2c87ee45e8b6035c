"""Traces some optimizer steps of a run: the steps of `train.profile`, and others on demand.

On demand means a file `profile` in the workdir. Its content is the first and the last step,
"100:105", or, for a single process, a number of steps; an empty file means `_STEPS_ON_DEMAND`.

JAX returns from a step before the devices have finished it. A trace therefore begins when the step
before its first step is finished, and ends when its last step is: it holds exactly these steps.

XProf shows what it finds in FOLDER/plugins/profile/RUN/, on disk or in a bucket: a file for each
process that traced. A trace that fails is a warning, and the run goes on.
"""

import re
import shutil
import socket
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, ClassVar, NamedTuple

import jax

from t5x_diffeq.config.config import Config
from t5x_diffeq.system import console
from t5x_diffeq.system.errors import InputError
from t5x_diffeq.system.files import AnyPath, atomic_file, describe_error
from t5x_diffeq.system.foreign_files import read_inside
from t5x_diffeq.training.goodput import OTHER
from t5x_diffeq.training.hooks.hook import Hook, Training
from t5x_diffeq.training.setup import Setup

FOLDER = "profiles"  # in the workdir; not `profile`, which is the request's name
REQUEST = "profile"  # the file in the workdir that asks for a trace
_STEPS_ON_DEMAND = 5
_MOST_STEPS = 1000  # of a trace on demand: a longer trace outgrows what XProf can read
_READ_BY_PERFETTO = ".trace.json.gz"
_SUFFIXES = (".xplane.pb", _READ_BY_PERFETTO)


class Steps(NamedTuple):
    """The optimizer steps from `first` to `last`."""

    first: int
    last: int

    @classmethod
    def of(cls, text: str) -> "Steps":
        """The steps of "100:105"."""
        first, last = map(int, text.split(":"))
        return cls(first, last)

    def __str__(self) -> str:
        return f"{self.first}-{self.last}"


class Profiler(Hook):
    """Traces steps of the training loop."""

    name: ClassVar[str] = "profile"

    def __init__(self, training: Training):
        super().__init__(training)
        train, workdir = training.config.train, training.workdir
        self.processes, self.folder = train.profile_processes, workdir / FOLDER
        is_chosen = jax.process_index() in self.processes
        # The thread that takes up requests only appends to this list, and the loop only removes.
        self.planned = [Steps.of(train.profile)] if train.profile and is_chosen else []
        if is_chosen:
            take_up = self._take_up_request
            training.requests[REQUEST] = lambda file: self._attempt(lambda: take_up(file))
        self.tracing: Steps | None = None
        self.local: TemporaryDirectory | None = None  # where the trace is written
        self.annotation: jax.profiler.StepTraceAnnotation | None = None
        self.step = 0
        self.known: set[str] = set()  # the requests and warnings that this process has seen
        self.pool = ThreadPoolExecutor(1, "profiler")  # stores traces

    @classmethod
    def check(cls, config: Config, setup: Setup) -> None:
        """Checks that the run has the processes of `train.profile_processes`."""
        count = jax.process_count()
        if missing := [n for n in config.train.profile_processes if n >= count]:
            raise InputError(
                f"train.profile_processes names process {missing[0]}, and there are {count}: give "
                f"numbers from 0 to {count - 1}"
            )

    # ------------------------------------------------------------------ called by the loop
    def before_batch(self, step: int, state: Any) -> None:
        """Begins a trace if `step` is its first; `state` is the result of the step before."""
        self.step = step
        last = self._last_step_to_trace(step) if self.tracing is None else None
        if last is not None:
            self._attempt(lambda: self._start(Steps(step, last), state))
        self.annotation = jax.profiler.StepTraceAnnotation("train", step_num=step)
        self.annotation.__enter__()

    def after_step(self, step: int, state: Any, metrics: Any) -> None:
        """Ends a trace if `step` is its last; `state` is the step's result."""
        if self.annotation is not None:
            self.annotation.__exit__(None, None, None)
        if self.tracing is not None and step >= self.tracing.last:
            jax.block_until_ready(state)
            with self.training.stopwatch.during(OTHER):
                self._attempt(self._stop)

    def go_back(self, step: int) -> None:
        """Ends a trace now, with the steps so far."""
        if self.tracing is not None:
            self.tracing = Steps(self.tracing.first, self.step)
            self._attempt(self._stop)

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        self.go_back(self.step)
        self.pool.shutdown()

    # ------------------------------------------------------------------ tracing
    def _last_step_to_trace(self, step: int) -> int | None:
        """The last step of the trace that begins at `step`; None if none does."""
        due = []
        for steps in list(self.planned):
            if steps.first <= step:
                self.planned.remove(steps)
                if step <= steps.last:
                    due.append(steps.last)
                else:
                    self._log(f"note: steps {steps} were done before they could be traced")
        return max(due, default=None)

    def _start(self, steps: Steps, state: Any) -> None:
        jax.block_until_ready(state)
        self.local = _local_folder()
        start_trace(self.local.name)
        self.tracing = steps

    def _stop(self) -> None:
        """Ends the trace; a thread stores it."""
        steps, local, self.tracing = self.tracing, self.local, None
        assert steps is not None and local is not None
        jax.profiler.stop_trace()

        def store() -> None:
            with local:
                target = _store_trace(local.name, self.folder, f"steps_{steps}")
            self._log(f"traced steps {steps} into {target}; {how_to_open(self.folder)}")

        self.pool.submit(lambda: self._attempt(store))

    # ------------------------------------------------------------------ requests
    def _take_up_request(self, request: AnyPath) -> None:
        """Plans the steps that the file in the workdir asks for.

        A process that traces alone removes the file at once. Several processes trace the same
        steps, and the first of them removes the file when the steps are done.
        """
        text = read_inside(request).decode("utf-8").strip()
        leads, alone = jax.process_index() == min(self.processes), len(self.processes) == 1
        if re.fullmatch(r"\d{1,10}:\d{1,10}", text):
            steps = Steps.of(text)
        elif alone and (not text or (text.isdecimal() and 1 <= int(text) <= _MOST_STEPS)):
            steps = Steps(self.step + 1, self.step + int(text or _STEPS_ON_DEMAND))
        else:
            request.unlink(missing_ok=True)
            number = f"a number of steps from 1 to {_MOST_STEPS}, or " if alone else ""
            raise ValueError(f"{request} holds {text[:40]!r}; write {number}FIRST:LAST into it")
        if text not in self.known or alone:
            self.known.add(text)
            self.planned.append(steps)
        if alone or (leads and self.step > steps.last):
            request.unlink(missing_ok=True)

    # ------------------------------------------------------------------ failures, messages
    def _attempt(self, work: Callable[[], None]) -> None:
        """Does the work; an error from any library is reported once."""
        try:
            work()
        except Exception as error:
            line = f"warning: no profile: {describe_error(error)}"
            if line not in self.known:
                self.known.add(line)
                self._log(line)

    def _log(self, line: str) -> None:
        """Prints a line, whichever process this is."""
        if jax.process_index() == 0:
            console.log(line)
        elif not console.quiet or line.startswith("warning: "):
            console.write(f"{line} (process {jax.process_index()})")


# ------------------------------------------------------------------------------ jax.profiler


def _local_folder() -> TemporaryDirectory:
    return TemporaryDirectory(prefix="t5x_diffeq-trace-", ignore_cleanup_errors=True)


def start_trace(local: str) -> None:
    """Starts a trace that `jax.profiler.stop_trace` ends and writes below a local folder.

    Python's own calls are left out: recording each of them would slow down the steps that the trace
    is to show.
    """
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0
    jax.profiler.start_trace(local, profiler_options=options)


def _store_trace(local: str, folder: AnyPath, run: str) -> AnyPath:
    """Moves the files of a trace to FOLDER/plugins/profile/RUN/; returns that folder."""
    target = folder / "plugins" / "profile" / run
    files = [(file, suffix) for suffix in _SUFFIXES for file in Path(local).rglob(f"*{suffix}")]
    if not files:
        raise FileNotFoundError(f"jax.profiler has written no trace into {local}")
    for file, suffix in files:
        process = f"{socket.gethostname()}_process_{jax.process_index()}"
        with atomic_file(target / f"{process}{suffix}") as partial:
            shutil.move(file, partial)
    return target


def how_to_open(folder: AnyPath) -> str:
    """The commands that show the traces of a folder."""
    return (
        f"open them with: tensorboard --logdir={folder} (pip install tensorboard xprof), or drop a "
        f"*{_READ_BY_PERFETTO} file on https://ui.perfetto.dev"
    )
