"""Small models for tests: of random parameters, and the official implementation's."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import unflatten_dict
from helpers import ROOT

from t5x_diffeq.models.config import ModelConfig
from t5x_diffeq.models.language_model import LanguageModel
from t5x_diffeq.training.partitioning import unbox

SMALL = ModelConfig(
    architecture="gpt",
    weights="time_dependent",
    scheme="euler",
    step_size="1/N",
    num_steps=3,
    embed_dim=16,
    num_heads=4,
    num_kv_heads=None,
    head_dim=None,
    mlp_dim=24,
    activation=None,
    time_embed_dim=5,
    num_frequencies=4,
    time_scale=1000.0,
    time_embedding="per_layer",
    init="invariant",
    norm_eps=1e-5,
    final_norm_eps=1e-5,
    norm_shift=False,
    mlp_input="state",
    norm_position="before",
    qkv_bias=False,
    qk_norm="none",
    rotary_base=10_000.0,
    rotary_scaling=(),
    tied_head=False,
    embedding_scale=1.0,
    dropout_rate=0.0,
    adapter_rank=0,
    adapter_alpha=16.0,
    adapter_kernels=(),
    vocab_size=50,
    dtype="float32",
    state_dtype="float32",
    remat="none",
    attention="xla",
    max_length=10,
)
TOKENS = jnp.asarray(np.random.default_rng(0).integers(0, 50, (2, 10)), jnp.int32)
LLAMA = {"architecture": "llama", "num_kv_heads": 2}


def small(**changes):
    return LanguageModel(dataclasses.replace(SMALL, **changes))


def random_params(model, seed=0, scale=0.3):
    """Every leaf random, so that none hides behind a zero or a one."""
    declared = jax.eval_shape(model.init, jax.random.key(0), TOKENS)["params"]
    rng = np.random.default_rng(seed)
    return jax.tree.map(
        lambda x: jnp.asarray(scale * rng.normal(size=x.shape), jnp.float32), unbox(declared)
    )


GOLDEN = ROOT / "tests" / "golden"
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


def gpt_params(arrays, kind):
    """`param` or `grad` arrays of the official GPT as our tree; `[D, T]` leaves transposed."""
    flat = {}
    for theirs, ours in LAYERS.items():
        for leaf, path in LEAVES.items():
            name = f"{kind}/transformer.block.{theirs}.{leaf}"
            if name in arrays:
                value = arrays[name]
                flat["source", ours, *path] = value.T if path[0] in ("scale", "shift") else value
    flat["final_norm", "scale"] = arrays[f"{kind}/transformer.ln_f.weight"]
    flat["final_norm", "shift"] = arrays[f"{kind}/transformer.ln_f.bias"]
    flat["token_embedding", "table"] = pad_table(arrays[f"{kind}/embeddings.token_embeddings"])
    flat["position_embedding", "table"] = arrays[f"{kind}/embeddings.position_embeddings"]
    return jax.tree.map(jnp.asarray, unflatten_dict(flat))
