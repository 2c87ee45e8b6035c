"""Hugging Face folders into runs: exact, or refused by name; and per-layer models into ODEs."""

import json
import re
import shlex
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from exported_models import (
    CLASSIC,
    LENGTH,
    LLAMA,
    MODELS,
    OTHER_CLASSES,
    logits_of,
    random_run,
)
from helpers import call
from safetensors.numpy import load_file, save_file

from configs import default
from t5x_diffeq import convert, evaluate, export
from t5x_diffeq.exchange.from_pretrained import pretrained_params, read_config_json, with_model
from t5x_diffeq.exchange.save_pretrained import save_pretrained
from t5x_diffeq.exchange.time_basis import (
    FREQUENCIES,
    TIME_SCALE,
    check_condition,
    make_time_basis,
)
from t5x_diffeq.exchange.to_ode import ode_keys, to_ode
from t5x_diffeq.models.config import ModelConfig
from t5x_diffeq.models.language_model import LanguageModel
from t5x_diffeq.ode.time_embedding import TimeEmbedding
from t5x_diffeq.ode.time_features import time_features
from t5x_diffeq.runs.load import load_run
from t5x_diffeq.runtime.config import Config
from t5x_diffeq.runtime.errors import InputError

TOKENS = np.random.default_rng(1).integers(256, size=(2, LENGTH))


def save_model(name, folder):
    run, tokenizer, as_run = random_run((MODELS | OTHER_CLASSES)[name])
    save_pretrained(run, as_run, tokenizer, [], folder)
    return run


def read(run, folder):
    """The run's config with the folder's model, and its parameters."""
    found = read_config_json(folder)
    config, tables = with_model(run.setup.config, found, None)
    return config, pretrained_params(folder, found, run.setup.model.config, tables)


def assert_same(found, expected):
    jax.tree.map(np.testing.assert_array_equal, found, expected)


def real_rows(params, vocab_size):
    """The parameters without the vocabulary's padding."""
    cut = {**params, "token_embedding": {"table": params["token_embedding"]["table"][:vocab_size]}}
    return cut | ({"head": params["head"][:, :vocab_size]} if "head" in params else {})


# Keys that don't belong to the architecture, or to a per-layer model.
OTHER_KEYS = ("block", "num_frequencies", "dropout_rate", "dtype", "attention", "remat")
CLASSES = {
    "llama": "LlamaForCausalLM",
    "gpt": "GPT2LMHeadModel",
    "gpt_relu": "GPT2LMHeadModel",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "gemma": "GemmaForCausalLM",
}


@pytest.mark.slow
@pytest.mark.parametrize("name", CLASSES)
def test_round_trip_is_exact(name, tmp_path):
    run = save_model(name, tmp_path / "out")
    before = run.setup.model.config
    assert read_config_json(tmp_path / "out")["architectures"] == [CLASSES[name]]
    config, found = read(run, tmp_path / "out")
    assert_same_numbers(*(real_rows(tree, before.vocab_size) for tree in (found, run.params)))
    keys = {**vars(before), "activation": before.mlp_activation, "vocab_size": None}
    again = {**vars(config.model), "activation": before.mlp_activation}
    assert {key: again[key] for key in again if key not in OTHER_KEYS} == {
        key: keys[key] for key in again if key not in OTHER_KEYS
    }
    assert config.data.sequence_length == LENGTH


def test_gemmas_norms_are_stored_less_1(tmp_path):
    run = save_model("gemma", tmp_path / "out")
    stored = load_file(tmp_path / "out" / "model.safetensors")
    for name, scale in (
        ("model.norm.weight", run.params["final_norm"]["scale"]),
        (
            "model.layers.1.input_layernorm.weight",
            run.params["source"]["weights"]["attention_norm"]["scale"][1],
        ),
    ):
        np.testing.assert_allclose(stored[name], np.asarray(scale) - 1, atol=1e-6)


def assert_same_numbers(found, expected):
    """Equal, but for the rounding of Gemma's norms, which are stored less 1."""
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=1e-7), found, expected)


def rewrite(folder, change):
    """The folder's tensors, by name, after `change`."""
    path = folder / "model.safetensors"
    save_file(change(load_file(path)), path, metadata={"format": "pt"})


