"""The verb `convert`: folders into runs that evaluate and export, or refused by name."""

import json
import shutil
import sys
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from exported_models import LENGTH, greedy, logits_of, reword, rewrite, save_model
from helpers import ROOT, call, forget_flags
from safetensors.numpy import load_file

from configs import default
from t5x_diffeq.cli import convert, evaluate, export
from t5x_diffeq.config.config import Config
from t5x_diffeq.data.chat_template import read_chat_format
from t5x_diffeq.data.tokenizer_folder import read_tokenizer, tokenizer_file
from t5x_diffeq.hf.folder import TensorFiles
from t5x_diffeq.hf.from_pretrained import read_config_json, with_model
from t5x_diffeq.system.errors import InputError
from t5x_diffeq.training.load import load_run
from t5x_diffeq.training.objective import batch_losses

TINY = f"--config={ROOT}/configs/tiny.py"
TOKENS = np.random.default_rng(1).integers(256, size=(2, LENGTH))


@pytest.fixture(autouse=True)
def text(tmp_path_factory, monkeypatch):
    """The text that runs are made with; overrides are parsed from the real command line alone."""
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text("def f(x):\n    return x + 12  # naïve\n" * 40)
    config = default.get_config()
    config.data.update(source="text_files", path=str(path))
    config.mesh.fsdp = 1
    monkeypatch.setattr(convert, "CONFIG", SimpleNamespace(value=config))
    return config


@pytest.mark.slow
@pytest.mark.in_turns("trainings")
def test_the_verb(tmp_path, capsys):
    """A folder to a run, to the ODE; both evaluate to the same, and export to the same again."""
    save_model("llama", tmp_path / "out")
    losses = {}
    plain = convert.CONFIG.value
    for name, flags in (("plain", []), ("ode", ["--to_ode"])):
        workdir = tmp_path / name
        folder = f"--input={tmp_path / 'out'}"
        convert.CONFIG.value = plain.copy_and_resolve_references()
        call(convert, folder, f"--workdir={workdir}", *flags)
        told = capsys.readouterr().err
        assert ("6 steps" in told) == (name == "ode")
        call(evaluate, f"--workdir={workdir}")
        losses[name] = json.loads(capsys.readouterr().out)["eval/loss"]
        call(export, f"--workdir={workdir}", f"--output={tmp_path / name / 'again'}")
    assert losses["ode"] == pytest.approx(losses["plain"], rel=1e-5)
    before = load_file(tmp_path / "out" / "model.safetensors")
    for name, tolerance in (("plain", 0), ("ode", 1e-5)):
        after = load_file(tmp_path / name / "again" / "model.safetensors")
        assert before.keys() == after.keys()
        for key, tensor in before.items():
            np.testing.assert_allclose(after[key], tensor, rtol=0, atol=tolerance)
        for file in ("tokenizer.json", "tokenizer.model", "config.json"):
            again = (tmp_path / name / "again" / file).read_bytes()
            assert again == (tmp_path / "out" / file).read_bytes()


@pytest.mark.slow
def test_a_shorter_length_and_rows_without_tokens(tmp_path, capsys):
    """Positions beyond the length are left out; rows beyond the tokenizer are never predicted.

    Here these rows would have the highest logits.
    """
    run = save_model("gpt", tmp_path / "out")
    vocab_size, rows = run.placed.model.config.vocab_size, 512
    assert vocab_size == 300

    def change(tensors):
        table = tensors["transformer.wte.weight"]
        more = 9 * np.random.default_rng(0).standard_normal((rows - vocab_size, 16), np.float32)
        return {**tensors, "transformer.wte.weight": np.concatenate((table, more))}

    rewrite(tmp_path / "out", change)
    reword(tmp_path / "out", vocab_size=rows)
    flags = [f"--workdir={tmp_path / 'run'}", "--sequence_length=10"]
    call(convert, f"--input={tmp_path / 'out'}", *flags)
    assert "212 rows of the vocabulary that no token has" in capsys.readouterr().err
    shorter = load_run(tmp_path / "run", vocab_size, batch_size=1)
    wanted = logits_of(run, TOKENS[:, :10])
    np.testing.assert_allclose(logits_of(shorter, TOKENS[:, :10]), wanted, atol=1e-6)
    assert shorter.params["position_embedding"]["table"].shape[0] == 10
    batch = {"inputs": jnp.asarray(TOKENS[:, :9]), "targets": jnp.asarray(TOKENS[:, 1:10])}
    losses = batch_losses(shorter.placed.model, shorter.params, batch, 64)
    log_p = jax.nn.log_softmax(wanted[:, :9])
    found = -np.take_along_axis(log_p, TOKENS[:, 1:10, None], 2)[..., 0]
    np.testing.assert_allclose(losses, found, atol=1e-5)
    assert all(int(token[0]) < vocab_size for token in greedy(shorter, [5, 6], 8))
    call(export, f"--workdir={tmp_path / 'run'}", f"--output={tmp_path / 'again'}")
    assert read_config_json(tmp_path / "again")["vocab_size"] == rows
    before, after = (load_file(tmp_path / x / "model.safetensors") for x in ("out", "again"))
    for name in ("transformer.wte.weight", "transformer.h.2.mlp.c_fc.weight"):
        np.testing.assert_array_equal(after[name], before[name])


