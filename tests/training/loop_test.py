"""The loop alone, with stand-ins for the compiled step and the hooks: the order of its calls."""

from unittest.mock import create_autospec

import pytest
from helpers import setup_of, training_of

from t5x_diffeq.checkpoints.stored import RestoredCheckpoint, TrainState
from t5x_diffeq.training import loop
from t5x_diffeq.training.hooks import Hook, LoopPosition
from t5x_diffeq.training.hooks.hook_list import Hooks
from t5x_diffeq.training.hooks.spike_hook import GoBack

DUE = (3, 4)  # the steps at which a hook is due: the last one always is
CALLS = ("before_batch", "before_step", "after_step", "report", "due", "run", "stop")


def state():
    return create_autospec(TrainState, instance=True)


@pytest.fixture
def run_loop(small, tmp_path, monkeypatch):
    """Runs the loop from step 0; the calls of the hooks with their steps, and what it returns.

    A signal is seen after step `stop_at`, and the report of step `spike` sends the run back to 1.
    """
    small.mesh.fsdp = 1
    small.train.total_steps = 4
    training, hook = training_of(setup_of(small), tmp_path), create_autospec(Hook, instance=True)
    hooks = create_autospec(Hooks, instance=True)

    told, spikes = [], []

    def note(name, step, *_):
        number = getattr(step, "step", step)
        told.append((name, number))
        if name == "report" and number in spikes:
            spikes.remove(number)
            raise GoBack(step)
        return True if name == "run" else [hook] if name == "due" and step in DUE else []

    for name in CALLS:
        getattr(hooks, name).side_effect = lambda *given, name=name: note(name, *given)
    hooks.run.side_effect = lambda due, at: note("run", at) if due else True
    back = RestoredCheckpoint(state(), 1)
    monkeypatch.setattr(loop, "go_back", lambda *_: back)
    monkeypatch.setattr(loop, "_batches_after", lambda *_: iter([{}] * 9))

    def run_loop(stop_at=None, spike=None):
        spikes.extend([spike] if spike else [])
        training.stop.should_stop.side_effect = lambda: told[-1] == ("after_step", stop_at)
        at, batches = LoopPosition(0, state(), 0), iter([{}] * 9)
        at, stopped = loop._loop(training, hooks, at, batches, {(2,): lambda *_: (state(), {})}, ())
        return [each for each in told if each[0] not in ("before_batch", "due")], at, stopped

    return run_loop


def test_a_step_is_reported_while_the_next_one_runs_unless_its_state_is_used(run_loop):
    told, at, stopped = run_loop()
    assert told == [
        *(("before_step", 1), ("after_step", 1)),
        *(("before_step", 2), ("after_step", 2), ("report", 1)),
        *(("before_step", 3), ("after_step", 3), ("report", 2), ("report", 3), ("run", 3)),
        *(("before_step", 4), ("after_step", 4), ("report", 4), ("run", 4)),
    ]
    assert (at.step, at.batches_consumed, stopped) == (4, 4, False)


def test_a_signal_stops_after_all_is_reported(run_loop):
    told, at, stopped = run_loop(stop_at=2)
    assert told[-4:] == [("after_step", 2), ("report", 1), ("report", 2), ("stop", 2)]
    assert (at.step, stopped) == (2, True)


def test_after_a_spike_the_loop_goes_on_at_the_checkpoint(run_loop):
    told, at, stopped = run_loop(spike=2)
    assert told[6:10] == [
        *(("after_step", 3), ("report", 2)),
        *(("before_step", 2), ("after_step", 2)),
    ]
    assert (at.step, at.batches_consumed, stopped) == (4, 4, False)


def test_a_signal_and_a_spike_end_at_the_checkpoint_which_is_saved(run_loop):
    told, at, stopped = run_loop(stop_at=2, spike=2)
    assert told[-3:] == [("after_step", 2), ("report", 1), ("report", 2)]
    assert (at.step, stopped) == (1, True)
