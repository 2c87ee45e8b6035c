"""Exported folders: what is in them computes what the model does, and they are whole or not there.

That transformers agrees is in transformers_test.py, which installs it.
"""

import ast
import json
import sys
from dataclasses import replace

import numpy as np
import pytest
from exported_models import (
    CLASSIC,
    LENGTH,
    LLAMA,
    MODELS,
    OTHER_CLASSES,
    TEXTS,
    logits_of,
    random_run,
)
from exported_models import tokenizer_of as tokenizer
from helpers import ROOT, call
from numpy_model import norm, rotary, softmax
from safetensors.numpy import load_file

from t5x_diffeq.cli import export
from t5x_diffeq.cli.convert import write_run
from t5x_diffeq.hf import check_folder
from t5x_diffeq.hf import folder as folder_module
from t5x_diffeq.hf import save_pretrained as save_pretrained_module
from t5x_diffeq.hf.check_folder import compare_logits
from t5x_diffeq.hf.families import FAMILIES
from t5x_diffeq.hf.layouts import QWEN3, check_names
from t5x_diffeq.hf.save_pretrained import check_form, save_pretrained
from t5x_diffeq.hf.tokenizer_files import write_tokenizer
from t5x_diffeq.system.errors import InputError, RunError
from t5x_diffeq.training import load

TOKENS = np.random.default_rng(1).integers(256, size=(1, LENGTH))