BAD = {
    "an unknown factor": (
        {"attention_multiplier": 0.5},
        "attention_multiplier is 0.5 in config.json; the key is unknown for llama",
    ),
    "two rotary scalings": (
        {
            "rope_scaling": {"type": "linear", "factor": 2.0},
            "rope_parameters": {"rope_type": "linear", "factor": 4.0},
        },
        r"factor is 4.0 in rope_parameters of config.json, and 2.0 elsewhere in it",
    ),
    "two rotary bases": (
        {"rope_theta": 1e4, "rope_parameters": {"rope_theta": 1e6}},
        "rope_theta is 1000000.0 in rope_parameters of config.json, and 10000.0 elsewhere",
    ),
    "rotary base": (
        {"rope_parameters": None, "rope_theta": -1},
        "rope_theta is -1 in config.json; it",
    ),
    "rotary scaling": (
        {"rope_parameters": None, "rope_scaling": {"type": "dynamic"}},
        "scaled by 'dynamic' in config.json",
    ),
    "rotary by layer": (
        {"rope_parameters": {"full_attention": {"rope_theta": 1e6}}},
        "it must be one set of parameters",
    ),
    "head width": ({"head_dim": 16}, r"_proj.weight is of shape .*, and config.json makes"),
    "no head width": ({"head_dim": None, "num_attention_heads": 3}, "16 is not divisible by"),
    "odd heads": ({"head_dim": 3}, "model.head_dim=3 is odd, and rotary positions turn pairs"),
    "shapes": ({"intermediate_size": 48}, r"is of shape \(16, 40\), and config.json makes it"),
    "missing layers": ({"num_hidden_layers": 4}, "has no tensor model.layers.3"),
    "left over": ({"num_hidden_layers": 2}, "holds model.layers.2.* which a plain llama"),
    "small vocabulary": ({"vocab_size": 200}, "has vectors for 200 tokens, and the tokenizer has"),
    "end of text": ({"eos_token_id": 999}, "eos_token_id is 999, and tokenizer.model has no such"),
}


@pytest.fixture(scope="module")
def good_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("folder") / "out"
    save_model("llama", folder)
    return folder


@pytest.mark.parametrize("what", BAD)
def test_folders_that_dont_fit(what, good_folder, tmp_path):
    changes, message = BAD[what]
    good = (good_folder / "config.json").read_text()
    try:
        reword(good_folder, **changes)
        with pytest.raises(InputError, match=message):
            call(convert, f"--input={good_folder}", f"--workdir={tmp_path / 'run'}")
    finally:
        (good_folder / "config.json").write_text(good)
    assert list(tmp_path.iterdir()) == []


def test_a_model_wrapped_by_peft(good_folder, tmp_path):
    from safetensors.numpy import load_file, save_file

    folder = tmp_path / "folder"
    shutil.copytree(good_folder, folder)
    tensors = load_file(folder / "model.safetensors")
    wrapped = {f"base_model.model.{name}": tensor for name, tensor in tensors.items()}
    save_file(wrapped, folder / "model.safetensors")
    with pytest.raises(InputError, match=r"its names are PEFT's: merge_and_unload\(\) makes"):
        call(convert, f"--input={folder}", f"--workdir={tmp_path / 'run'}")


