"""Hugging Face folders into parameters, exactly."""

import json
import shutil

import jax
import ml_dtypes
import numpy as np
import pytest
from exported_models import LENGTH, rewrite, save_model, tokenizer_of
from safetensors.numpy import save_file

from t5x_diffeq.config.config import Config
from t5x_diffeq.data.tokenizer_folder import load_tokenizer
from t5x_diffeq.hf.folder import TensorFiles
from t5x_diffeq.hf.from_pretrained import (
    pretrained_params,
    read_config_json,
    with_model,
    with_tokenizer,
)
from t5x_diffeq.hf.save_pretrained import save_pretrained
from t5x_diffeq.hf.to_peft import check_no_adapters
from t5x_diffeq.hf.tokenizer_files import write_tokenizer
from t5x_diffeq.model.config import ModelConfig
from t5x_diffeq.model.layers.rotary import rotary_table
from t5x_diffeq.system.errors import InputError
from t5x_diffeq.training.load import Run
from t5x_diffeq.training.setup import make_setup


@pytest.fixture
def tokenizer_folder(tmp_path):
    """A folder with a `tokenizer.model` and its `tokenizer.json`."""
    write_tokenizer(tokenizer_of("sentencepiece"), tmp_path, LENGTH)
    return tmp_path


def read(run, folder):
    """The run's config with the folder's model, and its parameters."""
    found = read_config_json(folder)
    config, tables = with_model(run.placed.config, found, None)
    return config, pretrained_params(folder, found, run.placed.model.config, tables)


def assert_same(found, expected):
    jax.tree.map(np.testing.assert_array_equal, found, expected)


def real_rows(params, vocab_size):
    """The parameters without the vocabulary's padding."""
    cut = {**params, "token_embedding": {"table": params["token_embedding"]["table"][:vocab_size]}}
    return cut | ({"head": params["head"][:, :vocab_size]} if "head" in params else {})


# Keys that don't belong to the architecture, or to a per-layer model.
OTHER_KEYS = (
    "block",
    "num_frequencies",
    "dropout_rate",
    "dtype",
    "attention",
    "scan_unroll",
    "remat",
)
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
    before = run.placed.model.config
    assert read_config_json(tmp_path / "out")["architectures"] == [CLASSES[name]]
    config, found = read(run, tmp_path / "out")
    assert_same_numbers(*(real_rows(tree, before.vocab_size) for tree in (found, run.params)))
    keys = {**vars(before), "activation": before.mlp_activation, "vocab_size": None}
    again = {**vars(config.model), "activation": before.mlp_activation}
    assert {key: again[key] for key in again if key not in OTHER_KEYS} == {
        key: keys[key] for key in again if key not in OTHER_KEYS
    }
    assert config.data.sequence_length == LENGTH


@pytest.mark.slow
@pytest.mark.parametrize("name", CLASSES)
def test_what_a_folder_says_besides_comes_back(name, tmp_path):
    """Key by key: stop ids as a list, other ids, generation's defaults, the tokenizer's ways."""
    out, again = tmp_path / "out", tmp_path / "again"
    run = save_model(name, out)
    ids = {"bos_token_id": 5, "eos_token_id": [7, 9], "pad_token_id": 3}
    said = {
        "config.json": ids,
        "generation_config.json": {**ids, "do_sample": True, "temperature": 0.6, "top_p": 0.9},
        "tokenizer_config.json": {"add_bos_token": True, "padding_side": "left"},
    }
    for file, keys in said.items():
        content = json.loads((out / file).read_text())
        (out / file).write_text(json.dumps({**content, **keys}))
    found = read_config_json(out)
    config, tables = with_model(run.placed.config, found, None)
    config, tokenizer = with_tokenizer(config, found, out)
    tokenizer.save(tmp_path / "tokenizer")
    tokenizer = load_tokenizer(tmp_path / "tokenizer")
    model = ModelConfig.of(config.model, tokenizer.vocab_size, LENGTH)
    params = pretrained_params(out, found, model, tables)
    setup = make_setup(config, tokenizer.vocab_size, jax.devices()[:1])
    save_pretrained(Run(setup, params, 0), config, tokenizer, [], again)
    for file in said:
        before, after = (json.loads((folder / file).read_text()) for folder in (out, again))
        assert after == before


