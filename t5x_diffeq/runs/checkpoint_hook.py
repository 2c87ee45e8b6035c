"""When a run saves: every so many steps, at milestones, on a local disk more often, and when it
stops.
"""

from typing import ClassVar

from t5x_diffeq.checkpoints.stored import RunFacts
from t5x_diffeq.runs.goodput import CHECKPOINT
from t5x_diffeq.runs.hooks import DoneStep, Hook, LoopPosition, Training
from t5x_diffeq.runs.workdir import save_config


class Saves(Hook):
    """Saves the train state and the position in the data, after all other hooks of the step."""

    name: ClassVar[str] = "checkpoint"
    activity: ClassVar[str] = CHECKPOINT
    timeout: ClassVar[str] = "save_timeout"
    runs_at_0: ClassVar[bool] = False

    def __init__(self, training: Training):
        super().__init__(training, training.config.train.checkpoint_every)

    def is_due(self, step: int) -> bool:
        """Whether a checkpoint of any kind is due."""
        keys = self.training.config.train
        locally = keys.local_checkpoints and step % keys.local_checkpoint_every == 0
        return self._is_due_in_workdir(step) or bool(locally)

    def _is_due_in_workdir(self, step: int) -> bool:
        return super().is_due(step) or step in self.training.config.train.milestones

    def report(self, done: DoneStep, values: dict[str, float]) -> None:
        """Looks how earlier saves are getting on, and binds the workdir to the config."""
        training = self.training
        if done.step == training.start + 1:
            save_config(training.config, training.workdir)
        training.checkpoints.check()
        training.history.write_saves(training.checkpoints.finished_saves())

    def run(self, position: LoopPosition) -> None:
        """Saves in the workdir or, between those checkpoints, locally."""
        self._save(position, locally=not self._is_due_in_workdir(position.step))

    def stop(self, position: LoopPosition) -> None:
        """Saves in the workdir."""
        self._save(position, locally=False)

    def _save(self, position: LoopPosition, locally: bool) -> None:
        training, step = self.training, position.step
        # The workdir's checkpoints need the lines up to their step in the same bucket.
        training.writer.try_flush() if locally else training.writer.flush()
        facts = RunFacts(
            training.corpus.fingerprint,
            position.drawn,
            training.writer.reports,
            position.values.get("eval/loss"),
            training.hooks.states(),
        )
        training.checkpoints.save(step, position.state, facts, locally)
        training.history.write_time(step, at_once=not locally)
