"""`config.json` of a Hugging Face folder: written from a model's config, and read with checks."""

from collections.abc import Mapping
from typing import Any

from t5x_diffeq.exchange.families import FAMILIES, PLAIN, REFUSED, Family, family_of
from t5x_diffeq.exchange.layouts import TableSizes
from t5x_diffeq.exchange.rope_parameters import rotary_from_json, rotary_to_json
from t5x_diffeq.layers.rotary import BASE, rotary_table
from t5x_diffeq.models.block import PyTorchForm
from t5x_diffeq.models.config import ACTIVATIONS, ModelConfig
from t5x_diffeq.runtime.errors import InputError
from t5x_diffeq.runtime.keys.values import INT32, Values

_QUANTIZED = {"quantization_config": (None,)}
_SLIDING = "sliding_attention"
_FULL = "full_attention"


def plain_config(config: ModelConfig, end_of_text: int) -> dict:
    """`config.json` of the library's own class, which the model must have (`family_of`)."""
    found = family_of(config)
    assert found, "no class of transformers computes this model"
    kind, family = found
    values = {
        "num_kv_heads": config.kv_heads,
        "head_dim": config.head_width,
        "activation": _their_activation(family, config),
        "length": config.max_length,
    }
    extra: dict[str, Any] = (
        {
            **rotary_to_json(config),
            "use_sliding_window": False,
            "sliding_window": None,
        }
        if family.rotary
        else {
            "resid_pdrop": config.dropout_rate,
            "embd_pdrop": config.dropout_rate,
            "attn_pdrop": 0.0,
        }
    )
    return {
        "model_type": kind,
        "architectures": [family.model_class],
        **{
            theirs: values.get(ours, getattr(config, ours, None))
            for ours, theirs in family.keys.items()
        },
        **{key: values[0] for key, values in family.only.items()},
        **extra,
        "tie_word_embeddings": config.has_tied_head,
        **_common(config, end_of_text),
    }


def own_config(config: ModelConfig, end_of_text: int) -> dict:
    """`config.json` of `modeling_diffeq.py`."""
    gpt = config.architecture == "gpt"
    frequencies, factor = rotary_table(config.head_width, config.rope_theta, config.rope_scaling)
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
        "norm_position": config.norm_position,
        "qkv_bias": gpt or config.qkv_bias,
        "qk_norm": config.qk_norm,
        "tied_head": config.has_tied_head,
        "embedding_scale": config.embedding_scale,
        "rotary_frequencies": None if gpt else frequencies.tolist(),
        "rotary_factor": factor,
        "activation": config.mlp_activation,
        "norm_eps": config.norm_eps,
        "final_norm_eps": config.final_norm_eps,
        "hidden_size": config.embed_dim,
        "intermediate_size": config.mlp_dim,
        "num_hidden_layers": config.num_steps,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_width,
        "max_position_embeddings": config.max_length,
        "tie_word_embeddings": False,  # our class reads the table itself: there is nothing to tie
        **_common(config, end_of_text),
    }


def block_config(config: ModelConfig, form: PyTorchForm, end_of_text: int) -> dict:
    """`config.json` of a block's own PyTorch file."""
    module = form.modeling.stem
    return {
        **own_config(config, end_of_text),
        "model_type": f"t5x_diffeq_{module.removeprefix('modeling_')}",
        "architectures": [form.model_class],
        "auto_map": {
            "AutoConfig": f"{module}.{form.config_class}",
            "AutoModelForCausalLM": f"{module}.{form.model_class}",
        },
        **form.config,
    }


def _common(config: ModelConfig, end_of_text: int) -> dict:
    return {
        "vocab_size": config.vocab_size,
        "bos_token_id": end_of_text,  # it also opens every document
        "eos_token_id": end_of_text,
        "torch_dtype": "float32",
    }


def _their_activation(family: Family, config: ModelConfig) -> str:
    return next(name for name, ours in family.activations.items() if ours == config.mlp_activation)


