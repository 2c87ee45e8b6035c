"""A GPT with fewer sets of layer weights: which weights it has, and that W(t) is the closest."""

import json

import numpy as np
import pytest
from exported_models import CLASSIC, LLAMA, random_run
from flax.traverse_util import flatten_dict
from helpers import call

from studies import compressed, compression
from t5x_diffeq.hf.new_run import write_run
from t5x_diffeq.system.errors import InputError
from t5x_diffeq.training.load import load_run

STEPS = 6


@pytest.fixture(scope="module")
def gpt():
    """The config of a model with random layer weights, and these."""
    run, _, _ = random_run(({**CLASSIC, **LLAMA, "num_steps": STEPS}, "bytes"))
    weights = {
        path: np.array(x) for path, x in flatten_dict(run.params["source"]["weights"]).items()
    }
    return run.placed.model.config, weights


@pytest.mark.parametrize("sets", [2, 3])
def test_no_w_of_t_is_closer(gpt, sets):
    """Of every linear: the squared error is that of the best matrix of this rank."""
    config, layers = gpt
    source = flatten_dict(compressed.KINDS["ode"](config, layers, sets))
    for path, leaf in layers.items():
        name = ".".join(path[:-1])
        e = source[name, "time_embedding", "coefficients"]
        assert e.shape == (STEPS, sets - 1)
        made = np.tensordot(e, source[name, path[-1]], 1) + source.get(
            (name, f"{path[-1]}_base"), 0
        )
        if "norm" not in name:
            flat = leaf.reshape(STEPS, -1)
            rest = np.linalg.svd(flat - flat.mean(0), compute_uv=False)[sets - 1 :]
            error = np.square(made - leaf).sum()
            assert error == pytest.approx(np.square(rest).sum(), rel=1e-4) and error > 0


@pytest.mark.parametrize(
    ("kind", "values"),
    [("nested", [0, 2, 4]), ("averaged", [0.5, 2.5, 4.5]), ("dropped", [0, 2, 5])],
)
def test_layers_of_a_stack(gpt, kind, values):
    def numbered(leaf):
        return np.broadcast_to(np.arange(6.0).reshape(6, *[1] * (leaf.ndim - 1)), leaf.shape)

    config, layers = gpt
    layers = {path: numbered(leaf) for path, leaf in layers.items()}
    for leaf in flatten_dict(compressed.KINDS[kind](config, layers, 3)["weights"]).values():
        assert [np.unique(layer).tolist() for layer in leaf] == [[value] for value in values]


@pytest.mark.slow
def test_a_compressed_run_has_its_loss(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(compressed, "_BATCHES", 1)
    (tmp_path / "text.txt").write_text("Every layer reads what the others wrote.\n" * 200)
    run, tokenizer, config = random_run(({**CLASSIC, **LLAMA, "num_steps": STEPS}, "bytes"))
    data = {"data.source": "text_files", "data.path": str(tmp_path / "text.txt")}
    config = config.with_values({**data, "data.tokenizer": "bytes"})
    write_run(config, tokenizer, run.params, tmp_path / "gpt")
    for kind in ("ode", "dropped"):
        words = f"--workdir={tmp_path / 'gpt'}", f"--output={tmp_path / kind}", f"--kind={kind}"
        with pytest.raises(InputError, match=r"--sets=4 must divide .* per_layer weights and 6 st"):
            call(compressed, *words, "--sets=4")
        call(compressed, *words, "--sets=3")
        assert 3 < json.loads(capsys.readouterr().out)["loss"] < 12
        model = load_run(tmp_path / kind, tokenizer.vocab_size, batch_size=1).placed.config.model
        expected = ("time_dependent", 6, 2) if kind == "ode" else ("per_layer", 3, 4)
        assert (model.weights, model.num_steps, model.time_embed_dim) == expected


def test_a_study_tunes_what_it_compressed():
    """Each run comes after the one that it needs, and all students of a seed have one teacher."""
    runs = compression.LAPTOP.runs({"stdlib": {"data.source": "stdlib"}}, range(3), {})
    names = [run.name for run in runs]
    assert len(names) == len(set(names))
    for run in runs:
        assert run.needs is None or names.index(run.needs) < names.index(run.name)
    teachers = [run for run in runs if run.verb == "train"]
    assert len(teachers) == 2 and {run.verb for run in runs} == {
        "train",
        "studies.compressed",
        "finetune",
    }
    tuned = next(run for run in runs if run.verb == "finetune")
    assert f"--config.train.distill_from={{output}}/{teachers[0].name}" in tuned.arguments
