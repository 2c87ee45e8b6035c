"""Exported folders: what is in them computes what the model does, and they are whole or not there.

That transformers agrees is in transformers_test.py, which installs it.
"""

import ast
import json
from dataclasses import replace

import numpy as np
import pytest
from exported_models import (
    ADAPTED,
    CLASSIC,
    LENGTH,
    LLAMA,
    MODELS,
    OTHER_CLASSES,
    TEXTS,
    export_model,
    random_run,
)
from exported_models import tokenizer_of as tokenizer
from helpers import ROOT, call
from safetensors.numpy import load_file

from t5x_diffeq.cli import export
from t5x_diffeq.hf import folder as folder_module
from t5x_diffeq.hf import save_pretrained as save_pretrained_module
from t5x_diffeq.hf.families import FAMILIES
from t5x_diffeq.hf.layouts import QWEN3, check_names
from t5x_diffeq.hf.new_run import write_run
from t5x_diffeq.hf.save_pretrained import check_form, save_pretrained
from t5x_diffeq.hf.tokenizer_files import write_tokenizer
from t5x_diffeq.system.errors import InputError, RunError


@pytest.mark.slow
def test_an_ode_brings_its_own_file(tmp_path):
    run, told = export_model(MODELS["llama_official_ode"], tmp_path / "out")
    assert told.model_class == "DiffEqForCausalLM"
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["parallel"] and config["mlp_reads_attention_norm"] and config["norm_shift"]
    assert (config["norm_eps"], config["final_norm_eps"]) == (1e-6, 1e-5)
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    weights = run.placed.model.apply({"params": run.params}, method="weights")
    down = np.asarray(weights["mlp"]["down"]["kernel"][1])
    np.testing.assert_allclose(tensors["model.steps.1.mlp.down.weight"], down.T / 3, rtol=1e-5)
    source = (tmp_path / "out" / "modeling_diffeq.py").read_text()
    imported = {
        node.module if isinstance(node, ast.ImportFrom) else node.names[0].name
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Import | ast.ImportFrom)
    }
    assert {name.split(".")[0] for name in imported} == {"inspect", "torch", "transformers"}


def test_the_card_has_the_runs_facts(tmp_path):
    reports = [
        {"step": 5, "eval/loss": 3.25, "eval/perplexity": 25.79},
        {"step": 9, "eval/loss": 1.0, "eval/perplexity": 2.72},
    ]
    export_model(MODELS["gpt_euler_ode"], tmp_path / "out", reports)
    card = (tmp_path / "out" / "README.md").read_text()
    assert "loss 3.2500 nats per token, perplexity 25.79" in card
    assert "| optimizer steps | 7 of 2000 |" in card
    assert "| tokens seen | 168 |" in card
    assert "trust_remote_code=True" in card
    assert '"time_embed_dim": 4' in card


