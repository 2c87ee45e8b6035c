"""Hooks of a config's own: when they are called, what they report, and how they fail."""

from unittest import mock

import jax.numpy as jnp
import numpy as np
import pytest
from helpers import metrics_of, stop_after

from t5x_diffeq.checkpoints.stored import TrainState
from t5x_diffeq.cli.train import train_to_end
from t5x_diffeq.config.config import Config
from t5x_diffeq.system.errors import InputError, RunError
from t5x_diffeq.training.hooks import Hook, LoopPosition, Training, basic_hooks
from t5x_diffeq.training.hooks.hook import DoneStep
from t5x_diffeq.training.hooks.hook_list import (
    Hooks,
    _check_numbers,
    load_hooks,
    make_hook,
    naming_hook,
)


class Calls(Hook):
    """Notes how it is called, for a run of the same process."""

    name = "calls"
    runs_later = True
    noted: list = []  # noqa: RUF012  # the test reads it from the class

    def __init__(self, training, every=2):
        super().__init__(training, every)

    def before_step(self, step, state, batch):
        self.noted.append(("before", step))

    def after_step(self, step, state, metrics):
        self.noted.append(("after", step))

    def report(self, done, values):
        self.noted.append(("report", done.step, values["loss"] > 0))

    def run(self, position):
        self.noted.append(("run", position.step))
        return {"calls/steps": int(position.state.step)}

    def stop(self, position):
        self.noted.append(("stop", position.step))

    def to_save(self):
        return {"noted": len(self.noted)}

    def restore(self, saved):
        self.noted.append(("restore", saved["noted"]))

    def __exit__(self, *error):
        self.noted.append(("exit",))


class Failing(Hook):
    name = "failing"

    def __init__(self, training, every):
        super().__init__(training, every)

    def run(self, position):
        raise ValueError("a fault of its own")


NAME = f"{__name__}:Calls"


@pytest.fixture
def noted():
    Calls.noted.clear()
    return Calls.noted


@pytest.mark.slow
def test_a_hook_is_called_around_steps_and_when_it_is_due(small, tmp_path, noted):
    """A step's metrics come when the next one is on its way, unless a hook is due or it stops.

    The batch of step 4 has been drawn when the signal comes. What is due at 4 is left to the next
    start.
    """
    small.mesh.fsdp = 1
    small.train.update(hooks=(f"{NAME}(every=4)",), total_steps=6, eval_every=6, checkpoint_every=6)
    assert stop_after(3, Config.of(small), tmp_path) == 42
    told = [each[:2] for each in noted]
    assert told == [
        ("run", 0),
        *(("before", 1), ("after", 1)),
        *(("before", 2), ("after", 2), ("report", 1)),
        *(("before", 3), ("after", 3), ("report", 2)),
        *(("before", 4), ("after", 4), ("report", 3), ("report", 4)),
        ("stop", 4),
        ("exit",),
    ]
    noted.clear()
    assert train_to_end(Config.of(small), tmp_path) == 0
    assert noted[0] == ("restore", len(told) - 1)  # saved between stop and exit
    assert [each[1] for each in noted if each[0] == "run"] == [4, 6]
    assert all(each[2] for each in noted if each[0] == "report")
    lines = {line["step"]: line for line in metrics_of(tmp_path) if "calls/steps" in line}
    assert {step: line["calls/steps"] for step, line in lines.items()} == {0: 0, 4: 4, 6: 6}


@pytest.mark.slow
def test_a_hook_that_fails_ends_the_run_by_its_name(small, tmp_path, capsys):
    small.mesh.fsdp = 1
    config = Config.of(small).with_values({"train.hooks": (f"{__name__}:Failing(every=3)",)})
    with pytest.raises(ValueError, match="a fault of its own") as raised:
        train_to_end(config, tmp_path)
    assert raised.value.__notes__ == ["in the hook failing at step 0"]


@pytest.mark.parametrize("values", [3, {3: 1.0}, {"a": "x"}, {"a": None}, {"a": [1, 2]}])
def test_a_hook_returns_numbers_by_name(values):
    with pytest.raises(RunError, match=r"`run` returns .*; it must return a dict of numbers, or"):
        _check_numbers(values, "own", [])
    _check_numbers({"a": 1, "b": np.float32(2), "c": jnp.ones(())}, "own", ["own", "train"])


def test_a_hook_does_not_report_the_numbers_of_another():
    with pytest.raises(RunError, match=r"'train/loss', a number of the hook train; .* 'own/'"):
        _check_numbers({"train/loss": 1.0}, "own", ["train", "own"])


class Emptying(Hook):
    """Removes the parameters."""

    name = "emptying"

    def run(self, position):
        position.state.params.clear()


def test_a_hook_keeps_the_tree_of_the_train_state():
    state = TrainState(jnp.zeros(()), {"w": jnp.zeros(3)}, None)
    hook = Emptying.__new__(Emptying)
    hook.training = mock.MagicMock()
    hook.training.__class__ = Training
    with pytest.raises(RunError, match="has added or removed arrays of the train state") as raised:
        Hooks(hook.training, [hook]).run([hook], LoopPosition(1, state, 1))
    assert raised.value.__notes__ == ["in the hook emptying at step 1"]


def test_a_hook_that_wants_to_end_the_process_is_named():
    with pytest.raises(SystemExit) as raised, naming_hook(Failing.__new__(Failing), 18):
        raise SystemExit(0)
    assert raised.value.__notes__ == ["in the hook failing at step 18"]


