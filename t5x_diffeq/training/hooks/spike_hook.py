"""Handles spikes and values that aren't finite, as `train.on_spike` says.

The run ends, skips the updates of spikes, or rolls back to a checkpoint. The train step itself
detects a spike and skips its update.
"""

from collections.abc import Sequence
from math import isfinite
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from flax.traverse_util import flatten_dict

from t5x_diffeq.checkpoints.stored import RestoredCheckpoint, TrainState
from t5x_diffeq.model.language_model import LanguageModel, in_one_document
from t5x_diffeq.system.console import log
from t5x_diffeq.system.errors import RunError
from t5x_diffeq.system.files import describe_error
from t5x_diffeq.training.goodput import OTHER, ROLLBACK
from t5x_diffeq.training.hooks.hook import DoneStep, Hook, Training
from t5x_diffeq.training.hooks.hook_list import Hooks
from t5x_diffeq.training.objective import Batch, Params, places_of
from t5x_diffeq.training.setup import Setup
from t5x_diffeq.training.step import make_gradient
from t5x_diffeq.training.watch import sizes

_MOST_IN_A_ROW = 10  # the most steps in a row whose values aren't finite
_MOST_ROLLBACKS = 5  # the most rollbacks in a row to the same checkpoint


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
        self.step = training.start  # the last step that was given to the devices
        self.state: TrainState | None = None  # after that step
        self.not_finite = 0  # steps in a row whose values aren't finite
        self.rollbacks = 0  # the number in a row to the checkpoint `target`
        self.target: int | None = None

    def after_step(self, step: int, state: TrainState, metrics: object) -> None:
        """Keeps the state, to find the cause of a value that isn't finite."""
        self.step, self.state = step, state

    def report(self, done: DoneStep, values: dict[str, float]) -> None:
        """Removes `spike` from the values; raises RunError to end the run, GoBack to roll back."""
        checkpoints = self.training.checkpoints
        finite = isfinite(values["loss"]) and isfinite(values["grad_norm"])
        self.not_finite = 0 if finite else self.not_finite + 1
        if values.pop("spike", 0) and self.not_finite <= _MOST_IN_A_ROW:
            self._record(done, values)
            if self._goes_back(done.step, checkpoints.rollback_step()):
                raise GoBack(done)
            return
        loss_first = sorted(values, key=lambda name: name != "loss")
        faults = [f"{name} is {values[name]}" for name in loss_first if not isfinite(values[name])]
        if faults:
            start, last = self.training.start, checkpoints.latest_step
            raise not_finite_error(done.step, faults, last, start, self._find_cause(done))

    def _record(self, spike: DoneStep, values: dict[str, float]) -> None:
        loss, norm = values["loss"], values["grad_norm"]
        cause = self._find_cause(spike) if self.not_finite == 1 else None
        log(
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

        The step's own parameters were donated, so the parameters after the last step are examined.
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
        """Whether a spike at `step` sends the run back to `checkpoint`; a RunError if too often."""
        if self.training.config.train.on_spike != "rollback" or checkpoint is None:
            return False
        self.rollbacks = self.rollbacks + 1 if checkpoint == self.target else 1
        self.target = checkpoint
        if self.rollbacks > _MOST_ROLLBACKS:
            raise RunError(
                f"spike at step {step}, the {self.rollbacks}th since checkpoint {checkpoint}, on "
                "different data each time, so the data is not the reason; "
                "branch off an older checkpoint (train --branch_from) with a lower "
                "optimizer.learning_rate, or raise train.spike_deviations"
            )
        log(f"rolling back to checkpoint {checkpoint}; the data continues after step {step}")
        return True


def go_back(
    training: Training, hooks: Hooks, spike: DoneStep, state: TrainState
) -> RestoredCheckpoint:
    """Restores the last checkpoint, with the data's position after the spike; deletes `state`."""
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
    # The time comes first: only seconds that are written can be counted as lost by the rollback.
    history.write_time(spike.step, at_once=True)
    history.write("rollback", spike.step, to=restored.step, count=int(count))
    counted = setup.complete(restored.state.with_spikes(count))
    return restored._replace(
        state=counted, facts=restored.facts._replace(drawn=spike.batches_consumed)
    )


# ------------------------------------------------------------------------------ causes


def find_cause(setup: Setup, params: Params, batch: Batch) -> str | None:
    """Where values that aren't finite first appear; None if they don't appear again.

    The search looks at the parameters, then at f, g and the state in each solver step, then at the
    gradient. It compiles programs of its own, and every process must call it.
    """
    if fault := _leaves_not_finite(params):
        return f"{fault} of the parameters isn't finite"
    parts = setup.config.train.microbatches  # a whole batch may not fit
    for n in range(parts):
        rows = {name: x[n::parts] for name, x in batch.items()}
        if fault := _solver_step_not_finite(setup, params, rows):
            return fault
    if setup.config.train.distill_from:
        return None  # the gradient takes the teacher's parameters, too
    batch_gradient = make_gradient(setup.model, setup.trains, setup.train_config)
    gradient = jax.jit(lambda *given: batch_gradient(*given).gradient)(
        params, batch, setup.dropout_key
    )
    fault = _leaves_not_finite(gradient)
    return f"all states are finite, but the gradient of {fault} isn't" if fault else None


def _leaves_not_finite(tree: Params) -> str | None:
    """The first leaf that isn't finite, and how many more there are."""
    are_finite = jax.jit(lambda leaves: jax.tree.map(lambda x: jnp.isfinite(x).all(), leaves))
    leaves = flatten_dict(jax.device_get(are_finite(tree)), sep="/")
    names = [name for name, is_finite in leaves.items() if not is_finite]
    if len(names) > 1:
        return f"{names[0]} (and {len(names) - 1} more of {len(leaves)})"
    return names[0] if names else None


def _solver_step_not_finite(setup: Setup, params: Params, batch: Batch) -> str | None:
    """The first of f, g and the state that isn't finite, with its solver step."""
    model = setup.model

    @jax.jit
    def curves_of(params: Params, batch: Batch) -> dict:
        places = places_of(batch) or in_one_document(batch["inputs"])
        y = nn.apply(LanguageModel.embed, model)({"params": params}, batch["inputs"], places)
        weights = nn.apply(LanguageModel.weights, model)({"params": params})
        return sizes(model.config, weights, y, places)

    curves = {name: np.asarray(x) for name, x in jax.device_get(curves_of(params, batch)).items()}
    if not isfinite(curves["state"][0]):
        return "the embedded tokens aren't finite"
    steps = model.config.num_steps
    for n in range(steps):
        for name, value in (
            ("f (attention)", curves["f"][n]),
            ("g (the MLP)", curves["g"][n]),
            ("the state", curves["state"][n + 1]),
        ):
            if not isfinite(value):
                return f"{name} isn't finite in solver step {n + 1} of {steps}"
    return None


def not_finite_error(
    step: int, faults: Sequence[str], last_checkpoint: int | None, start: int, cause: str | None
) -> RunError:
    """The error that ends a run whose values are no longer finite; says what to try.

    `faults` says what is wrong with the step: "loss is nan". The run was resumed from the
    checkpoint `start`, or is new (0). `cause` is where the first such value appears, if known.
    """
    what = f"at step {step} {' and '.join(faults)}{f': {cause}' if cause else ''}"
    if start and step == start + 1:
        return RunError(
            f"{what}, the first step after checkpoint {start} was restored: that checkpoint is "
            f"suspect; move checkpoints/{start} away, and the same command continues from an older "
            "one"
        )
    good = f"the last good checkpoint is {last_checkpoint}"
    if last_checkpoint is None:
        good = "no checkpoint was saved yet"
    return RunError(
        f"{what}; {good}, and this state was not saved; try a lower optimizer.learning_rate, a "
        "longer optimizer.warmup_fraction or a smaller optimizer.max_grad_norm in a new --workdir"
    )
