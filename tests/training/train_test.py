"""Whole runs: stopped and resumed, refused, fallen back, sharded."""

import json
import os
import shutil
import signal

import jax
import numpy as np
import pytest
from helpers import metrics_of, stop_after

import t5x_diffeq as td
from t5x_diffeq.checkpoints.identity import run_of
from t5x_diffeq.cli.train import train_to_end
from t5x_diffeq.config.config import Config
from t5x_diffeq.data.corpus import load_corpus
from t5x_diffeq.system.errors import InputError, RunError
from t5x_diffeq.training import loop
from t5x_diffeq.training import step as train_step
from t5x_diffeq.training.hooks import basic_hooks
from t5x_diffeq.training.load import load_run
from t5x_diffeq.training.tracking.jsonl import read_metrics


def losses(workdir):
    return [line["train/loss"] for line in read_metrics(workdir) if "train/loss" in line]


def interrupt_evaluation(patch, step):
    """SIGTERM comes as the evaluation at this step begins."""
    eval_batches = basic_hooks.eval_batches

    def interrupt(*arguments):
        if arguments[-1] == f"evaluating at step {step}":
            os.kill(os.getpid(), signal.SIGTERM)
        yield from eval_batches(*arguments)

    patch.setattr(basic_hooks, "eval_batches", interrupt)


@pytest.mark.slow
def test_stopped_and_resumed_equals_undisturbed(finished, tmp_path, monkeypatch, capsys):
    """By Ctrl-C, and by SIGTERM in an evaluation: the next start makes up for what was left out."""
    config, workdir = finished
    assert stop_after(2, Config.of(config), tmp_path, signal.SIGINT) == 130
    assert "by Ctrl-C after step 3, saved; the same command continues" in capsys.readouterr().err
    assert [line["step"] for line in metrics_of(tmp_path)] == [0, 1, 2, 3]  # no evaluation at 3
    with monkeypatch.context() as patch:
        interrupt_evaluation(patch, 6)
        assert train_to_end(Config.of(config), tmp_path) == 42
    told = capsys.readouterr().err
    assert "continuing at step 3" in told and "stopped by SIGTERM after step 6, saved" in told
    assert metrics_of(tmp_path) == metrics_of(workdir)[:-1]
    assert train_to_end(Config.of(config), tmp_path) == 0
    assert "continuing at step 6" in capsys.readouterr().err
    assert metrics_of(tmp_path) == metrics_of(workdir)
    params = [load_run(w, 256, batch_size=1).params for w in (workdir, tmp_path)]
    jax.tree.map(np.testing.assert_array_equal, *params)


def test_metrics_written_and_falling(finished):
    _, workdir = finished
    assert [line["step"] for line in metrics_of(workdir) if "eval/loss" in line] == [0, 3, 6]
    assert losses(workdir)[0] == pytest.approx(np.log(256), abs=0.2)
    assert losses(workdir)[-1] < losses(workdir)[0]
    assert list((workdir / "events").glob("events.out.tfevents.*"))
    assert json.loads((workdir / "config.json").read_text())["model"]["embed_dim"] == 16


def test_a_finished_run_says_so(finished, capsys):
    config, workdir = finished
    before = (workdir / "metrics.jsonl").read_bytes()
    assert train_to_end(Config.of(config), workdir) == 0
    assert "already finished: 6 of 6 steps" in capsys.readouterr().err
    assert (workdir / "metrics.jsonl").read_bytes() == before


def test_another_config_is_refused_and_how_often_may_change(finished):
    config, workdir = finished
    other = config.copy_and_resolve_references()
    other.optimizer.learning_rate = 0.5
    with pytest.raises(InputError, match=r"optimizer.learning_rate was 0.003, is 0.5"):
        train_to_end(Config.of(other), workdir)
    often = config.copy_and_resolve_references()
    often.train.log_every = 2
    assert train_to_end(Config.of(often), workdir) == 0


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [{"fsdp": 8}, {"data": 2, "fsdp": 2, "tensor": 2}])
def test_eight_devices_equal_one(finished, tmp_path, capfd, mesh):
    config, workdir = finished
    sharded = config.copy_and_resolve_references()
    sharded.mesh.update(mesh)
    assert train_to_end(Config.of(sharded), tmp_path) == 0
    np.testing.assert_allclose(losses(tmp_path), losses(workdir), atol=1e-5)
    assert "Involuntary full rematerialization" not in capfd.readouterr().err


@pytest.mark.slow
def test_a_state_that_is_not_finite_is_not_saved(small, tmp_path):
    small.optimizer.learning_rate = 1e30
    small.optimizer.warmup_fraction = 0.0
    small.train.checkpoint_every = 1
    small.mesh.fsdp = 1
    with pytest.raises(RunError, match=r"at step \d .*last good checkpoint is 1.*learning_rate"):
        train_to_end(Config.of(small), tmp_path)
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["1"]


def test_workdirs_that_lost_a_file(finished, tmp_path):
    config, workdir = finished
    for lost, message in [
        ("config.json", "holds checkpoints but no config.json"),
        ("data.json", "data.json, which says where the tokens are"),
        ("tokenizer", "has lost its tokenizer"),
        ("data", "has lost its tokens in data/0/; restore them"),
    ]:
        copy = tmp_path / lost
        shutil.copytree(workdir, copy, ignore=shutil.ignore_patterns(lost))
        with pytest.raises(InputError, match=message):
            train_to_end(Config.of(config), copy)
    copy = tmp_path / "checkpoints"
    shutil.copytree(workdir, copy, ignore=shutil.ignore_patterns("checkpoints"))
    with pytest.raises(InputError, match=r"has saved step \d+ and has no checkpoint left, so it"):
        train_to_end(Config.of(config), copy)
    assert (copy / "metrics.jsonl").read_text() == (workdir / "metrics.jsonl").read_text()
    (copy / "config.json").write_text("[]")
    with pytest.raises(InputError, match=r"config.json is not the config of a run"):
        train_to_end(Config.of(config), copy)


