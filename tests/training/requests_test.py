"""A file in the workdir asks a run for a checkpoint; it goes on as if nobody had asked."""

import threading
from unittest.mock import create_autospec

import pytest
from fault_checkpoints import state_at
from helpers import config_with_train, metrics_of, training_of
from patience import patience

from t5x_diffeq.checkpoints.checkpoint_folder import whole_steps
from t5x_diffeq.cli.train import train_to_end
from t5x_diffeq.cluster.signals import StopSignals
from t5x_diffeq.config.config import Config
from t5x_diffeq.training import loop
from t5x_diffeq.training.hooks import LoopPosition, requests
from t5x_diffeq.training.hooks.basic_hooks import Saves
from t5x_diffeq.training.setup import Setup


@pytest.fixture
def saves(tmp_path):
    config = config_with_train(total_steps=99, checkpoint_every=50)
    training = training_of(create_autospec(Setup, instance=True, config=config), tmp_path)
    training.stop, training.hook_states = StopSignals(), dict
    return Saves(training)


def test_a_file_asks_for_a_checkpoint_once(saves, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(requests, "SECONDS_BETWEEN_LOOKS", 0.02)
    taken = threading.Event()
    take_up = saves.training.requests["save"]
    saves.training.requests["save"] = lambda file: (take_up(file), taken.set())
    with requests.Requests(saves.training):
        assert not saves.is_due(7)
        (tmp_path / "save").touch()
        assert taken.wait(patience(20))
    assert not (tmp_path / "save").exists()
    assert capsys.readouterr().err == (
        f"{tmp_path / 'save'} asks for a checkpoint: it is saved after the next step\n"
    )
    assert saves.is_due(7)
    saves.run(LoopPosition(7, state_at(7), 7))
    ((step, _, _), _) = saves.training.checkpoints.save.call_args
    assert step == 7
    assert not saves.is_due(8) and saves.is_due(50)


def test_a_request_that_cannot_be_taken_up_is_a_warning(saves, tmp_path, capsys):
    (tmp_path / "save").mkdir()
    looker = requests.Requests(saves.training)
    ended = iter((False, False, True))
    looker.ended = create_autospec(threading.Event, instance=True)
    looker.ended.wait = lambda _: next(ended)
    looker._look_often()
    assert capsys.readouterr().err.count("warning: ") == 1
    assert not saves.is_due(7)


@pytest.mark.slow
def test_a_run_saves_when_it_is_asked_and_changes_nothing(finished, tmp_path, monkeypatch):
    config = finished[0]
    monkeypatch.setattr(requests, "SECONDS_BETWEEN_LOOKS", 0.001)
    batches_after = loop._batches_after

    def ask(training, *rest):
        for n, batch in enumerate(batches_after(training, *rest)):
            if n == 2:
                (tmp_path / "save").touch()
                while not training.stop.save_asked:
                    threading.Event().wait(0.01)
            yield batch

    monkeypatch.setattr(loop, "_batches_after", ask)
    assert train_to_end(Config.of(config), tmp_path) == 0
    assert 3 in whole_steps(tmp_path / "checkpoints")
    assert 3 not in whole_steps(finished[1] / "checkpoints")
    assert metrics_of(tmp_path) == metrics_of(finished[1])
