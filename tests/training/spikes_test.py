"""Spikes: found against NumPy, skipped, rolled back; averages; what is kept of them on resume."""

import json
from unittest.mock import create_autospec

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import config_with_train, metrics_of, stop_after

from t5x_diffeq.checkpoints.stored import TrainState
from t5x_diffeq.cli.train import train_to_end
from t5x_diffeq.config.config import Config
from t5x_diffeq.data import examples
from t5x_diffeq.data.batches import train_batches
from t5x_diffeq.system.errors import InputError, RunError
from t5x_diffeq.training.goodput import LOST
from t5x_diffeq.training.history import read_events
from t5x_diffeq.training.load import load_run
from t5x_diffeq.training.run_status import RunStatus
from t5x_diffeq.training.setup import Setup
from t5x_diffeq.training.spikes import RecentSteps, look_for_spike
from t5x_diffeq.training.step import _update

pytestmark = pytest.mark.in_turns
WINDOW = 8


def reference(values, new, k):
    """Whether `new` is a spike after the last values, in plain NumPy."""
    recent = np.array(values[-WINDOW:])
    recent = recent[np.isfinite(recent)]
    if not np.isfinite(new):
        return True
    if 2 * len(recent) < WINDOW:
        return False
    median = np.median(recent)
    scale = max(1.4826 * np.median(np.abs(recent - median)), 0.01 * abs(median))
    return bool(new - median > k * scale)


@pytest.mark.parametrize("k", [6.0, 1.5])  # noise comes near the lower one
def test_spikes_are_found_as_in_numpy(k):
    random = np.random.default_rng(0)
    losses = (3 + 0.1 * random.standard_normal(60)).astype(np.float32)
    norms = (1 + 0.2 * random.standard_normal(60)).astype(np.float32)
    losses[20], norms[30], losses[40], norms[41] = 9.0, 7.0, np.nan, np.inf
    losses[50:] += 3  # a new level, which the window accepts
    recent, found = RecentSteps.new(WINDOW), []
    take = jax.jit(look_for_spike, static_argnums=5)
    before = recent
    for step, (loss, norm) in enumerate(zip(losses, norms, strict=True)):
        is_spike, recent, _ = take(recent, jnp.int32(step), loss, norm, 8.0, k)
        found.append(bool(is_spike))
    expected = [
        reference(losses[:n], losses[n], k) or reference(norms[:n], norms[n], k) for n in range(60)
    ]
    assert found == expected
    assert {20, 30, 40, 41, 50} <= set(np.flatnonzero(found))
    assert k < 6 or not any(found[56:])
    assert int(recent.spikes) == sum(expected)
    is_spike, empty, _ = take(before, jnp.int32(0), 0.0, 0.0, 0.0, 6.0)  # a batch without targets
    assert not is_spike and np.isnan(empty.values).all()


@pytest.fixture
def poisoned(small, monkeypatch):
    """A config of ten steps on one device; the fourth batch, and others if asked, give NaN."""
    small.mesh.fsdp = 1
    small.train.update(total_steps=10, checkpoint_every=2, eval_every=5, spike_window=WINDOW)
    bad = {4}

    def poison(mixture, batch_size, seed, start, *arguments):
        batches = train_batches(mixture, batch_size, seed, start, *arguments)
        for number, batch in enumerate(batches, start + 1):
            mask = batch["mask"] * (jnp.nan if number in bad else 1)
            yield {**batch, "mask": mask}

    monkeypatch.setattr(examples, "train_batches", poison)
    return small, bad


def params_of(workdir, **choice):
    return load_run(workdir, 256, batch_size=1, **choice).params


def assert_equal(a, b):
    jax.tree.map(np.testing.assert_array_equal, a, b)


@pytest.mark.slow
def test_a_loss_that_is_not_finite_ends_a_run(poisoned, tmp_path):
    config, _ = poisoned
    with pytest.raises(RunError, match=r"at step 4 loss is nan .*; the last good checkpoint is 2"):
        train_to_end(Config.of(config), tmp_path / "run")
    assert read_events(tmp_path / "run")[-1]["error"] == "RunError"
    assert RunStatus(tmp_path / "run", 0).state == "failed (RunError)"


def losses_of(workdir):
    return [line["train/loss"] for line in metrics_of(workdir) if "train/loss" in line]


@pytest.mark.slow
def test_a_spike_is_skipped_and_its_count_is_kept(poisoned, tmp_path, capsys):
    config, _ = poisoned
    config.train.update(on_spike="skip", checkpoint_every=1, keep_checkpoints=10)
    assert stop_after(4, Config.of(config), tmp_path) == 42
    assert "spike at step 4: loss nan" in capsys.readouterr().err
    assert train_to_end(Config.of(config), tmp_path) == 0
    assert "continuing at step 5" in capsys.readouterr().err
    lines = {line["step"]: line for line in metrics_of(tmp_path)}
    assert [lines[step].get("train/spikes") for step in (3, 4, 6, 9)] == [0, 1, 1, 1]
    assert "train/loss" not in lines[4]
    assert lines[4]["train/learning_rate"] > lines[6]["train/learning_rate"]  # the schedule goes on
    assert_equal(*(params_of(tmp_path, checkpoint=n) for n in (3, 4)))


