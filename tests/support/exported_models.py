"""Small models with random weights, of each kind that is exported, and what ours say of them."""

import json
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
from chats import with_dummy_prefix
from helpers import setup_of
from safetensors.numpy import load_file, save_file

from configs import default
from t5x_diffeq.config.config import Config
from t5x_diffeq.data.file_tokenizers import HuggingFaceTokenizer, SentencePieceTokenizer
from t5x_diffeq.data.tokenizer import ByteTokenizer
from t5x_diffeq.hf.save_pretrained import save_pretrained
from t5x_diffeq.inference.sampling import Sampling, generate
from t5x_diffeq.training.load import Run

LENGTH = 24
TEXTS = [
    "def f(x):\n    return x + 12  # twelve\n\n\n",
    "\tTabs, \r\nand  two spaces ",
    "日本語 😀 naïve\n",
    " begins with a space",
]
CLASSIC = {"scheme": "lie_trotter", "weights": "per_layer", "step_size": "1"}
LLAMA = {"architecture": "llama", "num_heads": 4, "num_kv_heads": 2}
OFFICIAL = {"norm_shift": True, "mlp_input": "attention_norm", "norm_eps": 1e-6}
LLAMA3 = ("llama3", 8.0, 1.0, 4.0, 16.0)
OLMO2 = {"qk_norm": "projection", "norm_position": "after"}
GEMMA = {"activation": "gelu", "embedding_scale": 4.0, "tied_head": True, "head_dim": 8}
REST = {"qkv_bias": True, "rope_scaling": ("yarn", 4.0, 32.0, 1.0, 12.0, 1.1)}

# Name: changes of the config, and the tokenizer's kind.
MODELS = {
    "llama": ({**LLAMA, **CLASSIC}, "sentencepiece"),
    "gpt": (CLASSIC, "json"),
    "llama_lie_trotter_ode": ({**LLAMA, "scheme": "lie_trotter"}, "bytes"),
    "gpt_relu": ({**CLASSIC, "activation": "relu"}, "bytes"),
    "gpt_relu_euler_ode": ({"activation": "relu"}, "bytes"),
    "gpt_shared": ({"weights": "shared", "scheme": "lie_trotter"}, "bytes"),
    "gpt_euler_ode": ({}, "bytes"),
    "gpt_long_state_ode": (
        {"embedding_scale": 8.0, "position_scale": 8.0, "time_basis": "legendre:4"},
        "bytes",
    ),
    "gpt_two_epsilons": ({**CLASSIC, "norm_eps": 1e-6}, "bytes"),
    "llama_euler_ode": ({**LLAMA, "num_steps": 5}, "sentencepiece"),
    "llama_official_ode": ({**LLAMA, **OFFICIAL}, "prefixed"),
    "olmo2_ode": ({**LLAMA, **OLMO2, "scheme": "lie_trotter", "rope_theta": 5e5}, "bytes"),
    "llama_of_all_euler_ode": ({**LLAMA, **OLMO2, **GEMMA, **REST}, "bytes"),
    "gpt_olmo2_euler_ode": (OLMO2, "bytes"),
}

# Likewise, of the library's other classes.
OTHER_CLASSES = {
    "mistral": ({**LLAMA, **CLASSIC, "head_dim": 6, "rope_scaling": ("linear", 2.0)}, "bytes"),
    "qwen2": ({**LLAMA, **CLASSIC, "qkv_bias": True, "tied_head": True}, "bytes"),
    "qwen3": ({**LLAMA, **CLASSIC, "qk_norm": "head", "rope_scaling": LLAMA3}, "bytes"),
    "gemma": ({**LLAMA, **CLASSIC, **GEMMA}, "bytes"),
}

LORA = {"weights": "per_layer", "adapter_rank": 3, "adapter_alpha": 5.0}
ADAPTED = {
    "llama_lora": ({**LLAMA, **CLASSIC, **LORA}, "bytes"),
    "gpt_lora_of_two": ({**CLASSIC, **LORA, "adapter_kernels": ("qkv", "down")}, "bytes"),
    "gpt_lora_of_small_steps": ({**CLASSIC, **LORA, "step_size": "1/N"}, "bytes"),
    "llama_lora_of_an_ode": ({**LLAMA, **LORA}, "bytes"),
}


