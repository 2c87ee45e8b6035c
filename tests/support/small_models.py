"""Small models for tests: of random parameters, and the official implementation's."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import unflatten_dict
from helpers import SUPPORT

from t5x_diffeq.config.config import ModelKeys
from t5x_diffeq.model.config import ModelConfig
from t5x_diffeq.model.language_model import LanguageModel
from t5x_diffeq.training.partitioning import unbox

SMALL = ModelConfig.of(
    ModelKeys(
        num_steps=3,
        embed_dim=16,
        num_heads=4,
        mlp_dim=24,
        time_embed_dim=5,
        num_frequencies=4,
        remat="none",
        attention="xla",
    ),
    vocab_size=50,
    max_length=10,
)
TOKENS = jnp.asarray(np.random.default_rng(0).integers(0, 50, (2, 10)), jnp.int32)
LLAMA = {"architecture": "llama", "num_kv_heads": 2}
EVERY_OPTION = {  # of llama, at once
    **LLAMA,
    "head_dim": 6,
    "qkv_bias": True,
    "qk_norm": "projection",
    "norm_position": "after",
    "rope_theta": 500.0,
    "rope_scaling": ("yarn", 4.0, 2.0, 0.5, 16.0, 1.1),
    "activation": "gelu",
    "tied_head": True,
    "embedding_scale": 4.0,
}


def small(**changes):
    return LanguageModel(dataclasses.replace(SMALL, **changes))


def uneven_batch(rng, rows):
    """Rows of unequal weight: a mean of the means of microbatches would be another loss."""
    tokens = rng.integers(0, 50, (rows, 11))
    scored = rng.random((rows, 10)) < np.linspace(0.1, 1, rows)[:, None]
    return {
        "inputs": jnp.asarray(tokens[:, :-1], jnp.int32),
        "targets": jnp.asarray(tokens[:, 1:], jnp.int32),
        "mask": jnp.asarray(scored, jnp.float32),
    }


def random_params(model, seed=0, scale=0.3):
    """Every leaf random, so that none hides behind a zero or a one."""
    declared = jax.eval_shape(model.init, jax.random.key(0), TOKENS)["params"]
    rng = np.random.default_rng(seed)
    return jax.tree.map(
        lambda x: jnp.asarray(scale * rng.normal(size=x.shape), jnp.float32), unbox(declared)
    )


GOLDEN = SUPPORT / "golden"
GPT_ODE = dataclasses.replace(
    SMALL,
    num_steps=6,
    embed_dim=32,
    mlp_dim=128,
    time_embed_dim=12,
    num_frequencies=16,
    vocab_size=97,
    max_length=16,
)
LAYERS = {  # of the official GPT: ours
    "attn.c_attn": "attention.qkv",
    "attn.c_proj": "attention.output",
    "mlp.c_fc": "mlp.up",
    "mlp.c_proj": "mlp.down",
    "attn_ln": "attention_norm",
    "mlp_ln": "mlp_norm",
}
LEAVES = {
    "lin1.weight": ("time_embedding", "hidden_kernel"),
    "lin1.bias": ("time_embedding", "hidden_bias"),
    "lin2.weight": ("time_embedding", "output_kernel"),
    "lin2.bias": ("time_embedding", "output_bias"),
    "f_W.weight": ("kernel",),
    "f_W.bias": ("kernel_base",),
    "f_b": ("bias",),
    "f_weight": ("scale",),
    "f_bias": ("shift",),
}


def load(name):
    return dict(np.load(GOLDEN / name))


def pad_table(table):
    return np.pad(table, ((0, 128 - len(table)), (0, 0)))


def ode_layers(arrays, kind, layers):
    """`param` or `grad` arrays of an official ODE's block; `[D, T]` leaves transposed."""
    flat = {}
    for theirs, ours in layers.items():
        for leaf, path in LEAVES.items():
            name = f"{kind}/transformer.block.{theirs}.{leaf}"
            if name in arrays:
                value = arrays[name]
                flat["source", ours, *path] = value.T if path[0] in ("scale", "shift") else value
    return flat


def gpt_ends(arrays, kind):
    """The leaves of an official GPT outside its block or layers."""
    return {
        ("final_norm", "scale"): arrays[f"{kind}/transformer.ln_f.weight"],
        ("final_norm", "shift"): arrays[f"{kind}/transformer.ln_f.bias"],
        ("token_embedding", "table"): pad_table(arrays[f"{kind}/embeddings.token_embeddings"]),
        ("position_embedding", "table"): arrays[f"{kind}/embeddings.position_embeddings"],
    }


def gpt_params(arrays, kind):
    """`param` or `grad` arrays of the official GPT as our tree."""
    flat = {**ode_layers(arrays, kind, LAYERS), **gpt_ends(arrays, kind)}
    return jax.tree.map(jnp.asarray, unflatten_dict(flat))