def test_two_files_that_state_one_fact(good_folder, tmp_path):
    """A tokenizer with more tokens, a second model, another template: the first isn't taken."""
    folder = tmp_path / "folder"
    shutil.copytree(good_folder, folder)
    assert tokenizer_file(folder).name == "tokenizer.model"
    content = json.loads((folder / "tokenizer.json").read_text())
    content["added_tokens"].append({"id": 999, "content": "<|im_start|>", "special": True})
    (folder / "tokenizer.json").write_text(json.dumps(content))
    assert tokenizer_file(folder).name == "tokenizer.json"
    (folder / "tokenizer.json").unlink()
    (folder / "added_tokens.json").write_text('{"<|im_start|>": 999}')
    with pytest.raises(InputError, match=r"tokenizer.model doesn't have .* such as <\|im_start\|>"):
        read_tokenizer(tokenizer_file(folder))
    (folder / "model.safetensors.index.json").write_text('{"weight_map": {"a": "b.safetensors"}}')
    with pytest.raises(InputError, match="and so may hold two models; delete what isn't"):
        TensorFiles(folder)
    (folder / "tokenizer_config.json").write_text('{"chat_template": "one"}')
    (folder / "chat_template.jinja").write_text("another")
    with pytest.raises(InputError, match=r"has one chat template in .* and another one in"):
        read_chat_format(folder)
    (folder / "chat_template.jinja").write_text("one\n")
    assert read_chat_format(folder).template == "one\n"


def test_a_name_without_a_folder_is_fetched_from_the_hub(good_folder, tmp_path, monkeypatch):
    """By huggingface_hub, from its cache; the Hub can't be reached for the others."""
    snapshots = tmp_path / "cache" / "models--owner--model-1.5"
    (snapshots / "refs").mkdir(parents=True)
    (snapshots / "refs" / "main").write_text("1" * 40)
    shutil.copytree(good_folder, snapshots / "snapshots" / ("1" * 40))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.chdir(tmp_path)
    name = "--input=owner/model-1.5"
    with pytest.raises(InputError, match=r"must be from 1 to the folder's 24"):
        call(convert, name, "--workdir=run", "--sequence_length=99")
    for unknown in ("gpt2", "a--b"):
        with pytest.raises(InputError, match=rf"the model \(.*\); .*hf download {unknown} --local"):
            call(convert, f"--input={unknown}", "--workdir=run")
    with pytest.raises(InputError, match=r"--input=.*a/b/c holds no config.json"):
        call(convert, "--input=a/b/c", "--workdir=run")


def test_flags_and_files_that_dont_fit(good_folder, tmp_path):
    folder, new = f"--input={good_folder}", f"--workdir={tmp_path / 'run'}"
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    for arguments, message in (
        ([folder], "convert needs --workdir=DIR"),
        ([new], "convert needs --input=DIR"),
        ([f"--input={tmp_path}", new], "holds no config.json"),
        ([folder, f"--workdir={tmp_path / 'full'}"], "is not empty; empty it"),
        ([folder, new, "--sequence_length=99"], "must be from 1 to the folder's 24"),
    ):
        with pytest.raises(InputError, match=message):
            call(convert, *arguments)
    weights = good_folder / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[:-100])  # a download that was cut off
    with pytest.raises(InputError, match=r"model.safetensors can't be read: .*; restore it"):
        call(convert, folder, new)
    weights.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n")
    with pytest.raises(InputError, match=r"model.safetensors is a pointer of Git LFS; run git lfs"):
        call(convert, folder, new)
    weights.unlink()
    with pytest.raises(InputError, match=r"holds neither model.safetensors"):
        call(convert, folder, new)
    weights.write_bytes(whole)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["full"]


def test_what_is_the_folders_cant_be_set(good_folder, tmp_path, text, monkeypatch):
    text.data.tokenizer = "bytes"  # instead of the folder's own
    with pytest.raises(InputError, match="has vectors for 320 tokens, and the tokenizer has 256"):
        call(convert, f"--input={good_folder}", f"--workdir={tmp_path / 'run'}")
    to = f"--workdir={tmp_path / 'run'}"
    for key in ("model.num_steps", "data.sequence_length"):
        with pytest.raises(InputError, match=f"--config.{key} can't be set: it comes from --input"):
            monkeypatch.setattr("sys.argv", ["convert", TINY, f"--config.{key}=2"])
            call(convert, f"--input={good_folder}", to, *sys.argv[1:])
    forget_flags(convert)
    text.train.profile = "9:3"
    with pytest.raises(InputError, match=r"train.profile=9:3: .* such as 100:105"):
        call(convert, f"--input={good_folder}", to)


def test_a_config_that_is_none(tmp_path):
    (tmp_path / "config.json").write_text("[1")
    with pytest.raises(InputError, match=r"config.json can't be read: .*; restore it"):
        read_config_json(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "gpt2", "n_layer": 2}')
    with pytest.raises(InputError, match=r"--input: config.json lacks 'n_embd'; restore it"):
        with_model(Config.of(default.get_config()), read_config_json(tmp_path), None)
