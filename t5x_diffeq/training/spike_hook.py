"""How a run handles spikes and values that aren't finite: `train.on_spike`.

It ends, skips their updates, or rolls back to a checkpoint. The train step detects the spike and
skips its update.
"""

from math import isfinite
from typing import ClassVar

import jax

from t5x_diffeq.checkpoints.stored import RestoredCheckpoint, TrainState
from t5x_diffeq.system.console import say
from t5x_diffeq.system.errors import RunError
from t5x_diffeq.system.files import describe_error
from t5x_diffeq.training.diagnosis import find_cause, not_finite_error
from t5x_diffeq.training.goodput import OTHER, ROLLBACK
from t5x_diffeq.training.hooks import DoneStep, Hook, Hooks, Training

_MOST_IN_A_ROW = 10  # steps whose values aren't finite
_MOST_ROLLBACKS = 5  # without getting further


class GoBack(Exception):  # noqa: N818  # the run goes on
    """The run must roll back to its last checkpoint, because of a spike."""

    def __init__(self, spike: DoneStep):
        super().__init__(f"spike at step {spike.step}")
        self.spike = spike


class Spikes(Hook):
    """Reports and records spikes, and decides what follows from them."""

    name: ClassVar[str] = "spikes"

    def __init__(self, training: Training):
        super().__init__(training)
        self.step = training.start  # the last one that was given to the devices
        self.state: TrainState | None = None  # after it
        self.not_finite = 0  # steps in a row
        self.rollbacks, self.furthest = 0, 0  # rollbacks without getting past this step

    def after_step(self, step: int, state: TrainState, metrics: object) -> None:
        """Keeps the state, in which the cause of a value that isn't finite is looked for."""
        self.step, self.state = step, state

    def report(self, done: DoneStep, values: dict[str, float]) -> None:
        """Removes `spike` from the values; raises if the run must end, or go back."""
        checkpoints = self.training.checkpoints
        finite = isfinite(values["loss"]) and isfinite(values["grad_norm"])
        self.not_finite = 0 if finite else self.not_finite + 1
        if values.pop("spike", 0) and self.not_finite <= _MOST_IN_A_ROW:
            self._record(done, values)
            if self._goes_back(done.step, checkpoints.rollback_step()):
                raise GoBack(done)
            return
        loss_first = sorted(values, key=lambda name: name != "loss")
        bad = [f"{name} is {values[name]}" for name in loss_first if not isfinite(values[name])]
        if bad:
            start, last = self.training.start, checkpoints.latest_step
            raise not_finite_error(done.step, bad, last, start, self._find_cause(done))

    def _record(self, spike: DoneStep, values: dict[str, float]) -> None:
        loss, norm = values["loss"], values["grad_norm"]
        cause = self._find_cause(spike) if self.not_finite == 1 else None
        say(
            f"spike at step {spike.step}: loss {loss:.4f}, gradient norm {norm:.4g}"
            f"{f' ({cause})' if cause else ''}; its update is left out "
            f"({values['spikes']:.0f} so far)"
        )
        numbers = {"loss": loss, "grad_norm": norm}
        facts = {name: x if isfinite(x) else str(x) for name, x in numbers.items()}  # JSON: no NaN
        count = int(values["spikes"])
        self.training.history.write("spike", spike.step, **facts, count=count, cause=cause)

    def _find_cause(self, done: DoneStep) -> str | None:
        """Where values that aren't finite begin; errors in this search are reported, not raised.

        The parameters that the step had were given to the next one, which may have changed them.
        """
        assert self.state is not None, "a step was done"
        limit = self.training.config.train.eval_timeout
        with self.training.instead(OTHER, f"looking at step {done.step}", limit):
            try:
                cause = find_cause(self.training.setup, self.state.params, done.batch)
            except Exception as error:  # such as a lack of memory
                return f"its origin can't be found: {describe_error(error)}"
        later = self.step > done.step
        return f"{cause} (with the parameters after step {self.step})" if cause and later else cause

    def _goes_back(self, step: int, checkpoint: int | None) -> bool:
        """Whether a spike at `step` sends the run back to this checkpoint, if there is one."""
        if self.training.config.train.on_spike != "rollback" or checkpoint is None:
            return False
        self.rollbacks = self.rollbacks + 1 if step <= self.furthest else 1
        self.furthest = max(self.furthest, step)
        if self.rollbacks > _MOST_ROLLBACKS:
            raise RunError(
                f"spike at step {step}, the {self.rollbacks}th since the run last got past step "
                f"{self.furthest}, on different data each time, so the data is not the reason; "
                "branch off an older checkpoint (train --branch_from) with a lower "
                "optimizer.learning_rate, or raise train.spike_deviations"
            )
        say(f"rolling back to checkpoint {checkpoint}; the data continues after step {step}")
        return True


def go_back(
    training: Training, hooks: Hooks, spike: DoneStep, state: TrainState
) -> RestoredCheckpoint:
    """The last checkpoint, with the position of the data after the spike; deletes the state."""
    count = spike.metrics["spikes"]
    checkpoints, setup, history = training.checkpoints, training.setup, training.history
    limit = training.config.train.save_timeout
    with training.instead(ROLLBACK, "going back to a checkpoint", limit):
        checkpoints.wait()
        for array in jax.tree.leaves(state):
            array.delete()  # two states may be more than the devices hold
        restored = checkpoints.go_back(setup.abstract_state, training.corpus.fingerprint)
        training.writer.rewind(restored.step)
    hooks.go_back(restored.step)
    hooks.restore(restored.facts.hooks)
    history.write_time(spike.step, at_once=True)
    history.write("rollback", spike.step, to=restored.step, count=int(count))
    counted = setup.complete(restored.state.with_spikes(count))
    return restored._replace(state=counted, facts=restored.facts._replace(drawn=spike.drawn))