def reword(folder, **changes):
    """The folder's config.json with changes."""
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def test_names_without_prefix_buffers_and_16_bits(tmp_path):
    """As the folder of GPT-2 itself is: a base model, with masks stored beside the weights."""
    run = save_model("gpt", tmp_path / "out")
    _, expected = read(run, tmp_path / "out")

    def change(tensors):
        shorter = {name.removeprefix("transformer."): x for name, x in tensors.items()}
        masks = {"h.0.attn.bias": np.tril(np.ones((1, 1, 4, 4), np.float32))}
        return {n: x.astype(ml_dtypes.bfloat16) for n, x in (shorter | masks).items()}

    rewrite(tmp_path / "out", change)
    rounded = jax.tree.map(lambda x: x.astype(ml_dtypes.bfloat16).astype(np.float32), expected)
    assert_same(read(run, tmp_path / "out")[1], rounded)


def test_a_tied_head(tmp_path):
    run = save_model("llama", tmp_path / "out")
    reword(tmp_path / "out", tie_word_embeddings=True)
    rewrite(tmp_path / "out", lambda x: {n: v for n, v in x.items() if n != "lm_head.weight"})
    found = read_config_json(tmp_path / "out")
    config, tables = with_model(run.setup.config, found, None)
    assert config.model.tied_head
    tied = ModelConfig.of(config.model, tables.tokens, LENGTH)
    params = pretrained_params(tmp_path / "out", found, tied, tables)
    assert "head" not in params
    found["tie_word_embeddings"] = False
    with pytest.raises(InputError, match=r"has no tensor lm_head.weight"):
        pretrained_params(tmp_path / "out", found, run.setup.model.config, tables)


# ------------------------------------------------------------------------------- into an ODE


def ode_of(changes, width=None):
    """A random per-layer model, its ODE's config and parameters, and the time basis."""
    run, _, _ = random_run(({**CLASSIC, **changes}, "bytes"))
    keys = ode_keys(run.setup.config.model, width)
    config = ModelConfig.of(keys, run.setup.model.config.vocab_size, LENGTH)
    config, _ = config.with_attention_for("cpu")
    params, basis = to_ode(config, jax.tree.map(np.asarray, run.params))
    return run, config, jax.tree.map(jnp.asarray, params), basis


def relative_error(run, config, params):
    wanted = logits_of(run, TOKENS)
    found = jax.jit(LanguageModel(config).apply)({"params": params}, jnp.asarray(TOKENS))
    difference = np.asarray(found)[..., : config.vocab_size] - wanted
    return np.abs(difference).max() / np.abs(wanted).max()


@pytest.mark.slow
@pytest.mark.parametrize("num_steps", [12, 24])
def test_an_ode_is_the_same_on_its_own_grid(num_steps):
    sizes = {"num_steps": num_steps, "embed_dim": 32, "mlp_dim": 80}
    run, config, params, basis = ode_of({**LLAMA, **sizes})
    assert (config.weights, config.step_size) == ("time_dependent", "1/N")
    assert config.time_embed_dim == num_steps
    assert relative_error(run, config, params) < 1e-4  # 1e-3 is promised
    assert basis.condition < 1.001
    assert basis.mixed < 1e3


@pytest.mark.slow
@pytest.mark.parametrize("changes", [{"width": 11}, {"time_embedding": "shared"}])
def test_gpts_biases_and_shifts_too(changes):
    width = changes.pop("width", None)
    run, config, params, _ = ode_of({"num_steps": 6, **changes}, width)
    assert relative_error(run, config, params) < 1e-4
    expected = jax.eval_shape(LanguageModel(config).init, jax.random.key(0), jnp.asarray(TOKENS))
    shapes = jax.tree.map(lambda x: x.shape, params)
    assert shapes == jax.tree.map(
        lambda x: x.shape, jax.tree.map(lambda x: x, unbox_values(expected))
    )


def unbox_values(variables):
    return jax.tree.map(
        lambda x: x.value, variables["params"], is_leaf=lambda x: hasattr(x, "value")
    )


@pytest.mark.parametrize(("num_nodes", "width"), [(12, 12), (12, 24), (24, 24)])
def test_weights_go_straight_from_node_to_node(num_nodes, width):
    """Halfway between two nodes W(t) is about their mean: no wild values off the grid."""
    basis = make_time_basis(num_nodes, width)
    halves = (jnp.arange(1, num_nodes) + 0.5) / num_nodes
    params = {"params": {name: jnp.asarray(x) for name, x in basis.parameters.items()}}
    features = time_features(halves, FREQUENCIES, TIME_SCALE)
    e = np.asarray(TimeEmbedding(width).apply(params, features))
    shares = e @ np.linalg.pinv(basis.at_nodes)  # of each node's weights in W(t)
    np.testing.assert_allclose(shares.sum(1), 1, atol=1e-3)
    means = (np.eye(num_nodes)[1:] + np.eye(num_nodes)[:-1]) / 2
    assert np.abs(shares - means).max() < 0.1
    assert np.abs(shares).sum(1).max() < 1.3


