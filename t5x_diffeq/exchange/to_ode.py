"""Turns a per-layer model into a neural ODE that computes the same on the model's grid.

The classical residual block is a step of Lie-Trotter with dt = 1. With dt = 1/N it is the same if
what writes to the residual stream, the last linears of attention and MLP with their biases, is N
times as large. The layers are then values of W(t) at t_n = n/N. They are interpolated by

    kernel(t) = W0 + P e(t)      bias(t) = P e(t)      scale(t) = 1 + P e(t)

with P of minimum norm and W0 the mean over the layers, computed in float64. A time embedding of
fewer entries than there are layers can't interpolate them all; `low_rank` approximates them.
"""

from dataclasses import replace

import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict
from jaxtyping import Float

from t5x_diffeq.exchange.layouts import declared_leaves
from t5x_diffeq.exchange.time_basis import (
    FREQUENCIES,
    TIME_SCALE,
    TimeBasis,
    make_time_basis,
    smooth_frequencies,
)
from t5x_diffeq.models.config import ModelConfig
from t5x_diffeq.ode.time_features import SINUSOIDS
from t5x_diffeq.ode.weights import OFFSET
from t5x_diffeq.runtime.config import ModelKeys

_EMBEDDING = "time_embedding"  # its name in each generated layer, or beside all of them


def ode_keys(layers: ModelKeys, width: int | None) -> ModelKeys:
    """`config.model` of the ODE.

    Args:
      layers: `config.model` of the per-layer model.
      width: T; None for the number of layers.
    """
    num_layers = layers.num_steps
    width = num_layers if width is None else width
    exact = (FREQUENCIES, TIME_SCALE)
    frequencies, scale = exact if width >= num_layers else smooth_frequencies(num_layers)
    return replace(
        layers,
        weights="time_dependent",
        step_size="1/N",
        time_embed_dim=width,
        attention_time_embed_dim=None,
        time_basis=SINUSOIDS,
        num_frequencies=frequencies,
        time_scale=scale,
        init="invariant",
    )


def to_ode(config: ModelConfig, params: dict) -> tuple[dict, TimeBasis]:
    """Parameters of the ODE from those of the per-layer model, and its time embedding.

    Args:
      config: config of the ODE, with T of at least the number of layers.
      params: parameters of the per-layer model; its stacked weights are removed, leaf by leaf.

    Raises:
      InputError: if no time embedding is well conditioned for its layers.
    """
    basis = make_time_basis(config.num_steps, config.time_embed_dim)
    inverse = np.linalg.pinv(basis.at_nodes)
    declared, layers = declared_leaves(config), flatten_dict(params["source"]["weights"])
    source: dict[tuple[str, ...], np.ndarray] = {}
    for path in list(layers):
        leaf, role = layers.pop(path), declared[path].role
        scale = config.num_steps if declared[path].writes_residual else 1
        layer, name = ".".join(path[:-1]), path[-1]
        source[layer, name], base = _fit(leaf, scale, OFFSET[role], role == "kernel", inverse)
        if base is not None:
            source[layer, f"{name}_base"] = base
        if config.time_embedding == "separate":
            source |= {(layer, _EMBEDDING, k): value for k, value in basis.parameters.items()}
    if config.time_embedding == "common":
        source |= {(_EMBEDDING, k): value for k, value in basis.parameters.items()}
    return {**params, "source": unflatten_dict(source)}, basis


def _fit(
    leaf: Float[np.ndarray, "N ..."],
    scale: float,
    offset: float,
    has_base: bool,
    inverse: Float[np.ndarray, "T N"],
) -> tuple[Float[np.ndarray, "T ..."], Float[np.ndarray, "..."] | None]:
    """Solves `offset + W0 + e(t_n) P = scale * leaf_n` for P of minimum norm, and W0 if any.

    Args:
      leaf: the leaf of all layers.
      scale: factor on the leaf.
      offset: value of the leaf where W0 and P are zero.
      has_base: whether there is a W0.
      inverse: pseudo-inverse of e at the nodes.
    """
    wanted = leaf.astype(np.float64) * scale - offset
    base = wanted.mean(0).astype(np.float32) if has_base else None
    rest = wanted if base is None else wanted - base  # W0 as stored: P makes up for its rounding
    P = inverse @ rest.reshape(len(rest), -1)
    return P.reshape(-1, *rest.shape[1:]).astype(np.float32), base