def model_keys(found: Mapping[str, Any]) -> tuple[dict, TableSizes]:
    """Our `config.model` keys and the folder's tables, from its `config.json`.

    Raises:
      InputError: if the folder holds another architecture, or a variant that we don't support.
    """
    kind, family = folder_family(found)
    for key, allowed in {**family.only, **_QUANTIZED}.items():
        if found.get(key, allowed[0]) not in allowed:
            raise InputError(
                f"--input: {key} is {found[key]!r}, and of {kind} only models with "
                f"{' or '.join(map(repr, allowed))} can be converted"
            )
    sizes = _read_sizes(found, family)
    length = sizes.pop("length")
    heads, width = sizes["num_heads"], sizes["embed_dim"]
    eps = sizes["norm_eps"]
    keys = {
        "architecture": family.architecture,
        "weights": "per_layer",
        "scheme": "lie_trotter",
        "step_size": "1",
        "norm_shift": False,
        "mlp_input": "state",
        **PLAIN,
        **family.features,
        "tied_head": is_tied(found, family) and family.tied_head is not None,
        "embedding_scale": family.embedding_scale(width),
        "rope_theta": BASE,
        "rope_scaling": (),
        **(rotary_from_json(found, length) if family.rotary else {}),
        **sizes,
        "activation": _our_activation(found, kind, family),
        "num_kv_heads": sizes.get("num_kv_heads") or (heads if family.rotary else None),
        "head_dim": _head_dim(sizes.get("head_dim"), width, heads),
        "mlp_dim": sizes.get("mlp_dim") or 4 * width,
        "final_norm_eps": eps,
    }
    return keys, TableSizes(tokens=found["vocab_size"], positions=length)


def folder_family(found: Mapping[str, Any]) -> tuple[str, Family]:
    """The `model_type` and class of a folder.

    Raises:
      InputError: if it is none that we have.
    """
    kind = found.get("model_type")
    if isinstance(kind, str) and kind in FAMILIES:
        return kind, FAMILIES[kind]
    if isinstance(kind, str) and kind in REFUSED:
        key, reason = REFUSED[kind]
        value = f", {key} is {found[key]!r}" if key in found and key != "model_type" else ""
        raise InputError(
            f"--input: model_type is {kind!r}{value}: {reason}; such models can't be converted"
        )
    raise InputError(
        f"--input: model_type is {kind!r}; what can be converted is {', '.join(FAMILIES)}"
    )


def is_tied(found: Mapping[str, Any], family: Family) -> bool:
    """Whether a folder's head is its embedding table."""
    return family.tied_head is None or found.get("tie_word_embeddings", family.tied_head)


def check_window(found: Mapping[str, Any], length: int) -> None:
    """Checks that sequences are no longer than the window of attention, if there is one.

    Args:
      found: the folder's `config.json`.
      length: the run's sequence length.

    Raises:
      InputError: if they are longer, or a layer's attention is of another kind.
    """
    types = found.get("layer_types") or []
    others = sorted({str(each) for each in types} - {_SLIDING, _FULL})
    if others:
        raise InputError(
            f"--input: layer_types has {others[0]!r}, and only {_FULL} and {_SLIDING} can be "
            "converted"
        )
    everywhere = found["model_type"] == "mistral"  # its class asks for nothing else
    if not (everywhere or found.get("use_sliding_window") or _SLIDING in types):
        return
    window = found.get("sliding_window", 4096)  # the default of these classes
    if window is not None and window < length:
        raise InputError(
            f"--input: sliding_window is {window}, less than sequences of "
            f"{length} tokens; give --sequence_length={window} or less"
        )


def _read_sizes(found: Mapping[str, Any], family: Family) -> dict[str, Any]:
    """The numbers of `config.json` by our keys.

    Raises:
      InputError: if one that must be there is missing, or is not a number greater than 0.
    """
    sizes = {}
    optional = ("head_dim", "num_kv_heads", "mlp_dim" if family.architecture == "gpt" else "")
    for ours, theirs in [*family.keys.items(), ("vocab_size", "vocab_size")]:
        if ours == "activation":
            continue
        value = found.get(theirs, family.defaults.get(ours))
        if value is None and ours not in optional:
            raise InputError(f"--input: config.json lacks {theirs!r}; restore it")
        number = float if ours == "norm_eps" else int
        if Values(number, 0, INT32, open="(]", optional=True).fault(value):
            raise InputError(
                f"--input: {theirs} is {value!r} in config.json; it must be "
                f"{'a whole number' if number is int else 'a number'} greater than 0; restore it"
            )
        sizes[ours] = value
    del sizes["vocab_size"]
    return sizes


def _our_activation(found: Mapping[str, Any], kind: str, family: Family) -> str | None:
    """`model.activation`: None for the default of our block.

    Raises:
      InputError: if it is none that we have.
    """
    key = family.keys["activation"]
    value = found.get(key, next(iter(family.activations)))
    if value not in family.activations:
        raise InputError(
            f"--input: {key} is {value!r}, and of {kind} only models with "
            f"{' or '.join(map(repr, family.activations))} can be converted"
        )
    ours = family.activations[value]
    return None if ours == ACTIVATIONS[family.architecture][0] else ours


def _head_dim(found: int | None, width: int, heads: int) -> int | None:
    """`model.head_dim`: None where the heads' widths sum to the state's."""
    if found is None and width % heads:
        raise InputError(
            f"--input: hidden_size {width} is not divisible by {heads} heads, and config.json has "
            "no head_dim; restore it"
        )
    return None if found is None or found * heads == width else found