@pytest.mark.parametrize(
    ("config", "generation", "stops", "end"),
    [
        ([7, 9], None, {7, 9}, 7),
        (7, [9, 8], {7, 8, 9}, 7),
        (None, [9, 7], {7, 9}, 9),
        (None, None, {2}, 2),
    ],
)
def test_any_stop_id_of_a_folder_stops(config, generation, stops, end, tokenizer_folder, small):
    """Documents are closed by the first one."""
    for file, ids in (("config.json", config), ("generation_config.json", generation)):
        (tokenizer_folder / file).write_text(json.dumps({"eos_token_id": ids}))
    found = read_config_json(tokenizer_folder)
    small.data.tokenizer = "sentencepiece"  # the folder's own
    as_run, tokenizer = with_tokenizer(Config.of(small), found, tokenizer_folder)
    assert (tokenizer.stops, tokenizer.end_of_text) == (stops, end)
    again = Config.of(small).with_values({"data.tokenizer": as_run.data.tokenizer})
    assert with_tokenizer(again, found, tokenizer_folder)[1].stops == stops


@pytest.mark.parametrize("ids", [[7, 9999], [7, -1], [7, "</s>"], [7, True]])
def test_stop_ids_that_no_token_has(ids, tokenizer_folder, small):
    (tokenizer_folder / "config.json").write_text("{}")
    (tokenizer_folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ids}))
    small.data.tokenizer = "sentencepiece"
    with pytest.raises(InputError, match=f"eos_token_id is {ids[1]!r}, and tokenizer.model has no"):
        with_tokenizer(Config.of(small), {}, tokenizer_folder)


def test_tokenizer_json_says_what_a_folder_reads(tokenizer_folder, small):
    """Beside a `tokenizer.model` that says something else, too."""
    small.data.tokenizer = "sentencepiece"
    model = with_tokenizer(Config.of(small), {}, tokenizer_folder)[1]
    content = json.loads((tokenizer_folder / "tokenizer.json").read_text())
    content["normalizer"] = {"type": "Lowercase"}
    (tokenizer_folder / "tokenizer.json").write_text(json.dumps(content))
    tokenizer = with_tokenizer(Config.of(small), {}, tokenizer_folder)[1]
    upper, lower = (tokenizer.encode([text])[0].tolist() for text in ("DEF", "def"))
    assert upper == lower != model.encode(["DEF"])[0].tolist()


def assert_same_numbers(found, expected):
    """Equal, but for the rounding of Gemma's norms, which are stored less 1."""
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=1e-7), found, expected)


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


@pytest.fixture(scope="module")
def tied(tmp_path_factory):
    """A run with a tied head, and its folder."""
    folder = tmp_path_factory.mktemp("tied") / "out"
    return save_model("qwen2", folder), folder


FREQUENCIES = rotary_table(4, 10000.0, ())[0]
EXTRA = "model.layers.0.self_attn.rotary_emb.inv_freq"


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_what_stands_for_a_tensor_of_ours_is_it(tied, tmp_path, dtype):
    """A head that is tied, and frequencies in any precision, whose rounding is no difference."""
    run, folder = tied
    shutil.copytree(folder, tmp_path / "out")

    def change(tensors):
        head = {"lm_head.weight": tensors["model.embed_tokens.weight"]}
        return {**tensors, **head, EXTRA: FREQUENCIES.astype(dtype)}

    rewrite(tmp_path / "out", change)
    assert_same(read(run, tmp_path / "out")[1], read(run, folder)[1])


