"""`config.json` of a Hugging Face folder: written from a model's config, and read with checks."""

from collections.abc import Mapping
from typing import Any

from t5x_diffeq.exchange.layouts import GPT2, LLAMA, Layout, TableSizes
from t5x_diffeq.models.config import ModelConfig
from t5x_diffeq.runtime.config_keys import INT32, Key
from t5x_diffeq.runtime.errors import InputError

_ROTARY_BASE = 10_000.0  # the base in layers/rotary.py
_TANH_GELU = ("gelu_new", "gelu_pytorch_tanh")

# The values that a folder's config.json must have for the model to be one of ours. A missing key
# has the library's default, which is the first value.
_REQUIRED: dict[str, dict[str, tuple]] = {
    "llama": {
        "hidden_act": ("silu", "swish"),
        "attention_bias": (False,),
        "mlp_bias": (False,),
        "rope_scaling": (None,),
        "partial_rotary_factor": (1.0,),
    },
    "gpt2": {
        "activation_function": (*_TANH_GELU, "relu"),
        "scale_attn_weights": (True,),
        "scale_attn_by_inverse_layer_idx": (False,),
        "add_cross_attention": (False,),
        "tie_word_embeddings": (True,),
    },
}


# Keys whose values must be numbers greater than 0, and their types.
_NUMBERS = {
    "llama": dict.fromkeys(
        (
            "vocab_size",
            "hidden_size",
            "intermediate_size",
            "num_hidden_layers",
            "num_attention_heads",
            "num_key_value_heads",
            "head_dim",
            "max_position_embeddings",
        ),
        int,
    )
    | {"rms_norm_eps": float, "rope_theta": float},
    "gpt2": dict.fromkeys(
        ("vocab_size", "n_embd", "n_layer", "n_head", "n_inner", "n_positions"), int
    )
    | {"layer_norm_epsilon": float},
}


def plain_layout(config: ModelConfig) -> Layout | None:
    """The layout of the library's own class that computes what this model does, or None.

    Every model of the classical residual block has one (Lie-Trotter, with the step size in the
    weights) if its norms are that class's, with a single epsilon.
    """
    if config.scheme != "lie_trotter" or config.mlp_input != "state":
        return None
    if config.norm_eps != config.final_norm_eps:
        return None
    if config.architecture == "gpt":
        return GPT2
    return None if config.norm_shift else LLAMA


def plain_config(config: ModelConfig, end_of_text: int) -> dict:
    """`config.json` of `LlamaForCausalLM` or `GPT2LMHeadModel`."""
    common = {
        "vocab_size": config.vocab_size,
        "bos_token_id": end_of_text,  # it also opens every document
        "eos_token_id": end_of_text,
        "tie_word_embeddings": config.architecture == "gpt",
        "torch_dtype": "float32",
    }
    if config.architecture == "gpt":
        return {
            "model_type": "gpt2",
            "architectures": ["GPT2LMHeadModel"],
            "n_positions": config.max_length,
            "n_embd": config.embed_dim,
            "n_layer": config.num_steps,
            "n_head": config.num_heads,
            "n_inner": config.mlp_dim,
            "activation_function": {"gelu": "gelu_new", "relu": "relu"}[config.mlp_activation],
            "layer_norm_epsilon": config.norm_eps,
            "resid_pdrop": config.dropout_rate,
            "embd_pdrop": config.dropout_rate,
            "attn_pdrop": 0.0,
            **common,
        }
    return {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        **_shape_keys(config),
        "hidden_act": "silu",
        "rms_norm_eps": config.norm_eps,
        "attention_bias": False,
        "mlp_bias": False,
        "rope_theta": _ROTARY_BASE,  # version 4 of the library reads this key, version 5 the next
        "rope_parameters": {"rope_type": "default", "rope_theta": _ROTARY_BASE},
        **common,
    }


def own_config(config: ModelConfig, end_of_text: int) -> dict:
    """`config.json` of `modeling_diffeq.py`."""
    gpt = config.architecture == "gpt"
    return {
        "model_type": "t5x_diffeq",
        "architectures": ["DiffEqForCausalLM"],
        "auto_map": {
            "AutoConfig": "modeling_diffeq.DiffEqConfig",
            "AutoModelForCausalLM": "modeling_diffeq.DiffEqForCausalLM",
        },
        "architecture": config.architecture,
        "parallel": config.scheme == "euler",
        "mlp_reads_attention_norm": config.mlp_input == "attention_norm",
        "norm_shift": gpt or config.norm_shift,
        "activation": config.mlp_activation,
        "norm_eps": config.norm_eps,
        "final_norm_eps": config.final_norm_eps,
        **_shape_keys(config),
        "vocab_size": config.vocab_size,
        "bos_token_id": end_of_text,
        "eos_token_id": end_of_text,
        "tie_word_embeddings": False,  # gpt's head reads the table itself: there is nothing to tie
        "torch_dtype": "float32",
    }


