"""The hooks of every run: its validation loss, the metrics of its steps, and its checkpoints."""

import os
from math import isfinite, nan
from pathlib import Path
from statistics import fmean
from typing import ClassVar

import jax

from t5x_diffeq.checkpoints.stored import RunFacts, TrainState
from t5x_diffeq.checkpoints.workdir import save_config
from t5x_diffeq.cluster.agreement import Request
from t5x_diffeq.data.batches import eval_batches
from t5x_diffeq.system.console import log
from t5x_diffeq.system.files import AnyPath, check_writable
from t5x_diffeq.training.depths import depths_of, full_grid_from
from t5x_diffeq.training.evaluation import evaluate_loss, make_eval_step
from t5x_diffeq.training.goodput import CHECKPOINT, EVALUATION
from t5x_diffeq.training.hooks.hook import DoneStep, Hook, LoopPosition, Training
from t5x_diffeq.training.objective import Batch
from t5x_diffeq.training.progress import eval_line, utilisation

_OF_EMPTY_BATCH = ("learning_rate", "targets", "spikes")  # metrics that need no targets
_STATM = Path("/proc/self/statm")  # on Linux; its second number counts the resident pages
_GIB = 2**30
SAVE_REQUEST = "save"  # the file in the workdir that asks for a checkpoint


class Evaluation(Hook):
    """Evaluates the parameters and, with `train.eval_averages`, their averages: `train.eval_*`."""

    name: ClassVar[str] = "eval"
    activity: ClassVar[str] = EVALUATION
    runs_later: ClassVar[bool] = True

    def __init__(self, training: Training):
        super().__init__(training, training.config.train.eval_every)
        self.eval_step = make_eval_step(training.setup)

    def run(self, position: LoopPosition) -> dict[str, float]:
        """The numbers of `evaluate_loss`, by name: `eval/loss`, `eval_averages/loss` and so on."""
        evaluated = {"eval": position.state.params}
        if self.training.config.train.eval_averages and position.state.averages is not None:
            evaluated["eval_averages"] = position.state.averaged_params()
        reports: dict[str, float] = {}
        results = {name: self._evaluate(x, position.step) for name, x in evaluated.items()}
        for name, values in results.items():
            log(eval_line(position.step, values, self.training.config.data.loss_on, name))
            reports |= {f"{name}/{key}": x for key, x in values.items()}
        return reports

    def _evaluate(self, params: dict, step: int) -> dict[str, float]:
        training, train_config = self.training, self.training.config.train
        sequences = sum(map(len, training.eval_parts))
        rows = training.setup.eval_batch_size(min(train_config.eval_batch_size, sequences))
        all_batches = train_config.eval_all_at_end and step == train_config.total_steps
        batches = eval_batches(
            training.eval_parts,
            rows,
            training.setup.batch_sharding,
            None if all_batches else train_config.eval_batches,
            f"evaluating at step {step}",
        )
        return evaluate_loss(self.eval_step, params, training.stop.interruptible(batches))


class MetricsLog(Hook):
    """Prints and writes the metrics of steps, with the run's rates, memory and goodput."""

    name: ClassVar[str] = "train"

    def __init__(self, training: Training):
        super().__init__(training)
        self.full_grid_from = full_grid_from(training.config)

    def before_step(self, step: int, state: TrainState, batch: Batch) -> None:
        """Logs the step from which on the run uses its full grid."""
        if step == self.full_grid_from:
            num_steps = self.training.config.model.num_steps
            log(f"step {step}: from here on, {num_steps} solver steps")

    def report(self, done: DoneStep, values: dict[str, float]) -> None:
        """Logs the step if `train.log_every` says so, or if it is the last."""
        training, step = self.training, done.step
        train_config = training.config.train
        if step == training.start + 1:
            seconds = sum(training.stopwatch.seconds().values())
            log(f"first step done {seconds:.1f} s after the start")
        if step % train_config.log_every and step != train_config.total_steps:
            return
        rates = training.clock.rates(step)
        rate = rates["tokens_per_second"]
        measured = dict(values)
        if not values["targets"]:  # a batch of prompts alone: its zeros are no measurements
            measured = {name: x if name in _OF_EMPTY_BATCH else nan for name, x in values.items()}
        added = {**rates, "goodput": training.history.goodput()}
        added |= {**utilisation(training.setup, rate), **_memory_in_use()}
        if train_config.depths:
            added["num_steps"] = fmean(depths_of(training.config, step))
        values |= added  # for the hooks that follow
        measured |= added
        finite = {f"train/{name}": x for name, x in measured.items() if isfinite(x)}
        training.writer.write_scalars(step, finite)
        training.history.write_time(step)
        log(training.clock.line(step, measured))

    def go_back(self, step: int) -> None:
        """Measures rates from `step` on."""
        self.training.clock.go_back(step)


