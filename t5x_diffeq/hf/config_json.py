"""`config.json` of a Hugging Face folder: written from a model's config, and read with checks."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from t5x_diffeq.config.keys.values import INT32, Values
from t5x_diffeq.data.tokenizer import Border
from t5x_diffeq.hf.families import FAMILIES, HARMLESS, PLAIN, ROTARY_KEYS, Family
from t5x_diffeq.hf.layouts import TableSizes
from t5x_diffeq.hf.refusals import TYPES, way_out
from t5x_diffeq.hf.rope_parameters import rotary_from_json, rotary_to_json
from t5x_diffeq.model.block import PyTorchForm
from t5x_diffeq.model.config import ACTIVATIONS, ModelConfig
from t5x_diffeq.model.layers.rotary import BASE, rotary_table
from t5x_diffeq.model.ode.solvers import find_scheme
from t5x_diffeq.system.errors import InputError

# The PyTorch file of all models with blocks of this package.
DIFFEQ_FORM = PyTorchForm(
    Path(__file__).with_name("modeling_diffeq.py"),
    "DiffEqConfig",
    "DiffEqModel",
    "DiffEqForCausalLM",
    {"model_type": "t5x_diffeq"},
)
_QUANTIZED = {"quantization_config": (None,)}


def plain_config(config: ModelConfig, kind: str, family: Family, border: Border) -> dict:
    """`config.json` for a class of transformers, which `family_of` gives for the model."""
    names = [name for name, ours in family.activations.items() if ours == config.mlp_activation]
    values = {
        "num_kv_heads": config.kv_heads,
        "head_dim": config.head_width,
        "activation": names[0],
        "length": config.max_length,
    }
    rates = {"resid_pdrop": config.dropout_rate, "embd_pdrop": config.dropout_rate}
    windows = {"use_sliding_window": False, "sliding_window": None}
    return {
        "model_type": kind,
        "architectures": [family.model_class],
        **{
            theirs: values.get(ours, getattr(config, ours, None))
            for ours, theirs in family.keys.items()
        },
        **{key: allowed[0] for key, allowed in family.only.items()},
        **(rotary_to_json(config) | windows if family.rotary else {**rates, "attn_pdrop": 0.0}),
        "tie_word_embeddings": config.has_tied_head,
        **_common(config, border),
    }


def diffeq_config(config: ModelConfig, form: PyTorchForm, border: Border) -> dict:
    """`config.json` for a model whose PyTorch file lies beside the weights."""
    gpt, module = config.architecture == "gpt", form.modeling.stem
    frequencies, factor = rotary_table(config.head_width, config.rope_theta, config.rope_scaling)
    return {
        "model_type": f"t5x_diffeq_{module.removeprefix('modeling_')}",
        "architectures": [form.model_class],
        "auto_map": {
            "AutoConfig": f"{module}.{form.config_class}",
            "AutoModel": f"{module}.{form.base_class}",
            "AutoModelForCausalLM": f"{module}.{form.model_class}",
        },
        "architecture": config.architecture,
        "parallel": find_scheme(config.scheme).layer == "parallel",
        "mlp_reads_attention_norm": config.mlp_input == "attention_norm",
        "norm_shift": gpt or config.norm_shift,
        "norm_position": config.norm_position,
        "qkv_bias": gpt or config.qkv_bias,
        "qk_norm": config.qk_norm,
        "tie_word_embeddings": config.has_tied_head,
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
        **_common(config, border),
        **form.config,
    }


def _common(config: ModelConfig, border: Border) -> dict:
    return {
        "vocab_size": config.vocab_rows,
        "bos_token_id": border.opener,
        "eos_token_id": border.end,
        "torch_dtype": "float32",
    }


def model_keys(config_json: Mapping[str, Any]) -> tuple[dict, TableSizes]:
    """Our `config.model` keys and the sizes of the folder's tables, from its `config.json`.

    Raises:
      InputError: if the folder holds another architecture, or a variant that we don't support.
    """
    kind, family = folder_family(config_json)
    for key, allowed in {**family.only, **_QUANTIZED}.items():
        if config_json.get(key, allowed[0]) not in allowed:
            raise InputError(
                f"--input: {key} is {config_json[key]!r}, and of {kind} only models with "
                f"{' or '.join(map(repr, allowed))} can be converted{way_out(key)}"
            )
    _check_known(config_json, kind, family)
    sizes = _read_sizes(config_json, family)
    length = sizes.pop("length")
    heads, width, head_dim = sizes["num_heads"], sizes["embed_dim"], sizes.get("head_dim")
    keys = {
        "architecture": family.architecture,
        "weights": "per_layer",
        "scheme": "lie_trotter",
        "step_size": "1",
        "norm_shift": False,
        "mlp_input": "state",
        **PLAIN,
        **family.features,
        "tied_head": is_tied(config_json, family) and family.tied_head is not None,
        "embedding_scale": family.embedding_scale(width),
        "rope_theta": BASE,
        "rope_scaling": (),
        **(rotary_from_json(config_json, length) if family.rotary else {}),
        **sizes,
        "activation": _our_activation(config_json, kind, family),
        "num_kv_heads": sizes.get("num_kv_heads") or (heads if family.rotary else None),
        "head_dim": head_dim if head_dim and head_dim * heads != width else None,
        "mlp_dim": sizes.get("mlp_dim") or 4 * width,
        "final_norm_eps": sizes["norm_eps"],
    }
    return keys, TableSizes(tokens=config_json["vocab_size"], positions=length)


def _check_known(config_json: Mapping[str, Any], kind: str, family: Family) -> None:
    """Checks that every key is known, because an unknown one may change what the model computes.

    A key that is off (null, false, 0 or empty) is not checked.
    """
    known = {*HARMLESS, *family.keys.values(), *family.only, *_QUANTIZED}
    known |= {"vocab_size", "tie_word_embeddings", *(ROTARY_KEYS if family.rotary else ())}
    for key in sorted(key for key, value in config_json.items() if value and key not in known):
        raise InputError(
            f"--input: {key} is {config_json[key]!r:.100} in config.json; the key is unknown for "
            f"{kind} and may change what the model computes; if it doesn't, remove it from there"
        )


def folder_family(config_json: Mapping[str, Any]) -> tuple[str, Family]:
    """The `model_type` and class of a folder; InputError if the type isn't supported."""
    kind = config_json.get("model_type")
    if kind is None:
        raise InputError(
            "--input: config.json has no model_type, so this isn't a folder of transformers; if it "
            "is a run's workdir, export makes such a folder of it"
        )
    if not isinstance(kind, str) or kind not in FAMILIES:
        reason, nearest = TYPES.get(str(kind), ("", ""))
        lacking = f" ({reason})" if reason else ""
        way = f", of which {nearest} comes nearest" if nearest else ""
        raise InputError(
            f"--input: model_type is {kind!r}{lacking}; supported types are "
            f"{', '.join(FAMILIES)}{way}"
        )
    return kind, FAMILIES[kind]


