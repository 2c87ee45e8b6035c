"""What `convert` doesn't take, why, and the nearest thing that it takes.

The page of Hugging Face's models has this table: `python -m t5x_diffeq.hf.refusals`.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple


class Refusal(NamedTuple):
    """What a `config.json` can say that can't be converted."""

    value: Any  # an example of what it says
    kind: str  # a `model_type` that can say it
    reason: str  # what is lacking here
    nearest: str  # what can be done instead


_BIAS = "qwen2 has biases on queries, keys and values, and gpt2 on every layer"
_RESTORE = "save the model in bfloat16 (`model.dequantize()`), or take the folder it was made from"

# By key of `config.json`.
KEYS: Mapping[str, Refusal] = {
    "attention_bias": Refusal(True, "llama", "biases on all of attention's layers", _BIAS),
    "mlp_bias": Refusal(True, "llama", "biases in a gated MLP", _BIAS),
    "hidden_act": Refusal(
        "gelu",
        "llama",
        "GELU by the error function",
        "gelu_pytorch_tanh differs from it by less than 0.0005; write that, and compare the losses",
    ),
    "activation_function": Refusal(
        "gelu",
        "gpt2",
        "GELU by the error function",
        "gelu_new differs from it by less than 0.0005; write that, and compare the losses",
    ),
    "partial_rotary_factor": Refusal(
        0.5, "llama", "rotary positions on a part of a head", "train with rotary positions on all"
    ),
    "mscale": Refusal(
        {"rope_type": "yarn", "factor": 4.0, "mscale": 0.707},
        "llama",
        "DeepSeek's factor on yarn's cosines and sines",
        "write attention_factor = (0.1 mscale log(factor) + 1) / (0.1 mscale_all_dim log(factor) + "
        "1) in its place",
    ),
    "truncate": Refusal(
        {"rope_type": "yarn", "factor": 4.0, "truncate": False},
        "llama",
        "yarn whose range of frequencies isn't rounded",
        "yarn with truncate=true",
    ),
    "rope_scaling": Refusal(
        {"rope_type": "dynamic", "factor": 2.0},
        "llama",
        "`dynamic` and `longrope`",
        "linear, llama3 and yarn; `dynamic` changes nothing up to the length before scaling: "
        "remove it, and give --sequence_length",
    ),
    "sliding_window": Refusal(
        16, "mistral", "windows of attention", "--sequence_length of at most the window"
    ),
    "tie_word_embeddings": Refusal(
        False, "gpt2", "a head of its own in GPT-2", "llama and the others have one"
    ),
    "scale_attn_weights": Refusal(
        False,
        "gpt2",
        "attention without 1/sqrt(d)",
        "multiply the queries' kernel and bias by sqrt(d)",
    ),
    "scale_attn_by_inverse_layer_idx": Refusal(
        True,
        "gpt2",
        "a scale by the layer",
        "divide the queries' kernel and bias of layer n by n + 1",
    ),
    "add_cross_attention": Refusal(True, "gpt2", "an encoder", "decoders alone"),
    "use_bidirectional_attention": Refusal(
        True, "gemma", "attention to later tokens", "models that predict the next token"
    ),
    "hidden_activation": Refusal(
        "gelu", "gemma", "GELU by the error function", "gelu_pytorch_tanh differs by < 0.0005"
    ),
    "quantization_config": Refusal(
        {"quant_method": "gptq"}, "llama", "weights in fewer bits", _RESTORE
    ),
}

# By `model_type`: what is lacking, and the type that comes nearest.
TYPES: Mapping[str, tuple[str, str]] = {
    "gemma2": ("norms before and after each layer, caps on logits, windows", "gemma"),
    "gemma3_text": ("norms before and after each layer, two rotary bases, windows", "gemma"),
    "olmo": ("norms without weights", "olmo2"),
    "olmo3": ("windows in three of four layers", "olmo2"),
    "phi3": ("fused kernels, windows, longrope", "llama"),
    "granite": ("factors on embedding, attention, residual and logits", "llama"),
    "mixtral": ("experts", "mistral"),
    "qwen2_moe": ("experts", "qwen2"),
    "qwen3_moe": ("experts", "qwen3"),
    "olmoe": ("experts", "olmo2"),
    "deepseek_v3": ("experts, latent attention", "llama"),
    "gpt_neox": ("rotary positions on a part of a head, layers side by side", "gpt2"),
    "gptj": ("rotary positions on a part of a head, layers side by side", "gpt2"),
    "opt": ("positions that begin at 2", "gpt2"),
    "bloom": ("ALiBi", "gpt2"),
    "falcon": ("layers side by side", "llama"),
    "stablelm": ("LayerNorm with rotary positions on a part of a head", "llama"),
    "starcoder2": ("LayerNorm and biases with rotary positions", "llama"),
    "cohere": ("layers side by side, LayerNorm", "llama"),
    "mamba": ("state spaces", "llama"),
}


def way_out(key: str) -> str:
    """The end of a message about this key; nothing for keys without an entry."""
    return f"; nearest: {KEYS[key].nearest}" if key in KEYS else ""


def table() -> str:
    """`KEYS` and `TYPES` as a table in Markdown."""
    lines = ["| `config.json` says | not here | nearest that works |", "|---|---|---|"]
    for key, each in KEYS.items():
        value = each.value
        if isinstance(value, dict) and key in value:
            value = value[key]
        cell = f"`{key}`: `{value!r}`"
        lines.append(f"| {cell} (`{each.kind}`) | {each.reason} | {each.nearest} |")
    for kind, (reason, nearest) in TYPES.items():
        lines.append(f"| `model_type`: `{kind}` | {reason} | `{nearest}` |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table())