def _memory_in_use() -> dict[str, float]:
    """This process's memory, and the most memory in use, now and at peak, on its devices; GiB."""
    gibibytes = {}
    if _STATM.exists():
        pages = int(_STATM.read_text("utf-8").split()[1])
        gibibytes["host_memory_gib"] = pages * os.sysconf("SC_PAGE_SIZE") / _GIB
    stats = [each for device in jax.local_devices() if (each := device.memory_stats())]
    for name, key in (
        ("device_memory_gib", "bytes_in_use"),
        ("device_memory_peak_gib", "peak_bytes_in_use"),
    ):
        if sizes := [each[key] for each in stats if key in each]:
            gibibytes[name] = max(sizes) / _GIB
    return gibibytes


class Saves(Hook):
    """Saves the train state and the position in the data, after all other hooks of the step.

    It saves periodically, at milestones, when a run stops, and when a person asks for it by a file
    `save` in the workdir.
    """

    name: ClassVar[str] = "checkpoint"
    activity: ClassVar[str] = CHECKPOINT
    timeout: ClassVar[str] = "save_timeout"
    runs_at_0: ClassVar[bool] = False

    def __init__(self, training: Training):
        super().__init__(training, training.config.train.checkpoint_every)
        if jax.process_index() == 0:
            training.requests[SAVE_REQUEST] = self._take_up_request

    def _take_up_request(self, file: AnyPath) -> None:
        """Asks all processes to save; called in another thread."""
        file.unlink(missing_ok=True)
        log(f"{file} asks for a checkpoint: it is saved after the next step")
        self.training.stop.ask(Request(0, SAVE_REQUEST))

    def is_due(self, step: int) -> bool:
        """Whether a checkpoint is due: periodically, at a milestone, or because it is asked for."""
        is_milestone = step in self.training.config.train.milestones
        return super().is_due(step) or is_milestone or self.training.stop.save_asked

    def report(self, done: DoneStep, values: dict[str, float]) -> None:
        """Checks the workdir's lease and earlier saves, and binds the workdir to the config."""
        training = self.training
        check_writable(training.workdir)
        # Before a first step is done, another config may still use the workdir.
        if done.step == training.start + 1:
            save_config(training.config, training.workdir, training.checkpoints.run_id)
        training.checkpoints.check()
        training.history.write_saves(training.checkpoints.finished_saves())

    def run(self, position: LoopPosition) -> None:
        """Saves a checkpoint, which is written in the background."""
        training, step = self.training, position.step
        training.stop.save_asked = False
        check_writable(training.workdir)
        # In a bucket, the metrics up to this step must be stored before the checkpoint is.
        training.writer.flush()
        facts = RunFacts(
            fingerprint=training.corpus.fingerprint,
            drawn=position.batches_consumed,
            reports=training.writer.reports,
            eval_loss=position.values.get("eval/loss"),
            hooks=training.hook_states(),
            position=training.data.position(),
        )
        training.checkpoints.save(step, position.state, facts)
        training.history.write_time(step, at_once=True)

    def stop(self, position: LoopPosition) -> None:
        """Saves a checkpoint of the step at which the run stops."""
        self.run(position)