def attention(q, k, v, heads):
    """`[L, H G]` and `[L, K G]` to `[L, H G]`, causal."""
    split = [x.reshape(LENGTH, -1, q.shape[1] // heads) for x in (q, k, v)]
    mixed = []
    for h in range(heads):
        a, b, c = (x[:, h * x.shape[1] // heads] for x in split)
        scores = a @ b.T / np.sqrt(a.shape[1])
        scores[np.triu_indices(LENGTH, 1)] = -np.inf
        mixed.append(softmax(scores) @ c)
    return np.concatenate(mixed, axis=1)


def rotate(x, heads):
    return np.concatenate([rotary(part) for part in np.split(x, heads, axis=1)], axis=1)


def llama(W, c, tokens):
    """Llama by the names and shapes that Hugging Face's folders have."""
    heads, kv_heads = c["num_attention_heads"], c["num_key_value_heads"]

    def rms(name, y):
        return norm({"scale": W[name]}, y, c["rms_norm_eps"], centred=False)

    y = W["model.embed_tokens.weight"][tokens]
    for n in range(c["num_hidden_layers"]):
        p = f"model.layers.{n}."
        x = rms(p + "input_layernorm.weight", y)
        q, k, v = (x @ W[f"{p}self_attn.{name}_proj.weight"].T for name in "qkv")
        mixed = attention(rotate(q, heads), rotate(k, kv_heads), v, heads)
        y = y + mixed @ W[p + "self_attn.o_proj.weight"].T
        x = rms(p + "post_attention_layernorm.weight", y)
        gate, up = (x @ W[f"{p}mlp.{name}_proj.weight"].T for name in ("gate", "up"))
        y = y + (gate / (1 + np.exp(-gate)) * up) @ W[p + "mlp.down_proj.weight"].T
    return rms("model.norm.weight", y) @ W["lm_head.weight"].T


def gpt2(W, c, tokens):
    """GPT-2 likewise; its matrices are `[inputs, outputs]`."""

    def layer_norm(name, y):
        p = {"scale": W[name + ".weight"], "shift": W[name + ".bias"]}
        return norm(p, y, c["layer_norm_epsilon"], centred=True)

    def linear(name, x):
        return x @ W[name + ".weight"] + W[name + ".bias"]

    y = W["transformer.wte.weight"][tokens] + W["transformer.wpe.weight"][: len(tokens)]
    for n in range(c["n_layer"]):
        p = f"transformer.h.{n}."
        q, k, v = np.split(linear(p + "attn.c_attn", layer_norm(p + "ln_1", y)), 3, axis=1)
        y = y + linear(p + "attn.c_proj", attention(q, k, v, c["n_head"]))
        h = linear(p + "mlp.c_fc", layer_norm(p + "ln_2", y))
        gelu = 0.5 * h * (1 + np.tanh(np.sqrt(2 / np.pi) * (h + 0.044715 * h**3)))
        h = {"gelu_new": gelu, "relu": np.maximum(h, 0)}[c["activation_function"]]
        y = y + linear(p + "mlp.c_proj", h)
    return layer_norm("transformer.ln_f", y) @ W["transformer.wte.weight"].T


def export_model(name, folder, reports=()):
    run, its_tokenizer, as_run = random_run(MODELS[name])
    told = save_pretrained(run, as_run, its_tokenizer, list(reports), folder)
    return run, told


@pytest.mark.slow
def test_the_factor_on_positions_is_in_their_table(tmp_path):
    run, _ = export_model("gpt_long_state_ode", tmp_path / "out")
    table = load_file(tmp_path / "out" / "model.safetensors")["model.position_embedding.weight"]
    np.testing.assert_allclose(table, 8 * run.params["position_embedding"]["table"], rtol=1e-6)
    assert json.loads((tmp_path / "out" / "config.json").read_text())["embedding_scale"] == 8


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "formula"),
    [("llama", llama), ("llama_lie_trotter_ode", llama), ("gpt", gpt2), ("gpt_relu", gpt2)],
)
def test_plain_models_by_their_names(name, formula, tmp_path):
    run, told = export_model(name, tmp_path / "out")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    assert told.model_class == {llama: "LlamaForCausalLM", gpt2: "GPT2LMHeadModel"}[formula]
    assert told.parameters == sum(tensor.size for tensor in tensors.values())
    table = tensors.get("transformer.wte.weight", tensors.get("model.embed_tokens.weight"))
    assert len(table) == config["vocab_size"] == run.placed.model.config.vocab_size  # not padded
    found = formula({k: v.astype(np.float64) for k, v in tensors.items()}, config, TOKENS[0])
    np.testing.assert_allclose(found, logits_of(run, TOKENS)[0], atol=1e-4)


@pytest.mark.slow
def test_an_ode_brings_its_own_file(tmp_path):
    run, told = export_model("llama_official_ode", tmp_path / "out")
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
        {"step": 7, "train/loss": 3.0},
        {"step": 9, "eval/loss": 1.0, "eval/perplexity": 2.72},
    ]
    export_model("gpt_euler_ode", tmp_path / "out", reports)
    card = (tmp_path / "out" / "README.md").read_text()
    assert "loss 3.2500 nats per token, perplexity 25.79" in card
    assert "| optimizer steps | 7 of 2000 |" in card
    assert "| tokens seen | 168 |" in card
    assert "trust_remote_code=True" in card
    assert '"time_embed_dim": 4' in card


def test_a_block_without_a_pytorch_form_is_refused(tmp_path):
    model = {"block": "t5x_diffeq.model.parallel_block:ParallelBlock"}
    run, its_tokenizer, as_run = random_run((model, "bytes"))
    with pytest.raises(InputError, match="export needs the method `pytorch_form` of the block"):
        save_pretrained(run, as_run, its_tokenizer, [], tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


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
    run, its_tokenizer, as_run = random_run(OTHER_CLASSES["qwen3"])
    query, key = (("attention", f"{name}_norm", "scale") for name in ("query", "key"))
    with_layout(monkeypatch, "qwen3", leaves={**QWEN3.leaves, key: QWEN3.leaves[query]})
    with pytest.raises(RunError, match=r"two parameters .* model.layers.0.self_attn.q_norm.w"):
        save_pretrained(run, as_run, its_tokenizer, [], tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


STAND_IN = """#!{python}
# In place of Python with PyTorch: logits of its own making, or a failure.
import sys
import numpy as np
*_, tokens, logits = sys.argv
{says}
"""
COPY = "np.save(logits, np.load({path!r}){change})"


@pytest.fixture
def stand_in(tmp_path, monkeypatch):
    """A run, its logits in a file, and what makes the stand-in of some lines."""
    run, its_tokenizer, as_run = random_run(OTHER_CLASSES["qwen3"])
    tokens = np.random.default_rng(0).integers(256, size=(2, LENGTH))
    ours, script = logits_of(run, tokens), tmp_path / "python"
    np.save(tmp_path / "ours.npy", ours)

    def make(says, **changes):
        says = says.format(path=str(tmp_path / "ours.npy"), **changes)
        script.write_text(STAND_IN.format(python=sys.executable, says=says))
        script.chmod(0o755)

    monkeypatch.setattr(check_folder, "python", lambda: str(script))
    return (run, as_run, its_tokenizer, []), ours, make


@pytest.mark.slow
def test_logits_are_compared(stand_in, tmp_path):
    """With a stand-in for PyTorch, which transformers_test.py has."""
    exported, _, make = stand_in
    make(COPY, change="")
    assert save_pretrained(*exported, tmp_path / "out").logits.startswith("PyTorch's, to ")
    make(COPY, change=" * 1.001")
    with pytest.raises(RunError, match=r"they differ by 1.0e-03 of the largest; nothing is exp"):
        save_pretrained(*exported, tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_what_pytorch_can_say(stand_in, tmp_path, monkeypatch):
    (run, *_), ours, make = stand_in
    monkeypatch.setattr(check_folder, "_logits_of_run", lambda *_: ours)

    def compare():
        return compare_logits(tmp_path, "Qwen3ForCausalLM", run.placed.model.config, run.params)

    make("print('no Qwen3 there'); sys.exit(3)")
    assert compare() == "not compared with PyTorch's: no Qwen3 there"
    make("sys.exit('KeyError: x')")
    with pytest.raises(RunError, match="Qwen3ForCausalLM can't read the exported folder: KeyError"):
        compare()
    make(COPY, change=" * np.nan")
    with pytest.raises(RunError, match="they differ by nan of the largest"):
        compare()


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["strang", "midpoint", "heun", "rk4"])
def test_schemes_of_several_evaluations_are_refused(scheme):
    run, _, _ = random_run(({"scheme": scheme}, "bytes"))
    with pytest.raises(InputError, match=f"model.scheme={scheme}: its step isn't a layer"):
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


def test_another_grid_is_refused_before_the_checkpoint_is_read(workdir, tmp_path, monkeypatch):
    monkeypatch.setattr(load, "restore_params", None)
    with pytest.raises(InputError, match="exist only at their own times"):
        call(export, f"--workdir={workdir}", f"--output={tmp_path / 'out'}", "--num_steps=5")


def test_an_unfinished_checkpoint_is_refused(workdir, tmp_path):
    """One that is being written has another name; one that is damaged is told."""
    (step,) = (workdir / "checkpoints").iterdir()
    halves = step.with_name("0.orbax-checkpoint-tmp-7")
    step.rename(halves)
    with pytest.raises(InputError, match="holds no checkpoint yet; train there first"):
        call(export, f"--workdir={workdir}", f"--output={tmp_path / 'out'}")
    halves.rename(step)
    (step / "state" / "d").rename(step / "gone")
    with pytest.raises(InputError, match=r"checkpoint 0 of .* can't be read"):
        call(export, f"--workdir={workdir}", f"--output={tmp_path / 'out'}")
    (step / "gone").rename(step / "state" / "d")
    assert list(tmp_path.iterdir()) == []