def test_a_bad_time_embedding_is_refused():
    bad = make_time_basis(4, 4)._replace(mixed=1e9)
    with pytest.raises(InputError, match=r"of 4 nodes has condition number 1\.0e\+09, and float32"):
        check_condition(bad)


# ------------------------------------------------------------------------------- the verb


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
        assert ("condition number 1.00" in told) == ("6 steps" in told) == (name == "ode")
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
def test_fewer_functions_of_time_than_layers(tmp_path, capsys):
    """The verb says what it costs, and names commands that make it up again."""
    run = save_model("llama", tmp_path / "out")
    workdir = tmp_path / "run"
    flags = [f"--input={tmp_path / 'out'}", f"--workdir={workdir}"]
    call(convert, *flags, "--to_ode", "--time_embed_dim=1")
    told = capsys.readouterr().err
    assert re.search(r"\n  all kernels +0\.\d{4}  \(0\.\d{4}\)\n", told)
    before, after = map(float, re.findall(r"(?:model|T = 1\)) +(\d+\.\d\d)\n", told))
    sizes = re.search(r"parameters: ([\d,]+) in the folder, ([\d,]+) now", told)
    original, found = (int(size.replace(",", "")) for size in sizes.groups())
    converted = load_run(workdir, run.setup.model.config.vocab_size, batch_size=1)
    assert found == sum(leaf.size for leaf in jax.tree.leaves(converted.params)) < original
    call(evaluate, f"--workdir={workdir}", "--batch_size=8")
    evaluated = json.loads(capsys.readouterr().out)["eval/perplexity"]
    assert after == pytest.approx(evaluated, abs=0.01) and after != before
    commands = [shlex.split(line)[2:] for line in told.splitlines() if " -m t5x" in line]
    assert [command[0] for command in commands] == [
        f"t5x_diffeq.{verb}" for verb in ("convert", "finetune", "evaluate")
    ]
    assert f"--config.train.distill_from={workdir}-teacher" in commands[1]
    assert f"--config.data.path={convert.CONFIG.value.data.path}" in commands[1]


@pytest.mark.slow
def test_a_shorter_length_and_padding(tmp_path, capsys):
    """Positions beyond the length are left out, and rows that no token has."""
    run = save_model("gpt", tmp_path / "out")
    vocab_size = run.setup.model.config.vocab_size

    def change(tensors):
        table = tensors["transformer.wte.weight"]
        return {**tensors, "transformer.wte.weight": np.pad(table, ((0, 20), (0, 0)))}

    rewrite(tmp_path / "out", change)
    reword(tmp_path / "out", vocab_size=vocab_size + 20)
    flags = [f"--workdir={tmp_path / 'run'}", "--sequence_length=10"]
    call(convert, f"--input={tmp_path / 'out'}", *flags)
    assert "20 rows of the vocabulary" in capsys.readouterr().err
    shorter = load_run(tmp_path / "run", vocab_size, batch_size=1)
    wanted = logits_of(run, TOKENS[:, :10])
    np.testing.assert_allclose(logits_of(shorter, TOKENS[:, :10]), wanted, atol=1e-6)
    assert shorter.params["position_embedding"]["table"].shape[0] == 10


