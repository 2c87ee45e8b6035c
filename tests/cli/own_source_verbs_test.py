"""Weight sources outside the package go through every verb, alone or with several depths."""

import json

import pytest
from helpers import call, small_config
from own_sources import OWN

import t5x_diffeq as td
from configs import finetune as finetune_config
from t5x_diffeq.cli import analyze, evaluate, export, plan
from t5x_diffeq.cli.finetune import complete_config, finetune
from t5x_diffeq.cli.train import train_to_end
from t5x_diffeq.config.config import Config, flatten
from t5x_diffeq.inference.explorer.answers import Explorer
from t5x_diffeq.planner.topology import make_topology
from t5x_diffeq.system.errors import InputError
from t5x_diffeq.training.checks import run_checks

OPTIMIZERS = {"kernels": "muon", "nested": "muon", "looped": "adam", "first step": "adam"}
TUNED = {
    "kernels": "hypernetwork",
    "nested": "lora",
    "looped": "full",
    "first step": "hypernetwork",
}


def config_of(name, text):
    config = small_config(text)
    weights, num_steps, depths = OWN[name]
    config.model.update(weights=weights, num_steps=num_steps)
    config.train.update(depths=depths, total_steps=4, eval_every=4, checkpoint_every=4)
    config.train.update(depths_per_step=2 if depths else 1, on_spike="nothing")
    config.optimizer.update(name=OPTIMIZERS[name], learning_rate=1e-2)
    return config


@pytest.mark.slow
@pytest.mark.in_turns
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_verb(name, text, tmp_path, capsys, whole):
    """Without --whole, those that make weights on another grid."""
    config, workdir = config_of(name, text), tmp_path / "run"
    _, num_steps, depths = OWN[name]
    assert train_to_end(Config.of(config), workdir) == 0
    run, other = td.load(workdir), depths[0] if depths else num_steps

    call(evaluate, f"--workdir={workdir}", f"--num_steps={other},{num_steps}", "--batch_size=16")
    losses = [json.loads(line)["eval/loss"] for line in capsys.readouterr().out.splitlines()]
    assert losses[1] < 5.55 and (losses[0] == losses[1]) == (other == num_steps)

    explorer = Explorer("run", run)
    answer = explorer.read("line 1", (other, "euler"))
    assert answer["mean_loss"] == pytest.approx(run.at_depth(other).loss("line 1"), rel=1e-4)
    assert explorer.smooth is (name == "first step") and explorer.paths()["kernels"]

    if whole:
        check_other_verbs(name, text, workdir, tmp_path, capsys)


def check_other_verbs(name, text, workdir, tmp_path, capsys):
    call(analyze, "--what=spectra", f"--workdir={workdir}", f"--output={tmp_path}", "--times=3")
    assert "qk/ratio" in json.loads(capsys.readouterr().out.splitlines()[0])

    with pytest.raises(InputError, match=r"can't write model.weights=own"):
        call(
            export, f"--workdir={workdir}", "--form=hypernetwork", f"--output={tmp_path / 'whole'}"
        )
    call(export, f"--workdir={workdir}", f"--output={tmp_path / 'layers'}")

    given = finetune_config.get_config(TUNED[name])
    given.update(init_from=str(workdir))
    given.data.update(source="text_files", path=str(text))
    given.train.update(total_steps=1, batch_size=8, eval_batch_size=16)
    assert finetune(flatten(given), tmp_path / "tuned") == 0
    kept = TUNED[name] == "hypernetwork"
    tuned = td.load(tmp_path / "tuned")
    assert tuned.config.model.weights == (OWN[name][0] if kept else "per_layer")

    made = plan.make_plan("own", Config.of(config_of(name, text)), make_topology("cpu:1", 1))
    assert made.flops.hypernetwork > 0


def test_what_is_refused(text):
    """Depths of a source that has one grid alone, and the hypernetwork of one that has none."""
    looped = config_of("looped", text)
    looped.train.depths = (2, 4)
    with pytest.raises(InputError, match=r"train.depths=\(2, 4\) needs weights for other numbers"):
        run_checks("train", Config.of(looped))
    layers = small_config(text)
    layers.model.weights = "per_layer"
    given = flatten(finetune_config.get_config("hypernetwork"))
    with pytest.raises(InputError, match="per_layer weights, the run's own, have no hypernetwork"):
        complete_config(given, Config.of(layers))
    assert complete_config(given, Config.of(looped)).model.weights == OWN["looped"][0]