@pytest.mark.slow
def test_a_rollback_goes_past_the_data(poisoned, tmp_path, monkeypatch, capsys):
    """Steps 1 and 2, then step 3 with the fifth batch, as if the two before weren't there.

    The run is stopped before the spike, which leaves a checkpoint of no schedule, and after it.
    """
    config, bad = poisoned
    config.train.on_spike = "rollback"
    run = tmp_path / "run"
    assert stop_after(2, Config.of(config), run) == 42
    assert stop_after(4, Config.of(config), run) == 42
    assert (
        "rolling back to checkpoint 2; the data continues after step 4" in capsys.readouterr().err
    )
    assert train_to_end(Config.of(config), run) == 0
    steps = [line["step"] for line in metrics_of(run) if "train/loss" in line]
    assert steps == [*range(1, 11)]
    facts = RunStatus(run, 0).facts()
    counted = [facts[name] for name in ("rollbacks", "spikes", "state", "step")]
    assert counted == [1, 1, "done", 10]
    assert facts["seconds"][LOST] > 0
    assert metrics_of(run)[-2]["train/spikes"] == 1
    saved = {e["step"] for e in read_events(run) if e["event"] == "time"}
    assert {2, 4, 6, 8, 10} <= saved

    bad.clear()

    def without_two(mixture, batch_size, seed, start, *arguments):
        assert start in (0, 2)
        batches = train_batches(mixture, batch_size, seed, start, *arguments)
        return (batch for number, batch in enumerate(batches, start + 1) if number not in (3, 4))

    monkeypatch.setattr(examples, "train_batches", without_two)
    assert train_to_end(Config.of(config), tmp_path / "other") == 0
    assert losses_of(tmp_path / "other") == losses_of(run)
    assert_equal(params_of(tmp_path / "other"), params_of(run))


@pytest.mark.slow
def test_a_rollback_goes_to_steps_of_another_depth(poisoned, tmp_path):
    """The run resumes at step 3, behind the last step with a single solver step."""
    config, _ = poisoned
    config.train.update(on_spike="rollback", depths=(1,), depths_until=0.3)
    assert stop_after(3, Config.of(config), tmp_path) == 42
    assert train_to_end(Config.of(config), tmp_path) == 0
    assert RunStatus(tmp_path, 0).facts()["rollbacks"] == 1


@pytest.mark.slow
def test_what_does_not_end_is_ended(poisoned, tmp_path):
    config, bad = poisoned
    bad |= {*range(4, 40)}
    config.train.on_spike = "rollback"
    with pytest.raises(RunError, match="the 6th since checkpoint 2"):
        train_to_end(Config.of(config), tmp_path / "back")
    config.train.update(on_spike="skip", total_steps=30)
    with pytest.raises(RunError, match="at step 14 loss is nan"):
        train_to_end(Config.of(config), tmp_path / "skip")


@pytest.mark.slow
def test_averages(small, tmp_path):
    """They follow their recursion, beginning at the step from which on the run keeps them."""
    small.mesh.fsdp = 1
    small.train.update(checkpoint_every=1, keep_checkpoints=10)
    assert stop_after(2, Config.of(small), tmp_path) == 42
    with pytest.raises(InputError, match=r"--averages: .* train.ema_decay"):
        params_of(tmp_path, averages=True)
    small.train.update(ema_decay=0.9, eval_averages=True)
    assert train_to_end(Config.of(small), tmp_path) == 0
    expected = params_of(tmp_path, checkpoint=3)
    for step in (3, 4, 5):
        d = min(0.9, (1 + step) / (10 + step))
        params = params_of(tmp_path, checkpoint=step + 1)
        expected = jax.tree.map(lambda a, p, d=d: d * a + (1 - d) * p, expected, params)
    found = params_of(tmp_path, averages=True)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7), found, expected
    )
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    evaluated = [line for line in lines if "eval_averages/loss" in line]
    assert [line["step"] for line in evaluated] == [3, 6]  # that at 3 was left out by the stop
    assert evaluated[-1]["eval_averages/loss"] != lines[-1].get("eval/loss")
    small.train.update(ema_decay=0.0, eval_averages=False, total_steps=7)
    assert train_to_end(Config.of(small), tmp_path) == 0  # and they can be given up


@pytest.mark.parametrize(("step", "expected"), [(0, 0.1), (10_000, 0.9)])
def test_averages_move_slowly_once_the_run_is_old(step, expected):
    """The parameter goes from 1 to 0: of the average, a tenth is left at first, later 0.9."""
    sgd = optax.with_extra_args_support(optax.sgd(1.0))
    facts = {"config": config_with_train(ema_decay=0.9), "trains": lambda _: True}
    setup = create_autospec(Setup, instance=True, optimizer=sgd, **facts)
    w = {"w": jnp.ones(())}
    before = TrainState(jnp.int32(step), w, sgd.init(w), averages=w)
    after = _update(setup, before, w, norm=1.0)
    assert (float(after.params["w"]), float(after.averages["w"])) == (0, pytest.approx(expected))