BAD = {
    "another architecture": ({"model_type": "bert"}, "model_type is 'bert'; what can be"),
    "capped scores": (
        {"model_type": "gemma2", "attn_logit_softcapping": 50.0},
        "is 'gemma2', attn_logit_softcapping is 50.0: its attention scores are capped; such mod",
    ),
    "experts": (
        {"model_type": "mixtral", "num_local_experts": 8},
        "is 'mixtral', num_local_experts is 8: its MLP is a mixture of experts",
    ),
    "a window": (
        {"model_type": "mistral", "sliding_window": 16},
        "sliding_window is 16, less than sequences of 24 tokens; give --sequence_length=16",
    ),
    "a window in some layers": (
        {"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 8},
        "sliding_window is 8, less than",
    ),
    "layers of another kind": ({"layer_types": ["linear_attention"]}, "layer_types has 'linear_"),
    "quantised": ({"quantization_config": {"bits": 4}}, "quantization_config is {'bits': 4}, and"),
    "no embeddings' scale": ({"model_type": "gemma"}, "hidden_act is 'silu', and of gemma only"),
    "another activation": ({"hidden_act": "gelu"}, "hidden_act is 'gelu', and of llama only"),
    "biases": ({"attention_bias": True}, "attention_bias is True"),
    "rotary base": ({"rope_parameters": {"rope_theta": -1}}, "rope_theta is -1 in config.json; it"),
    "rotary scaling": ({"rope_scaling": {"type": "dynamic"}}, "scaled by 'dynamic' in config.json"),
    "rotary numbers": (
        {"rope_scaling": {"rope_type": "llama3", "factor": 8.0}},
        "lacks low_freq_factor of its llama3 rotary positions",
    ),
    "rotary by layer": (
        {"rope_parameters": {"full_attention": {"rope_theta": 1e6}}},
        "it must be one set of parameters",
    ),
    "part of a head": ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5 in config"),
    "head width": ({"head_dim": 16}, r"_proj.weight is of shape .*, and config.json makes"),
    "no head width": ({"head_dim": None, "num_attention_heads": 3}, "16 is not divisible by 3 he"),
    "odd heads": ({"head_dim": 3}, "model.head_dim=3 is odd, and rotary positions turn pairs"),
    "no heads": ({"num_attention_heads": 0}, "num_attention_heads is 0 in config.json; it must be"),
    "a text": (
        {"hidden_size": "16"},
        "hidden_size is '16' in config.json; it must be a who",
    ),
    "no number": (
        {"rms_norm_eps": float("nan")},
        "rms_norm_eps is nan in config.json; it must be",
    ),
    "a rope": ({"rope_parameters": 7}, "rope_parameters is 7 in config.json; it must be one set"),
    "shapes": ({"intermediate_size": 48}, r"is of shape \(16, 40\), and config.json makes it"),
    "missing layers": ({"num_hidden_layers": 4}, "has no tensor model.layers.3"),
    "left over": ({"num_hidden_layers": 2}, "holds model.layers.2.* which a plain llama"),
    "other biases": ({"model_type": "qwen2"}, "has no tensor model.layers.0.self_attn.k_proj.bias"),
    "small vocabulary": ({"vocab_size": 200}, "has vectors for 200 tokens, and the tokenizer has"),
    "large vocabulary": ({"vocab_size": 999}, "has vectors for 999 tokens, and the tokenizer has"),
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


def test_flags_and_files_that_dont_fit(good_folder, tmp_path):
    folder, new = f"--input={good_folder}", f"--workdir={tmp_path / 'run'}"
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    for arguments, message in (
        ([folder], "convert needs --workdir=DIR"),
        ([new], "convert needs --input=DIR"),
        ([f"--input={tmp_path}", new], "holds no config.json"),
        ([folder, f"--workdir={tmp_path / 'full'}"], "is not empty; remove what is there"),
        ([folder, new, "--time_embed_dim=8"], "is for neural ODEs only; add --to_ode"),
        ([folder, new, "--sequence_length=99"], "must be from 1 to the folder's 24"),
    ):
        with pytest.raises(InputError, match=message):
            call(convert, *arguments)
    weights = good_folder / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[:-100])  # a download that was cut off
    with pytest.raises(InputError, match=r"model.safetensors can't be read: .*; restore it"):
        call(convert, folder, new)
    weights.unlink()
    with pytest.raises(InputError, match=r"holds neither model.safetensors"):
        call(convert, folder, new)
    weights.write_bytes(whole)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["full"]


def test_what_is_the_folders_cant_be_set(good_folder, tmp_path, text):
    convert.check_overrides(["data.path", "model.dtype", "train.batch_size"])
    for key in ("model.num_steps", "data.sequence_length"):
        with pytest.raises(InputError, match=f"--config.{key} is set, and it is the folder's"):
            convert.check_overrides(["data.path", key])
    text.data.tokenizer = "bytes"  # instead of the folder's own
    with pytest.raises(InputError, match="has vectors for 320 tokens, and the tokenizer has 256"):
        call(convert, f"--input={good_folder}", f"--workdir={tmp_path / 'run'}")


def test_a_config_that_is_none(tmp_path):
    (tmp_path / "config.json").write_text("[1")
    with pytest.raises(InputError, match=r"config.json can't be read: .*; restore it"):
        read_config_json(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "gpt2", "n_layer": 2}')
    with pytest.raises(InputError, match=r"--input: config.json lacks 'n_embd'; restore it"):
        with_model(Config.of(default.get_config()), read_config_json(tmp_path), None)