def test_a_block_without_a_pytorch_form_is_refused(tmp_path):
    model = {"block": "t5x_diffeq.model.parallel_block:ParallelBlock"}
    with pytest.raises(InputError, match="export needs the method `pytorch_form` of the block"):
        export_model((model, "bytes"), tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_peft_reads_how_the_adapters_are_applied(tmp_path):
    run, _ = export_model(ADAPTED["gpt_lora_of_two"], tmp_path / "out", peft=True)
    told = json.loads((tmp_path / "out" / "adapter" / "adapter_config.json").read_text())
    config = run.placed.model.config
    assert (told["r"], told["lora_alpha"]) == (config.adapter_rank, config.adapter_alpha)
    assert told["r"] != told["lora_alpha"] and told["fan_in_fan_out"] is True
    assert told["target_modules"] == ["attn.c_attn", "mlp.c_proj"]


def test_a_run_without_adapters(tmp_path):
    with pytest.raises(InputError, match="--peft needs a run with adapters"):
        export_model((CLASSIC, "bytes"), tmp_path / "out", peft=True)
    assert not (tmp_path / "out").exists()


def with_layout(monkeypatch, kind, **changes):
    """Gives a class another layout."""
    family = FAMILIES[kind]
    changed = replace(family, layout=replace(family.layout, **changes))
    monkeypatch.setitem(FAMILIES, kind, changed)


def test_a_parameter_without_a_name_is_refused(tmp_path, monkeypatch):
    run, its_tokenizer, as_run = random_run(OTHER_CLASSES["qwen3"])
    leaves = dict(QWEN3.leaves)
    del leaves["attention", "query_norm", "scale"]
    with_layout(monkeypatch, "qwen3", leaves=leaves)
    with pytest.raises(InputError, match=r"attention/query_norm/scale .1 such. has no name"):
        save_pretrained(run, as_run, its_tokenizer, [], tmp_path / "out")
    more = {**run.params, "extra": {"table": run.params["final_norm"]["scale"]}}
    with pytest.raises(InputError, match=r"extra/table .1 such. has no name in a folder"):
        check_names(QWEN3, run.placed.model.config, more)
    assert list(tmp_path.iterdir()) == []


def test_two_parameters_with_one_name_are_refused(tmp_path, monkeypatch):
    query, key = (("attention", f"{name}_norm", "scale") for name in ("query", "key"))
    with_layout(monkeypatch, "qwen3", leaves={**QWEN3.leaves, key: QWEN3.leaves[query]})
    with pytest.raises(RunError, match=r"two parameters .* model.layers.0.self_attn.q_norm.w"):
        export_model(OTHER_CLASSES["qwen3"], tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["strang", "midpoint", "heun", "rk4"])
def test_schemes_of_several_evaluations_are_refused(scheme):
    run, _, _ = random_run(({"scheme": scheme}, "bytes"))
    with pytest.raises(InputError, match=f"model.scheme={scheme} can't be exported, because"):
        check_form(run.placed.model.config)


def test_half_written_never_replaces(tmp_path, monkeypatch):
    out = tmp_path / "out"
    run, its_tokenizer, as_run = random_run(MODELS["gpt"])

    def fails(*_):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(save_pretrained_module, "write_tokenizer", fails)
        with pytest.raises(RunError, match=r"out can't be written: No space left on device"):
            save_pretrained(run, as_run, its_tokenizer, [], out)
    assert list(tmp_path.iterdir()) == []
    save_pretrained(run, as_run, its_tokenizer, [], out)
    before = sorted(out.iterdir())
    assert {path.stat().st_mode & 0o777 for path in before} == {0o644}
    with pytest.raises(InputError, match=r"--output=.*out is not empty; empty it"):
        save_pretrained(run, as_run, its_tokenizer, [], out)
    assert sorted(out.iterdir()) == before
    assert list(tmp_path.iterdir()) == [out]


def test_large_models_are_several_files(tmp_path):
    tensors = {f"layer.{n}": np.full((4, 5), n, np.float32) for n in range(5)}
    assert folder_module.write_tensors(tmp_path, iter(tensors.items()), shard_bytes=200) == 100
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == 400
    assert set(index["weight_map"].values()) == {f"model-0000{n}.safetensors" for n in (1, 2, 3)}
    read = folder_module.TensorFiles(tmp_path)
    for name, tensor in tensors.items():
        np.testing.assert_array_equal(read.read(name, (4, 5)), tensor)
    (tmp_path / "model-00002.safetensors").unlink()
    with pytest.raises(InputError, match=r"lacks model-00002.safetensors"):
        folder_module.TensorFiles(tmp_path)


@pytest.mark.parametrize("kind", ["bytes", "sentencepiece", "prefixed", "json"])
def test_tokenizer_json_says_the_same(kind, tmp_path):
    tokenizers = pytest.importorskip("tokenizers", reason="tokenizers isn't installed")
    ours = tokenizer(kind)
    assert write_tokenizer(ours, tmp_path, LENGTH) is None
    theirs = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    texts = [*TEXTS, (ROOT / "README.md").read_text()]
    for text, ids in zip(texts, ours.encode(texts), strict=True):
        assert theirs.encode(text, add_special_tokens=False).ids == ids.tolist()
        assert theirs.decode(ids.tolist(), skip_special_tokens=False) == ours.decode(ids.tolist())
    assert theirs.get_vocab_size() == ours.vocab_size
    assert (tmp_path / "tokenizer.model").exists() == (kind in ("sentencepiece", "prefixed"))


@pytest.fixture(scope="module")
def workdir(tmp_path_factory):
    """The run of a baseline, at step 0."""
    folder = tmp_path_factory.mktemp("run")
    (folder / "text.txt").write_text("".join(f"line {n} of the text\n" for n in range(200)))
    run, its_tokenizer, _ = random_run(({**LLAMA, **CLASSIC}, "bytes"))
    text = {"source": "text_files", "path": str(folder / "text.txt"), "tokenizer": "bytes"}
    config = run.placed.config.with_values({f"data.{key}": value for key, value in text.items()})
    write_run(config, its_tokenizer, run.params, folder / "run")
    return folder / "run"


@pytest.mark.slow
def test_the_verb(workdir, tmp_path, capsys):
    call(export, f"--workdir={workdir}", f"--output={tmp_path / 'out'}")
    told = capsys.readouterr().err
    assert "LlamaForCausalLM" in told
    assert "not compared with PyTorch's: No module named 'torch'" in told
    for arguments, message in (
        (["--num_steps=0"], "--num_steps=0 must be at least 1"),
        (["--num_steps=5"], "exist only at their own times"),
        (["--checkpoint=3"], "checkpoint 3 of .* does not exist; there are 0"),
        ([f"--output={tmp_path / 'out'}"], "is not empty"),
        ([f"--output={tmp_path / 'out' / 'config.json'}"], "is a file; name a folder"),
    ):
        with pytest.raises(InputError, match=message):
            new = [] if "--output" in arguments[0] else [f"--output={tmp_path / 'new'}"]
            call(export, f"--workdir={workdir}", *new, *arguments)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_an_unfinished_checkpoint_is_refused(workdir, tmp_path):
    """One that is being written has another name; one that is damaged is told."""
    (step,) = (workdir / "checkpoints").iterdir()
    halves = step.with_name("0.orbax-checkpoint-tmp-7")
    step.rename(halves)
    with pytest.raises(InputError, match="holds no checkpoint yet; train there first"):
        call(export, f"--workdir={workdir}", f"--output={tmp_path / 'out'}")
    halves.rename(step)
    (step / "state" / "d").rename(step / "gone")
    with pytest.raises(InputError, match=r"checkpoint 0 .* can't be read.*the run has no other"):
        call(export, f"--workdir={workdir}", f"--output={tmp_path / 'out'}")
    (step / "gone").rename(step / "state" / "d")
    assert list(tmp_path.iterdir()) == []
