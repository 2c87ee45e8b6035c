"""Run where torch and transformers are, by transformers_test.py: the library's own small models.

    transformers_models.py make FOLDER          each with random weights, saved by save_pretrained
    transformers_models.py check FOLDER AGAIN   what we exported of them: the same class and logits

Beside each model is what it says of some tokens, `MODEL.npz`.
"""

import sys
from pathlib import Path

import numpy as np
import torch
import transformers

SIZES = {
    "vocab_size": 256,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 48,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 5e5,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e6,
    "factor": 4.0,
    "original_max_position_embeddings": 12,
}
WIDE = {"hidden_size": 48, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 64}
GPT2 = {"vocab_size": 256, "n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 48}
BF16 = {"dtype": torch.bfloat16}
SHARDED = {"max_shard_size": "40KB"}

# Name: the class, changes of its config, and how it is saved.
MODELS = {
    "llama_tied": ("Llama", {"tie_word_embeddings": True}, {}),  # as SmolLM2
    "llama_bf16_sharded": ("Llama", {"rms_norm_eps": 1e-5}, BF16 | SHARDED),
    "llama3_long": ("Llama", {**WIDE, "max_position_embeddings": 4096, "rope_scaling": LLAMA3}, {}),
    "llama_linear": (
        "Llama",
        {"rope_scaling": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}},
        {},
    ),
    "mistral": ("Mistral", {"head_dim": 12, "sliding_window": 48, "rope_theta": 1e6}, {}),
    "qwen2": ("Qwen2", {"tie_word_embeddings": True, "rope_theta": 1e6}, BF16),
    "qwen2_yarn": ("Qwen2", {"rope_scaling": YARN}, {}),
    "qwen3": ("Qwen3", {"head_dim": 16, "tie_word_embeddings": True}, BF16),
    "olmo2": ("Olmo2", {"rope_theta": 5e5}, SHARDED),
    "gemma": ("Gemma", {"head_dim": 16, "hidden_act": "gelu"}, {}),
    "gpt2": ("GPT2", {"activation_function": "gelu_new"}, {}),
}


def make(name: str, folder: Path) -> None:
    family, changes, saving = MODELS[name]
    sizes = GPT2 if family == "GPT2" else SIZES
    config = getattr(transformers, f"{family}Config")(**{**sizes, **changes})
    head = "LMHeadModel" if family == "GPT2" else "ForCausalLM"
    kind = getattr(transformers, family + head)
    model = kind(config)
    generator = torch.Generator().manual_seed(len(name))
    with torch.no_grad():
        for parameter in model.parameters():  # norms and biases too: none may be left out unseen
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.mul_(parameter.dim() == 1).add_(0.15 * noise)
    saving = dict(saving)
    model.to(saving.pop("dtype", torch.float32)).save_pretrained(folder / name, **saving)
    as_saved = kind.from_pretrained(folder / name, dtype=torch.float32).eval()
    length = min(1500, config.max_position_embeddings)
    tokens = torch.randint(256, (1 if length > 100 else 2, length), generator=generator)
    with torch.no_grad():
        logits = as_saved(tokens).logits
    np.savez(folder / f"{name}.npz", tokens=tokens.numpy(), logits=logits.numpy())


def check(name: str, folder: Path, again: Path) -> None:
    said = np.load(folder / f"{name}.npz")
    model = transformers.AutoModelForCausalLM.from_pretrained(again / name).eval()
    family = {"llama3_long": "Mistral"}.get(name, MODELS[name][0])  # it is general in head_dim
    assert type(model).__name__.startswith(family), type(model)
    with torch.no_grad():
        found = model(torch.from_numpy(said["tokens"])).logits.numpy()
    worst = np.abs(found - said["logits"]).max() / np.abs(said["logits"]).max()
    assert worst < 1e-5, (name, worst)
    print(f"{name} agrees, to {worst:.1e}")


if __name__ == "__main__":
    for name in MODELS:
        {"make": make, "check": check}[sys.argv[1]](name, *map(Path, sys.argv[2:]))
