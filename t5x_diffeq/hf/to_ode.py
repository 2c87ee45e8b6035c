"""Turns a per-layer model into a neural ODE that computes the same on its own grid.

The classical residual block is a step of Lie-Trotter with dt = 1. A step with dt = 1/N computes the
same if the linears that write to the residual stream, the last of attention and MLP, and their
biases are N times as large. The layers are then values of W(t) at t_n = n/N:

    kernel(t) = W0 + P e(t)      bias(t) = P e(t)      scale(t) = 1 + P e(t)

e(t) is a table of its values at the nodes, N orthogonal rows of width T = N. So there are P and W0
that give all layers exactly; least squares in float64 finds them.
"""

from dataclasses import replace

import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict
from jaxtyping import Float
from scipy.fft import dct

from t5x_diffeq.config.config import ModelKeys
from t5x_diffeq.model.config import ModelConfig
from t5x_diffeq.model.ode.weight_source import OFFSET, LeafPath
from t5x_diffeq.model.sub_fields import declared_leaves

Matrix = Float[np.ndarray, "_ _"]


def ode_keys(layers: ModelKeys) -> ModelKeys:
    """`config.model` of the ODE, from `config.model` of the per-layer model."""
    return replace(
        layers,
        weights="time_dependent",
        step_size="1/N",
        time_embed_dim=layers.num_steps,
        attention_time_embed_dim=None,
        time_basis=f"table:{layers.num_steps}",
        init="invariant",
    )


def to_ode(config: ModelConfig, params: dict) -> dict:
    """The ODE's parameters from the per-layer model's, which are removed leaf by leaf."""
    layers, declared = flatten_dict(params["source"]["weights"]), declared_leaves(config)
    del params["source"]
    N = config.num_steps
    table = (np.sqrt(N) * dct(np.eye(N), norm="ortho")).astype(np.float32)
    source: dict[LeafPath, np.ndarray] = {}
    for path in list(layers):
        leaf, has_base = layers.pop(path), declared[path].role == "kernel"
        scale = N if declared[path].writes_residual else 1
        wanted = leaf.reshape(N, -1).astype(np.float64) * scale - OFFSET[declared[path].role]
        P, base = _fit(wanted, table.astype(np.float64), has_base)
        layer, name, shape = ".".join(path[:-1]), path[-1], leaf.shape[1:]
        embedding = () if config.time_embedding == "common" else (layer,)
        source[*embedding, "time_embedding", "coefficients"] = table
        source[layer, name] = P.reshape(-1, *shape).astype(np.float32)
        if has_base:
            source[layer, f"{name}_base"] = base.reshape(shape).astype(np.float32)
    return {**params, "source": unflatten_dict(source)}


def _fit(
    leaf: Matrix, table: Float[np.ndarray, "N T"], has_base: bool
) -> tuple[Float[np.ndarray, "T _"], Float[np.ndarray, " _"]]:
    """P and W0 of least squares; without `has_base`, W0 is zero."""
    middle, means = (x.mean(0) if has_base else np.zeros(x.shape[1]) for x in (leaf, table))
    P = np.linalg.pinv(table - means) @ (leaf - middle)
    return P, middle - means @ P