@cache
def tokenizer_of(kind):
    if kind == "bytes":
        return ByteTokenizer()
    if kind == "json":
        import tokenizers

        bpe = tokenizers.ByteLevelBPETokenizer()
        bpe.train_from_iterator(TEXTS * 20, vocab_size=300, special_tokens=["<|endoftext|>"])
        return HuggingFaceTokenizer(bpe.to_str().encode())
    model = SentencePieceTokenizer.train(TEXTS * 20, 320).model
    return SentencePieceTokenizer(with_dummy_prefix(model) if kind == "prefixed" else model)


def random_run(model):
    """A run with random weights, its tokenizer and its config.

    Every parameter is random, norms and biases too, so that none can be left out unseen.
    """
    changes, kind = model
    tokenizer = tokenizer_of(kind)
    config = default.get_config()
    config.model.update(
        num_steps=3,
        embed_dim=16,
        num_heads=2,
        mlp_dim=40,
        time_embed_dim=4,
        num_frequencies=4,
        dropout_rate=0.1,
        remat="none",
    )
    config.model.update(changes)
    config.data.sequence_length = LENGTH
    config.train.batch_size = 1
    setup = setup_of(config, tokenizer.vocab_size, devices=jax.devices()[:1])
    random = np.random.default_rng(0)
    params = jax.tree_util.tree_map_with_path(
        lambda path, x: jnp.asarray(
            0.2 * random.standard_normal(x.shape, np.float32) + (is_norm_of_layers(path))
        ),
        setup.abstract_state.params,
    )
    return Run(setup, params, step=7), tokenizer, Config.of(config)


def is_norm_of_layers(path):
    """Whether a parameter is a norm's scale itself, and not the P that makes one."""
    names = [entry.key for entry in path]
    return names[-1] == "scale" and ("weights" in names or "final_norm" in names)


def logits_of(run, tokens):
    """`[B, L, vocabulary]`, without the padding."""
    model = run.placed.model
    logits = jax.jit(model.apply)({"params": run.params}, jnp.asarray(tokens))
    return np.asarray(logits)[..., : model.config.vocab_size]


def record_outputs(run, tokenizer):
    """Logits of random tokens, greedy continuations of prompts, and the tokens of `TEXTS`."""
    random = np.random.default_rng(1)
    tokens = random.integers(tokenizer.vocab_size, size=(2, LENGTH))
    prompts = [tokens[0, :4].tolist(), tokens[1, :9].tolist()]
    continued = [
        [int(token[0]) for token in greedy(run, prompt, LENGTH - len(prompt))] for prompt in prompts
    ]
    bytes_alone = isinstance(tokenizer, ByteTokenizer)
    return {
        "tokens": tokens.tolist(),
        "logits": logits_of(run, tokens).tolist(),
        "prompts": prompts,
        "continued": continued,
        "texts": {t: ids.tolist() for t, ids in zip(TEXTS, tokenizer.encode(TEXTS), strict=True)},
        "end_of_text": None if bytes_alone else tokenizer.end_of_text,
    }


def greedy(run, prompt, count):
    sampling, key = Sampling(temperature=0), jax.random.key(0)
    return generate(run.placed.model, run.params, [prompt], count, sampling, key)


def export_model(model, folder, reports=(), **how):
    """Exports a run with random weights to a folder: the run, and the summary of the export."""
    run, tokenizer, as_run = random_run(model)
    return run, save_pretrained(run, as_run, tokenizer, list(reports), folder, **how)


def save_model(name, folder):
    return export_model((MODELS | OTHER_CLASSES)[name], folder)[0]


def rewrite(folder, change):
    """The folder's tensors, by name, after `change`."""
    path = folder / "model.safetensors"
    save_file(change(load_file(path)), path, metadata={"format": "pt"})


def reword(folder, **changes):
    """The folder's config.json with changes."""
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
