"""In bfloat16 every leaf of the gradient is that of float32, whatever a token's count."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.traverse_util import flatten_dict
from language_model_test import SMALL, small

from t5x_diffeq.training.gradient import make_gradient
from t5x_diffeq.training.partitioning import sharded, unbox

SHAPES = {
    "num_steps": 4,
    "embed_dim": 32,
    "num_heads": 2,
    "mlp_dim": 64,
    "time_embed_dim": 6,
    "vocab_size": 120,
    "max_length": 64,
}
BASELINE = {"weights": "per_layer", "scheme": "lie_trotter", "step_size": "1"}
SOURCES = {"time_dependent": {}, "shared": {"weights": "shared"}, "per_layer": BASELINE}
RULES = (
    ("batch", ("data", "fsdp")),
    ("embed", "fsdp"),
    ("vocab", "tensor"),
    ("heads", "tensor"),
    ("mlp", "tensor"),
)
TOLERANCE = 0.02  # norm of the difference over norm of the reference


def batch(tokens):
    tokens = jnp.asarray(tokens, jnp.int32)
    mask = jnp.ones((len(tokens), tokens.shape[1] - 1), jnp.float32)
    return {"inputs": tokens[:, :-1], "targets": tokens[:, 1:], "mask": mask}


def batches():
    """4096 tokens each: of Zipf's counts, the first 770 of them; and one token, 3 in 4 times."""
    rng = np.random.default_rng(0)
    counts = 1 / np.arange(1, 121)
    zipf = rng.choice(120, p=counts / counts.sum(), size=(64, 65))
    repeated = np.where(rng.random((64, 65)) < 0.75, 7, zipf)
    return {"zipf": batch(zipf), "repeated": batch(repeated)}


BATCHES = batches()


@functools.cache
def gradients(dtype, architecture, source, microbatches=1, mesh=None, **changes):
    """The gradient on each batch, by leaf."""
    model = small(**SHAPES, **SOURCES[source], architecture=architecture, dtype=dtype, **changes)
    params = unbox(model.init(jax.random.key(1), BATCHES["zipf"]["inputs"][:1])["params"])
    of_batch = make_gradient(
        model, trains=lambda part: True, microbatches=microbatches, loss_chunk=256, z_loss=0.0
    )
    key = jax.random.key(0)
    if mesh is None:
        compiled = jax.jit(of_batch)
        found = {name: compiled(params, each, key) for name, each in BATCHES.items()}
    else:
        axis_types = (jax.sharding.AxisType.Auto,) * 3
        devices = jax.make_mesh(mesh, ("data", "fsdp", "tensor"), axis_types=axis_types)
        with sharded(devices, RULES):
            compiled = jax.jit(of_batch)
            found = {name: compiled(params, each, key) for name, each in BATCHES.items()}
    return {
        (name, *path): np.asarray(leaf)
        for name, (gradient, _, _) in found.items()
        for path, leaf in flatten_dict(gradient).items()
    }


def errors(found, expected):
    return {
        "/".join(path): float(np.linalg.norm(found[path] - leaf) / np.linalg.norm(leaf))
        for path, leaf in expected.items()
    }