def is_tied(config_json: Mapping[str, Any], family: Family) -> bool:
    """Whether a folder's head is its embedding table."""
    return family.tied_head is None or config_json.get("tie_word_embeddings", family.tied_head)


def check_window(config_json: Mapping[str, Any], length: int) -> None:
    """Checks that sequences fit into attention's window, if there is one (else: InputError)."""
    everywhere = config_json["model_type"] == "mistral"  # with no other key to turn it on
    some_layers = "sliding_attention" in (config_json.get("layer_types") or [])
    if not (everywhere or config_json.get("use_sliding_window") or some_layers):
        return
    window = config_json.get("sliding_window", 4096)  # the default of these classes
    if window is not None and window < length:
        raise InputError(
            f"--input: sliding_window is {window}, less than sequences of "
            f"{length} tokens; give --sequence_length={window} or less"
        )


def _read_sizes(config_json: Mapping[str, Any], family: Family) -> dict[str, Any]:
    """The sizes in `config.json` by our keys; each must be greater than 0 (else: InputError)."""
    sizes = {}
    optional = ("head_dim", "num_kv_heads", "mlp_dim" if family.architecture == "gpt" else "")
    for ours, theirs in [*family.keys.items(), ("vocab_size", "vocab_size")]:
        if ours == "activation":
            continue
        value = config_json.get(theirs, family.defaults.get(ours))
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


def _our_activation(config_json: Mapping[str, Any], kind: str, family: Family) -> str | None:
    """`model.activation`: None for the default of our block."""
    key = family.keys["activation"]
    value = config_json.get(key, next(iter(family.activations)))
    if value not in family.activations:
        raise InputError(
            f"--input: {key} is {value!r}, and of {kind} only models with "
            f"{' or '.join(map(repr, family.activations))} can be converted{way_out(key)}"
        )
    activation = family.activations[value]
    return None if activation == ACTIVATIONS[family.architecture][0] else activation