@pytest.mark.parametrize("name", ["json:dumps", "json:JSONDecoder(strict=True)"])
def test_what_is_no_hook_is_refused(small, tmp_path, name):
    small.train.hooks = (name,)
    with pytest.raises(InputError, match=r"train\.hooks=json:.* is not a class derived from"):
        train_to_end(Config.of(small), tmp_path)


class Nameless(Hook):
    """Has no name for messages."""


class RunsAlone(Hook):
    """Its `run` doesn't take the position."""

    name = "runs_alone"

    def run(self):
        return {}


class Train(Hook):
    """Has the name under which the project reports a step."""

    name = "train"

    def run(self, position):
        return {"train/loss": 0.0}


class KeepsArrays(Train):
    """Keeps what JSON can't hold."""

    name = "keeps_arrays"

    def to_save(self):
        return {"mean": np.ones(2)}


def test_what_a_hook_keeps_is_json():
    training = mock.create_autospec(Training, instance=True)
    hooks = Hooks(training, [KeepsArrays(training)])
    with pytest.raises(RunError, match=r"the hook keeps_arrays: `to_save` returns .*; it must ret"):
        hooks.states()


def test_two_hooks_have_two_names():
    with pytest.raises(InputError, match=r"its name 'idle_no_more' is another hook's"):
        load_hooks([f"{__name__}:IdleNoMore", f"{__name__}:IdleNoMore(every=4)"])


class IdleNoMore(Train):
    name = "idle_no_more"


class Idle(Hook):
    """Has none of a hook's methods."""

    name = "idle"

    def __init__(self, training, every=2):
        super().__init__(training, every)


class ChecksItself(Train):
    """Its `check` is no class method."""

    name = "checks_itself"

    def check(self, config, setup):
        pass


class ChecksTheConfig(Train):
    """Its `check` doesn't take the setup."""

    name = "checks_the_config"

    @classmethod
    def check(cls, config):
        pass


class WithoutEvery(Train):
    """Its `__init__` leaves out that of `Hook`."""

    name = "without_every"

    def __init__(self, training):
        self.training = training


@pytest.mark.parametrize(
    ("hook", "message"),
    [
        ("ChecksItself", "its method check must be a @classmethod"),
        ("ChecksTheConfig", r"its method must be check\(config, setup\), and is check\(config\)"),
        ("Calls(2)", r"name the arguments, as in Calls\(every=100\)"),
        ("Calls(every=True)", "every=True; it must be a whole number of at least 1"),
        ("Calls(every=-1)", "every=-1; it must be a whole number of at least 1"),
        ("Nameless", "the class has no name"),
        ("Idle", "the class does nothing; give it a `run"),
        ("Calls(evry=2)", "its arguments are invalid"),
        ("Calls(every='2')", "every='2'; it must be a whole number"),
        ("RunsAlone", r"its method must be run\(self, position\), and is run\(self\)"),
        ("Train", "its name 'train' is another hook's, .* the names .* are taken"),
    ],
)
def test_a_hook_that_cannot_be_made_is_refused_before_the_run(small, tmp_path, hook, message):
    small.train.hooks = (f"{__name__}:{hook}",)
    with pytest.raises(InputError, match=rf"train\.hooks={__name__}:.*{message}"):
        train_to_end(Config.of(small), tmp_path)
    assert not (tmp_path / "checkpoints").exists()


def test_a_hook_without_the_init_of_hooks():
    training = mock.create_autospec(Training, instance=True)
    (of_class,) = load_hooks([f"{__name__}:WithoutEvery"])
    with pytest.raises(
        InputError, match=r"without_every: its __init__ must call super\(\)\.__init"
    ):
        make_hook(of_class, training)


def test_a_hook_that_would_never_run_is_named(capsys):
    training = mock.create_autospec(Training, instance=True)
    for name, is_named in (
        (f"{__name__}:IdleNoMore", True),
        (f"{__name__}:IdleNoMore(every=3)", False),
    ):
        (of_class,) = load_hooks([name])
        make_hook(of_class, training)
        said = "has no `every`, so its run is never called; IdleNoMore(every=100)"
        assert (said in capsys.readouterr().err) == is_named


@pytest.mark.parametrize("targets", [8.0, 0.0])
def test_hooks_see_the_rates_of_a_logged_step(small, targets, monkeypatch):
    """Also of a batch without targets, whose loss is logged as no measurement."""
    monkeypatch.setattr(basic_hooks, "utilisation", lambda setup, rate: {"mfu": rate / 100})
    training = mock.MagicMock(spec=Training, start=0)
    training.history, training.writer, training.clock = mock.Mock(), mock.Mock(), mock.Mock()
    training.config = Config.of(small).with_values({"train.log_every": 1})
    training.setup = mock.Mock()
    training.clock.rates.return_value = {"tokens_per_second": 50.0}
    training.clock.line.return_value = "step 5"
    training.history.goodput.return_value = 0.75
    values = {"loss": 2.0, "targets": targets}
    basic_hooks.MetricsLog(training).report(DoneStep(5, {}, {}, 5), values)
    assert (values["loss"], values["mfu"], values["goodput"]) == (2.0, 0.5, 0.75)
    (step, written), _ = training.writer.write_scalars.call_args
    assert (step, written.get("train/loss")) == (5, 2.0 if targets else None)
    assert written["train/tokens_per_second"] == 50.0
