"""Models to and from transformers and torch: virtual environments of their own, installed here.

    launch/test.sh --slow tests/hf/transformers_test.py

transformers_newest.txt and transformers_oldest.txt have the versions: the newest that was tried,
with which all is tested, and the oldest that an exported model supports.
"""

import json
import os
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from environments import make_environment
from exported_models import (
    ADAPTED,
    CLASSIC,
    LLAMA,
    MODELS,
    OTHER_CLASSES,
    export_model,
    logits_of,
    random_run,
    record_outputs,
    tokenizer_of,
)
from helpers import SUPPORT, call, run_to_end

from configs import default
from t5x_diffeq.cli import convert
from t5x_diffeq.config.config import Config
from t5x_diffeq.hf import check_folder, layouts
from t5x_diffeq.hf.families import FAMILIES
from t5x_diffeq.hf.folder import TensorFiles
from t5x_diffeq.hf.from_pretrained import pretrained_params, read_config_json, with_model
from t5x_diffeq.hf.hypernetwork_form import HYPERNETWORK
from t5x_diffeq.hf.save_pretrained import save_pretrained
from t5x_diffeq.hf.to_ode import ode_keys, to_ode
from t5x_diffeq.model.config import ModelConfig
from t5x_diffeq.model.language_model import LanguageModel
from t5x_diffeq.system.errors import InputError, RunError
from t5x_diffeq.training.load import Run, load_run
from t5x_diffeq.training.setup import make_setup


def install(versions: str, folder: Path) -> Path:
    """A Python in `folder` with the packages of a file of tests/: torch, transformers and peft."""
    return make_environment(folder, "--requirements", str(SUPPORT / versions))


@pytest.fixture(scope="module")
def interpreter(tmp_path_factory):
    """A Python with the newest transformers that was tried."""
    return install("transformers_newest.txt", tmp_path_factory.mktemp("newest"))


@pytest.fixture(scope="module")
def oldest(tmp_path_factory):
    """A Python with the oldest transformers that an exported model supports."""
    return install("transformers_oldest.txt", tmp_path_factory.mktemp("oldest"))


@pytest.mark.slow
def test_exported_models_say_what_ours_say(interpreter, oldest, tmp_path, sample):
    own_class = sample(("gpt_euler_ode", "llama_of_all_euler_ode"))
    models = {name: MODELS[name] for name in own_class}
    models.update([*sample(MODELS.items()), *sample(ADAPTED.items())])
    for name, model in models.items():
        run, tokenizer, as_run = random_run(model)
        told = save_pretrained(
            run, as_run, tokenizer, [], tmp_path / "models" / name, peft=name in ADAPTED
        )
        said = record_outputs(run, tokenizer) | {"class": told.model_class}
        (tmp_path / "models" / f"{name}.json").write_text(json.dumps(said))
    for python in (interpreter, oldest):
        ended = run_there(python, "in_transformers.py", tmp_path / "models")
        assert ended.stdout.count("agrees") == len(models)
        folders = [tmp_path / "models" / name for name in own_class]
        run_there(python, "in_transformers_features.py", *folders)


pytestmark = pytest.mark.in_turns
POLYNOMIALS = {
    "gpt_smooth": {"time_basis": "legendre:3", "embedding_scale": 3.0, "position_scale": 3.0},
    "llama_smooth": {**LLAMA, "time_basis": "legendre:2", "scheme": "lie_trotter"},
    "llama_shared": {**LLAMA, "weights": "shared", "step_size": "2/N"},
}


@pytest.mark.slow
def test_a_hypernetwork_takes_any_number_of_steps(interpreter, oldest, tmp_path):
    tokens = np.random.default_rng(0).integers(256, size=(2, 16))
    for name, model in POLYNOMIALS.items():
        run, _ = export_model((model, "bytes"), tmp_path / name, kept_form=HYPERNETWORK)
        logits = {str(n): logits_of(run.at_depth(n), tokens) for n in (3, 5)}
        np.savez(tmp_path / name, tokens=tokens, **logits)
    for python in (interpreter, oldest):
        folders = [tmp_path / name for name in POLYNOMIALS]
        ended = run_there(python, "in_transformers_hypernetwork.py", *folders)
        assert ended.stdout.count("agrees") == len(POLYNOMIALS)


def test_what_is_no_polynomial(tmp_path):
    model = {"weights": "per_layer", "step_size": "1"}
    with pytest.raises(InputError, match=r"model.weights=per_layer.*model.step_size=1 .*--form="):
        export_model((model, "bytes"), tmp_path / "out", kept_form=HYPERNETWORK)


TUNED = {"gpt": CLASSIC, "llama": {**LLAMA, **CLASSIC}}