MASK = np.tril(np.ones((1, 1, 4, 4)))
REFUSED = {
    "another head": ({"lm_head.weight": lambda t: t + 1e-3}, "lm_head.weight differs from the emb"),
    "a head of bytes": ({"lm_head.weight": lambda t: t.astype(np.int8)}, "is of dtype I8"),
    "frequencies": ({EXTRA: lambda _: FREQUENCIES * 1.01}, "inv_freq isn't what config.json makes"),
    "frequencies of bytes": ({EXTRA: lambda _: FREQUENCIES.astype(np.uint8)}, "isn't what config"),
    "a mask": ({"a.attn.bias": lambda _: MASK.swapaxes(2, 3).copy()}, "is of dtype F64"),
    "another mask": (
        {"a.attn.bias": lambda _: np.ones((1, 1, 4, 4), bool)},
        "attn.bias isn't what",
    ),
    "a low score": ({"a.attn.masked_bias": lambda _: np.float32([-10])}, "masked_bias isn't what"),
    "float8": (
        {"model.norm.weight": lambda _: np.ones(16, ml_dtypes.float8_e4m3fn)},
        "model.norm.weight is of dtype F8_E4M3, and can be of F32, BF16, F16 here; save the model",
    ),
    "int8": ({"model.norm.weight": lambda _: np.ones(16, np.int8)}, "norm.weight is of dtype I8"),
    "bool": ({"model.norm.weight": lambda _: np.ones(16, bool)}, "norm.weight is of dtype BOOL"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_tensors_that_are_not_what_they_stand_for(tied, tmp_path, what):
    run, folder = tied
    changes, message = REFUSED[what]
    shutil.copytree(folder, tmp_path / "out")

    def change(tensors):
        table = tensors["model.embed_tokens.weight"]
        return {**tensors, **{name: make(table) for name, make in changes.items()}}

    rewrite(tmp_path / "out", change)
    with pytest.raises(InputError, match=message):
        read(run, tmp_path / "out")


def test_a_tensor_in_two_files(tmp_path):
    for name in "ab":
        save_file({"w": np.ones(2, np.float32)}, tmp_path / name)
    index = {"weight_map": {"w": "a", "v": "b"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(InputError, match="holds w in two files; delete what isn't the model's"):
        TensorFiles(tmp_path)


ADAPTERS = {
    "lora": ({"peft_type": "LORA"}, "merge them in PEFT"),
    "alora": (
        {"peft_type": "LORA", "alora_invocation_tokens": [1], "base_model_name_or_path": "OUT"},
        r"can't be merged into one \(LORA with alora_invocation_tokens\); convert the model that "
        r"they were made for \(OUT\), and tune it with finetune",
    ),
    "prompt": ({"peft_type": "PROMPT_TUNING"}, r"can't be merged into one \(PROMPT_TUNING\); conv"),
    "damaged": ([1], "adapter_config.json can't be read"),
}


@pytest.mark.parametrize("what", ADAPTERS)
def test_advice_for_adapters_can_be_followed(tmp_path, what):
    content, message = ADAPTERS[what]
    check_no_adapters(tmp_path)
    (tmp_path / "adapter_config.json").write_text(json.dumps(content))
    with pytest.raises(InputError, match=message):
        check_no_adapters(tmp_path)


@pytest.mark.parametrize("name", ["../outside.safetensors", "/tmp/x.safetensors", "a/../b", 7])
def test_an_index_names_files_of_its_folder_alone(tmp_path, name):
    index = {"weight_map": {"model.embed_tokens.weight": name}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(InputError, match="is not the name of a file in its folder"):
        TensorFiles(tmp_path)


def test_weights_that_are_not_finite(tmp_path):
    save_file({"a": np.array([1, np.nan], np.float32)}, tmp_path / "model.safetensors")
    with pytest.raises(InputError, match="a has values that aren't finite; restore the file"):
        TensorFiles(tmp_path).read("a", (2,))