def _shape_keys(config: ModelConfig) -> dict:
    return {
        "hidden_size": config.embed_dim,
        "intermediate_size": config.mlp_dim,
        "num_hidden_layers": config.num_steps,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.embed_dim // config.num_heads,
        "max_position_embeddings": config.max_length,
    }


def model_keys(found: Mapping[str, Any]) -> tuple[dict, TableSizes]:
    """Our `config.model` keys and the folder's tables, from its `config.json`.

    Raises:
      InputError: if the folder holds another architecture, or a variant that we don't support.
    """
    kind = found.get("model_type")
    if not isinstance(kind, str) or kind not in _REQUIRED:
        raise InputError(
            f"--input: model_type is {kind!r}; what can be converted is {' and '.join(_REQUIRED)}"
        )
    for key, allowed in _REQUIRED[kind].items():
        if found.get(key, allowed[0]) not in allowed:
            raise InputError(
                f"--input: {key} is {found[key]!r}, and of {kind} only models with "
                f"{' or '.join(map(repr, allowed))} can be converted"
            )
    _check_numbers(found, _NUMBERS[kind])
    try:
        keys, length = _llama_keys(found) if kind == "llama" else _gpt2_keys(found)
        tables = TableSizes(tokens=found["vocab_size"], positions=length)
    except KeyError as error:
        raise InputError(f"--input: config.json lacks {error}; restore it") from error
    baseline = {"weights": "per_layer", "scheme": "lie_trotter", "step_size": "1"}
    return {**keys, **baseline, "norm_shift": False, "mlp_input": "state"}, tables


def _check_numbers(found: Mapping[str, object], numbers: Mapping[str, type]) -> None:
    """Checks that each of these keys, unless it is missing or null, is a number greater than 0."""
    for key, kind in numbers.items():
        value = found.get(key)
        fault = Key(kind, 0, INT32, open="(]", optional=True).fault(value)
        if fault:
            raise InputError(
                f"--input: {key} is {value!r} in config.json; it must be "
                f"{'a whole number' if kind is int else 'a number'} greater than 0; restore it"
            )


def _llama_keys(found: Mapping[str, Any]) -> tuple[dict, int]:
    """The `config.model` keys and the number of positions of a Llama."""
    width, heads = found["hidden_size"], found["num_attention_heads"]
    if (found.get("head_dim") or width // heads) * heads != width:
        raise InputError(
            f"--input: {heads} heads of head_dim {found.get('head_dim')} don't make hidden_size "
            f"{width}; here they must"
        )
    _check_rotary(found)
    return {
        "architecture": "llama",
        "num_steps": found["num_hidden_layers"],
        "embed_dim": width,
        "num_heads": heads,
        "num_kv_heads": found.get("num_key_value_heads") or heads,
        "mlp_dim": found["intermediate_size"],
        "norm_eps": found.get("rms_norm_eps", 1e-6),
        "final_norm_eps": found.get("rms_norm_eps", 1e-6),
    }, found.get("max_position_embeddings", 2048)


def _check_rotary(found: Mapping[str, object]) -> None:
    rope = found.get("rope_parameters") or {}
    if not isinstance(rope, Mapping):
        raise InputError(f"--input: rope_parameters is {rope!r} in config.json; restore it")
    kind = rope.get("rope_type", "default")
    base = rope.get("rope_theta", found.get("rope_theta", _ROTARY_BASE))
    if kind != "default" or base != _ROTARY_BASE:
        raise InputError(
            f"--input: rotary positions are of type {kind!r} with base {base}; here they are of "
            f"type 'default' with base {_ROTARY_BASE:g}, so this model can't be converted"
        )


def _gpt2_keys(found: Mapping[str, Any]) -> tuple[dict, int]:
    """The `config.model` keys and the number of positions of a GPT-2."""
    eps = found.get("layer_norm_epsilon", 1e-5)
    return {
        "architecture": "gpt",
        "num_steps": found["n_layer"],
        "embed_dim": found["n_embd"],
        "num_heads": found["n_head"],
        "num_kv_heads": None,
        "mlp_dim": found.get("n_inner") or 4 * found["n_embd"],
        "activation": "relu" if found.get("activation_function") == "relu" else None,
        "norm_eps": eps,
        "final_norm_eps": eps,
    }, found["n_positions"]
