"""Branches: they go on exactly where their run was, with another schedule."""

import json
import sys

import jax
import numpy as np
import pytest
from helpers import call, metrics_of, small_config

from t5x_diffeq.checkpoints.identity import run_of
from t5x_diffeq.checkpoints.workdir import read_config
from t5x_diffeq.cli import train as verb
from t5x_diffeq.cli.train import train_to_end
from t5x_diffeq.config.config import Config
from t5x_diffeq.system.errors import InputError
from t5x_diffeq.training import branch
from t5x_diffeq.training.load import load_run


@pytest.fixture(scope="module")
def stable(text, tmp_path_factory):
    """The config and workdir of a run whose rate is constant for 5 of its 6 steps."""
    config = small_config(text)
    config.mesh.fsdp = 1
    config.optimizer.update(schedule="wsd", warmup_fraction=0.0)
    config.train.update(ema_decay=0.9, eval_every=6, eval_batches=1)
    workdir = tmp_path_factory.mktemp("stable") / "run"
    assert train_to_end(Config.of(config), workdir) == 0
    return config, workdir


def config_of_branch(source, workdir, step=None, **values):
    """What `train --branch_from` does before it trains."""
    changes = {key.replace("__", "."): value for key, value in values.items()}
    return branch.branch_off(workdir, source, step, None, changes, first=True)


def branch_off(*arguments, **values):
    """What `train --branch_from` does."""
    return train_to_end(config_of_branch(*arguments, **values), arguments[1])


def params_of(workdir, averages=False):
    return load_run(workdir, 256, batch_size=1, averages=averages).params


@pytest.mark.slow
@pytest.mark.in_turns("trainings")
def test_a_branch_with_the_same_schedule_is_its_run(stable, tmp_path):
    """Parameters, averages, data and metrics go on exactly; so does the history."""
    assert branch_off(stable[1], tmp_path, step=2, optimizer__cooldown_steps=1) == 0
    assert metrics_of(tmp_path) == metrics_of(stable[1])
    for averages in (False, True):
        found, expected = (params_of(w, averages=averages) for w in (tmp_path, stable[1]))
        jax.tree.map(np.testing.assert_array_equal, found, expected)
    first = json.loads((tmp_path / "history.jsonl").read_text().splitlines()[0])
    assert (first["event"], first["step"]) == ("start", 2)
    assert not (tmp_path / "data").exists()  # the tokens stay where they are
    assert run_of(tmp_path).startswith(f"{run_of(stable[1])}@2/")


@pytest.mark.slow
@pytest.mark.in_turns("trainings")
def test_cooldowns_from_one_checkpoint(stable, tmp_path, capsys):
    """Each takes all of its branch's steps; the same command again resumes.

    Factors of roles, which are no part of the optimizer's state, may be new.
    """
    more = {"train__total_steps": 10, "optimizer__role_multipliers": (("kernel", 0.5),)}
    source, workdir = stable[1], tmp_path / "a"
    assert branch_off(source, workdir, 4, **more) == 0
    assert "at its step 4, with optimizer.cooldown_steps=6" in capsys.readouterr().err
    rates = [
        line["train/learning_rate"] for line in metrics_of(workdir) if "train/learning_rate" in line
    ]
    peak, least = stable[0].optimizer.learning_rate, stable[0].optimizer.end_lr_fraction
    expected = peak * (1 - (1 - least) * np.arange(6) / 6)
    np.testing.assert_allclose(rates[:4], peak, rtol=1e-5)
    np.testing.assert_allclose(rates[4:], expected, rtol=1e-4)
    assert branch_off(source, workdir, **more) == 0
    assert "already finished: 10 of 10" in capsys.readouterr().err
    again = [config_of_branch(source, workdir, step, **more) for step in (None, 4)]
    assert again[0] == again[1]
    with pytest.raises(InputError, match=r"belongs to a branch of .* at step 4"):
        config_of_branch(source, workdir, 2, **more)


@pytest.mark.parametrize(
    ("step", "values", "message"),
    [
        (6, {"train__batch_size": 4}, "train.batch_size was 8, is 4; a branch has the model"),
        (6, {"model__embed_dim": 32}, "model.embed_dim was 16, is 32"),
        (6, {"seed": 1}, "seed was 0, is 1"),
        (6, {"train__total_steps": 6}, "total_steps=6 is not more than 6"),
        (5, {}, r"checkpoint 5 of .* does not exist; there are 2, 4, 6"),
    ],
)
def test_what_a_branch_can_not_be(finished, tmp_path, step, values, message):
    with pytest.raises(InputError, match=message):
        config_of_branch(
            finished[1], tmp_path / "new", step, **{"train__total_steps": 10, **values}
        )
    assert not (tmp_path / "new" / "config.json").exists()


@pytest.mark.slow
def test_the_command_line(stable, tmp_path, monkeypatch):
    """Without --config, the config is the run's, but for the keys that are given."""
    arguments = [
        f"--branch_from={stable[1]}",
        f"--workdir={tmp_path / 'new'}",
        "--branch_step=4",
        "--config.train.total_steps=5",
    ]
    monkeypatch.setattr(sys, "argv", ["verb", *arguments])
    made = []
    monkeypatch.setattr(verb, "train_to_end", lambda config, workdir: made.append(config) or 0)
    assert call(verb, *arguments) == 0
    assert made[0].model == read_config(stable[1]).model
    assert (made[0].train.total_steps, made[0].optimizer.cooldown_steps) == (5, 1)


def test_a_copy_that_was_cut_off_is_made_again(finished, tmp_path, monkeypatch):
    config, source = finished

    def fail(*_):
        raise OSError("cut off")

    with monkeypatch.context() as patch:
        patch.setattr(branch, "save_config", fail)
        with pytest.raises(OSError, match="cut off"):
            config_of_branch(source, tmp_path, train__total_steps=7)
    with pytest.raises(InputError, match=r"holds checkpoints but no config.json"):
        train_to_end(Config.of(config), tmp_path)
    (tmp_path / "checkpoints" / "6" / "left over").touch()
    made = config_of_branch(source, tmp_path, train__total_steps=7)
    assert made == read_config(tmp_path)
    assert metrics_of(tmp_path) == metrics_of(source)
    copied, original = (workdir / "checkpoints" / "6" for workdir in (tmp_path, source))
    assert {path.relative_to(copied) for path in copied.rglob("*")} == {
        path.relative_to(original) for path in original.rglob("*")
    }


def test_a_folder_of_another_run_is_left_alone(finished, tmp_path):
    (tmp_path / "checkpoints" / "3").mkdir(parents=True)
    with pytest.raises(InputError, match="holds checkpoints that were not copied by --branch_from"):
        config_of_branch(finished[1], tmp_path, train__total_steps=7)
    assert (tmp_path / "checkpoints" / "3").exists()