def test_a_workdir_with_the_tokens_of_another_run(finished, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(finished[1], copy)
    facts = json.loads((copy / "data.json").read_text())
    facts["parts"][0]["fingerprint"] = "0" * 64
    (copy / "data.json").write_text(json.dumps(facts))
    with pytest.raises(InputError, match=r"data/0 holds the tokens of other data than .*data.json"):
        load_corpus(copy)


def test_no_run_begins_in_a_part_of_another(finished):
    config, workdir = finished
    with pytest.raises(InputError, match="checkpoints is a part of the run"):
        td.train(config, workdir / "checkpoints")


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("model.remat", "keep:mlp,norm", "keeps 'norm'; it can keep qkv, attention, mlp"),
        ("data.sequence_length", 100_000, r"needs 100000 tokens"),
        ("data.sequence_length", 1000, r"makes \d examples of .*fewer than train.batch_size=8"),
    ],
)
def test_bad_values_are_refused_before_anything_is_begun(small, tmp_path, key, value, message):
    small.mesh.fsdp = 8
    with small.ignore_type():
        small.update_from_flattened_dict({key: value})
    with pytest.raises(InputError, match=message):
        train_to_end(Config.of(small), tmp_path / "run")
    assert not (tmp_path / "run" / "config.json").exists()


def test_a_dry_run_says_what_it_checked_and_leaves_the_workdir_to_any_run(small, tmp_path, capsys):
    for length, path in ((16, small.data.path), (24, f"/.{small.data.path}")):
        small.data.update(sequence_length=length, path=path)
        loop.check(Config.of(small), tmp_path / "run", ())
        (line,) = (each for each in capsys.readouterr().err.splitlines() if "checked" in each)
        assert line.startswith("checked: the config, the data (") and "mesh data 1 x fsdp 8" in line
    assert not (tmp_path / "run" / "config.json").exists()


@pytest.mark.slow
def test_a_run_without_a_first_step_leaves_the_workdir_to_another(
    finished, tmp_path, monkeypatch, capsys
):
    """It was stopped, or a device has too little memory: no config is bound to the workdir yet."""
    config, workdir = finished
    larger = config.copy_and_resolve_references()
    larger.optimizer.learning_rate = 0.5

    def out_of_memory(*_):
        raise RunError("out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(train_step, "lower_train_step", out_of_memory)
        with pytest.raises(RunError, match="out of memory"):
            train_to_end(Config.of(larger), tmp_path)
        interrupt_evaluation(patch, 0)
        assert train_to_end(Config.of(larger), tmp_path) == 42
        assert "stopped by SIGTERM before the first step; the same" in capsys.readouterr().err
        patch.setattr(basic_hooks, "evaluate_loss", out_of_memory)
        with pytest.raises(RunError, match="out of memory"):
            train_to_end(Config.of(larger), tmp_path)
    assert train_to_end(Config.of(config), tmp_path) == 0
    assert metrics_of(tmp_path) == metrics_of(workdir)


def test_the_last_evaluation_takes_the_whole_split(finished):
    """With `eval_all_at_end`, whatever `eval_batches` says of those on the way."""
    _, workdir = finished
    tokens = {r["step"]: r["eval/tokens"] for r in read_metrics(workdir) if "eval/tokens" in r}
    assert tokens[0] == tokens[3] == 16 * 16
    assert tokens[6] > 2 * tokens[0]


def test_a_longer_run_says_how_its_rate_jumps(finished, tmp_path, capsys):
    config, source = finished
    workdir = shutil.copytree(source, tmp_path / "run")
    longer = Config.of(config).with_values({"train.total_steps": 7})
    rates = []
    for each in (Config.of(config), longer):
        peak, steps = each.optimizer.learning_rate, each.train.total_steps
        cosine = (1 + np.cos(np.pi * 6 / steps)) / 2
        rates.append(peak * (0.1 + 0.9 * cosine))
    assert train_to_end(longer, workdir) == 0
    told = capsys.readouterr().err
    assert (
        f"the learning rate of step 7 is {rates[1]:.3g}; with the schedule before it was "
        f"{rates[0]:.3g} (train.total_steps was 6, is 7); optimizer.schedule=wsd keeps"
    ) in told
    rate, lines = "train/learning_rate", read_metrics(workdir)
    logged = {line["step"]: line[rate] for line in lines if rate in line}
    np.testing.assert_allclose(logged[7], rates[1], rtol=1e-5)
    assert train_to_end(longer, workdir) == 0
    assert "the learning rate of step" not in capsys.readouterr().err


def test_a_run_keeps_its_id_and_refuses_checkpoints_of_others(finished, tmp_path):
    config, source = finished
    workdir = shutil.copytree(source, tmp_path / "run")
    facts = json.loads((workdir / "checkpoints" / "6" / "data" / "metadata").read_text())
    assert facts["run_id"] == run_of(workdir) == run_of(source)
    config_file = workdir / "config.json"
    config_file.write_text(config_file.read_text().replace(run_of(workdir), "another"))
    with pytest.raises(InputError, match=f"by another run, {run_of(source)}, .* to run another; "):
        train_to_end(Config.of(config), workdir)
    with pytest.raises(InputError, match="was made by another run"):
        load_run(workdir, 256, batch_size=1)