@pytest.mark.slow
def test_what_peft_tuned_and_merged_is_converted(interpreter, text, tmp_path, monkeypatch):
    """With the kind of adapters that also changes the base's kernels, too."""
    tokens = np.random.default_rng(0).integers(256, size=(2, 16))
    config = default.get_config()
    config.data.update(source="text_files", path=str(text))
    config.mesh.fsdp = 1
    # Overrides are parsed from the real command line alone.
    monkeypatch.setattr(convert, "CONFIG", SimpleNamespace(value=config))
    for name, model in TUNED.items():
        run, _ = export_model((model, "bytes"), tmp_path / name / "out")
        np.save(tmp_path / name / "before.npy", logits_of(run, tokens))
        np.save(tmp_path / name / "tokens.npy", tokens)
    run_there(interpreter, "in_peft.py", *(tmp_path / name for name in TUNED))
    for name in TUNED:
        folder, new = tmp_path / name, tmp_path / name / "new"
        call(convert, f"--input={folder / 'merged'}", f"--workdir={new}")
        said, before = np.load(folder / "logits.npy"), np.load(folder / "before.npy")
        logits = logits_of(load_run(new, 256, batch_size=1), tokens)
        np.testing.assert_allclose(logits, said, atol=1e-4)
        assert np.abs(said - before).max() > 0.01
    with pytest.raises(InputError, match=r"holds PEFT's adapters, not a model; merge them in PEFT"):
        call(convert, f"--input={folder / 'adapter'}", f"--workdir={tmp_path / 'other'}")


def run_there(interpreter, script, *arguments):
    """Runs a file of tests/ where torch is."""
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    command = [interpreter, SUPPORT / script, *arguments]
    ended = run_to_end(command, env=environment)
    assert ended.returncode == 0, ended.stdout + ended.stderr[-3000:]
    return ended


@pytest.fixture(scope="module")
def folders(interpreter, tmp_path_factory):
    """The library's own models."""
    folder = tmp_path_factory.mktemp("theirs")
    run_there(interpreter, "transformers_models.py", "make", folder)
    return folder


def converted(folder):
    """The run that `convert` makes of a folder, without its data."""
    config = default.get_config()
    config.train.batch_size = 1
    found = read_config_json(folder)
    as_run, tables = with_model(Config.of(config), found, None)
    setup = make_setup(as_run, 256, jax.devices()[:1])
    params = pretrained_params(folder, found, setup.model.config, tables)
    return Run(setup, params, step=0), as_run


def relative_error(config, params, said):
    """How far the logits are from theirs, over the largest of theirs."""
    params = jax.tree.map(jnp.asarray, params)
    with jax.default_matmul_precision("highest"):
        found = jax.jit(LanguageModel(config).apply)({"params": params}, said["tokens"])
    wanted = said["logits"]
    return np.abs(np.asarray(found)[..., : wanted.shape[-1]] - wanted).max() / np.abs(wanted).max()


@pytest.mark.slow
def test_their_models_both_ways_and_as_odes(interpreter, folders, tmp_path):
    names = sorted(path.stem for path in folders.glob("*.npz"))
    for name in names:
        run, as_run = converted(folders / name)
        config, said = run.placed.model.config, np.load(folders / f"{name}.npz")
        assert relative_error(config, run.params, said) < 1e-5, name
        save_pretrained(run, as_run, tokenizer_of("bytes"), [], tmp_path / name)
        assert_same_tensors(folders / name, tmp_path / name)
        ode = ModelConfig.of(ode_keys(as_run.model), 256, config.max_length)
        params = to_ode(replace(ode, attention="xla"), run.params)
        assert relative_error(replace(ode, attention="xla"), params, said) < 1e-5, name
    assert len(names) == 11
    ended = run_there(interpreter, "transformers_models.py", "check", folders, tmp_path)
    assert ended.stdout.count("agrees") == len(names)


def assert_same_tensors(theirs: Path, ours: Path):
    """The same names; and the same numbers, but for Gemma's norms, which are stored less 1."""
    before, after = (TensorFiles(folder).files for folder in (theirs, ours))
    assert before.keys() == after.keys()
    for name in before:
        a, b = (files[name].get_tensor(name).astype(np.float32) for files in (after, before))
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-7, strict=True)


@pytest.mark.slow
def test_export_compares_with_torch(interpreter, tmp_path, monkeypatch):
    """A layout in which two tensors have changed places loads without a word: only logits tell."""
    monkeypatch.setattr(check_folder, "python", lambda: str(interpreter))
    _, told = export_model(OTHER_CLASSES["qwen3"], tmp_path / "out")
    assert told.logits.startswith("PyTorch's, to ")
    leaves = dict(layouts.QWEN3.leaves)
    gate, up = ("mlp", "gate", "kernel"), ("mlp", "up", "kernel")
    leaves[gate], leaves[up] = leaves[up], leaves[gate]
    wrong = replace(layouts.QWEN3, leaves=leaves)
    monkeypatch.setitem(FAMILIES, "qwen3", replace(FAMILIES["qwen3"], layout=wrong))
    with pytest.raises(
        RunError, match="Qwen3ForCausalLM computes different logits from the exported"
    ):
        export_model(OTHER_CLASSES["qwen3"], tmp_path / "wrong")
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


@pytest.mark.slow
def test_a_block_of_another_package(interpreter, tmp_path, monkeypatch):
    """Its own PyTorch file computes what the block does, as an ODE and as layers."""
    monkeypatch.syspath_prepend(SUPPORT / "plugin_package")
    monkeypatch.setattr(check_folder, "python", lambda: str(interpreter))
    block = {"block": "diffeq_plugin.parts:SquaredBlock(power=3)"}
    for number, model in enumerate((LLAMA, {**CLASSIC, "architecture": "gpt"})):
        _, summary = export_model(({**model, **block}, "bytes"), tmp_path / f"out{number}")
        assert summary.model_class == "SquaredForCausalLM"
        assert summary.logits.startswith("PyTorch's, to "), summary.logits
