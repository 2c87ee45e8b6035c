"""The base class of hooks, which do what a training loop does besides its steps.

A hook runs every so many optimizer steps, or around each step. The project's own hooks are listed
in `cli/train.py`; `train.hooks` names others, as "package.module:Name", or with arguments as in
`examples/own_hook.py`.

Every process calls every hook, in the order of the list (`after_step` in reverse), so that a hook
may run programs on all devices. An error in a hook ends the run, in a line that names the hook.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

import jax

from t5x_diffeq.checkpoints.checkpoint import Checkpoints
from t5x_diffeq.checkpoints.stored import RestoredCheckpoint, TrainState
from t5x_diffeq.cluster.signals import StopSignals
from t5x_diffeq.cluster.watchdog import Watchdog
from t5x_diffeq.config.config import Config
from t5x_diffeq.data.corpus import Corpus
from t5x_diffeq.data.examples import TrainingData
from t5x_diffeq.data.packing import Windows
from t5x_diffeq.system.errors import InputError
from t5x_diffeq.system.files import AnyPath
from t5x_diffeq.training.goodput import OTHER
from t5x_diffeq.training.history import Clock, History, Stopwatch
from t5x_diffeq.training.objective import Batch
from t5x_diffeq.training.setup import Setup
from t5x_diffeq.training.tracking.trackers import RunWriter


@dataclass
class PreparedRun:
    """A run that can begin: its config is checked, and its data is prepared.

    Attributes:
      config: the run's config.
      setup: its model, optimizer and mesh.
      workdir: its workdir.
      corpus: its documents, with the tokenizer.
      data: the batches that it trains on.
      eval_parts: the examples to evaluate on, of each part of the data.
    """

    config: Config
    setup: Setup
    workdir: AnyPath
    corpus: Corpus
    data: TrainingData
    eval_parts: Sequence[Windows]


@dataclass
class Training(PreparedRun):
    """A run while it trains: what its hooks may use, in addition to a `PreparedRun`.

    Attributes:
      checkpoints: its checkpoints.
      history: records the events of the run, with their times.
      stopwatch: divides the time among activities.
      watchdog: ends the run if it hangs.
      stop: says when the run has to stop.
      start: the optimizer step at which this attempt begins.
      clock: measures the rates of its steps.
      writer: takes metrics, texts and figures; not set yet when hooks are made.
      hook_states: returns what checkpoints keep of all hooks; not set yet when hooks are made.
      requests: by the name of a file, the function that this process calls when a person has put
        the file into the workdir (see `requests`). A hook adds to it when it is made.
    """

    checkpoints: Checkpoints
    history: History
    stopwatch: Stopwatch
    watchdog: Watchdog
    stop: StopSignals
    start: int = field(init=False)
    clock: Clock = field(init=False)
    writer: RunWriter = field(init=False)
    hook_states: Callable[[], dict[str, list]] = field(init=False)
    requests: dict[str, Callable[[AnyPath], None]] = field(default_factory=dict)

    @contextmanager
    def instead(self, activity: str, what: str, seconds: float) -> Iterator[None]:
        """A context for work other than steps; the watchdog lets `what` take so many `seconds`."""
        with self.stopwatch.during(activity), self.watchdog.limit(what, seconds):
            yield


class DoneStep(NamedTuple):
    """An optimizer step that was given to the devices.

    Attributes:
      step: its number, from 1.
      batch: its batch.
      metrics: what the train step returned: scalars and curves, by name.
      batches_consumed: the number of batches read so far, with the step's own.
    """

    step: int
    batch: Batch
    metrics: Mapping[str, jax.Array]
    batches_consumed: int


@dataclass(frozen=True)
class LoopPosition:
    """Where the loop is between two optimizer steps.

    Attributes:
      step: the number of optimizer steps that are done.
      state: the train state after these steps.
      batches_consumed: the number of batches read so far.
      values: what hooks have reported at this step so far, by name.
    """

    step: int
    state: TrainState
    batches_consumed: int
    values: dict[str, float] = field(default_factory=dict)

    @classmethod
    def at(cls, checkpoint: RestoredCheckpoint) -> "LoopPosition":
        """Where the loop is at a checkpoint."""
        return cls(checkpoint.step, checkpoint.state, checkpoint.batches_consumed)


class Hook:
    """A hook that does nothing; a subclass overrides what it needs.

    A hook is also a context around the whole loop. It is made while the steps are being compiled,
    so a hook that times steps begins in `before_step`.

    Attributes:
      name: stands in messages, and before the / in the names of what it reports.
      activity: what the time of `run` counts as (see `training/goodput.py`).
      timeout: the key of `config.train` with the most seconds that `run` or `stop` may take.
      runs_at_0: whether `run` is called before the first step of a new run.
      runs_later: whether a resumed run first calls `run` if the hook was due at the checkpoint's
        step, and nothing named `name/...` was reported at that step.
      training: the run.
      every: optimizer steps between two calls of `run`, which is also called after the last step;
        None: `run` is never called.
    """

    name: ClassVar[str]
    activity: ClassVar[str] = OTHER
    timeout: ClassVar[str] = "eval_timeout"
    runs_at_0: ClassVar[bool] = True
    runs_later: ClassVar[bool] = False

    def __init__(self, training: Training, every: int | None = None):
        if every is not None and every < 1:
            raise InputError(f"the hook {self.name} has every={every}; it must be at least 1")
        self.training, self.every = training, every

    @classmethod
    def check(cls, config: Config, setup: Setup) -> None:
        """Raises an `InputError`, before anything long starts, if the config can't be used."""

    @classmethod
    def check_corpus(cls, config: Config, setup: Setup, corpus: Corpus) -> None:
        """Raises an `InputError` if the hook can't be used with this data and its tokenizer."""

    def __enter__(self) -> "Hook":
        return self

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        """Ends the hook, whether or not the run has failed."""

    def is_due(self, step: int) -> bool:
        """Whether `run` is to be called after `step`."""
        if self.every is None:
            return False
        return step % self.every == 0 or step == self.training.config.train.total_steps

    def before_batch(self, step: int, state: TrainState) -> None:
        """Called before the batch of optimizer step `step` is waited for."""

    def before_step(self, step: int, state: TrainState, batch: Batch) -> None:
        """Called before optimizer step `step`, which donates the state: later it is gone."""

    def after_step(self, step: int, state: TrainState, metrics: Mapping[str, jax.Array]) -> None:
        """Called when the step is given to the devices, which may still compute the arrays."""

    def report(self, done: DoneStep, values: dict[str, float]) -> None:
        """Called with the numbers of a step, while the next step runs or before `run` and `stop`.

        The numbers are the step's scalar metrics without `spike`. In a step that is logged,
        `MetricsLog` adds the run's rates, which the hooks of `train.hooks` then see, too.
        """

    def run(self, position: LoopPosition) -> Mapping[str, float] | None:
        """Called when the hook is due; returns numbers for `metrics.jsonl`, by name, or None."""

    def stop(self, position: LoopPosition) -> None:
        """Called once if a signal stops the run after a step of this attempt.

        A hook that was due at that step may not have run.
        """

    def go_back(self, step: int) -> None:
        """Called when the run rolls back to the checkpoint of `step`."""

    def to_save(self) -> Any:
        """Returns what checkpoints keep: anything that JSON can hold."""

    def restore(self, saved: Any) -> None:
        """Called with what `to_save` returned when the checkpoint was saved, unless it was None.

        It is called when a run is resumed, and when a run rolls back. If fewer processes saved the
        checkpoint, an additional process gets what the first process returned.
        """
