"""Which parameters change W(t) = W0 + P e(t) in an optimizer step, and how much.

With the changes D of the step, e before it and P after it,

    D W(t_n) = D W0 + (D P) e(t_n) + P D e(t_n)

exactly. The share of a part is <part, D W> / <D W, D W>, over all leaves of a layer at a node; the
three shares sum to 1. That of e is what the learned time embedding does: it moves W(t) at all nodes
within the directions that P has, as the layers of a per-layer model can't.
"""

from collections import defaultdict
from typing import NamedTuple

import jax.numpy as jnp
from flax.traverse_util import flatten_dict
from jaxtyping import Array, Float

from t5x_diffeq.layers.array_types import Weights
from t5x_diffeq.models.config import ModelConfig
from t5x_diffeq.models.sub_fields import block_of_shapes
from t5x_diffeq.ode.contraction import contract
from t5x_diffeq.ode.weights import (
    Embeddings,
    LeafPath,
    block_parameters,
    layer_name,
    offset_path,
)

Shares = dict[str, Float[Array, " nodes"]]


class Makers(NamedTuple):
    """What is kept of the parameters before a step, beside the weights that they make.

    Attributes:
      embeddings: e(t) at the nodes, by layer.
      offsets: W0 of each kernel, by its path in the source's parameters.
    """

    embeddings: Embeddings
    offsets: dict[LeafPath, Array]


def makers_of(config: ModelConfig, source: dict, embeddings: Embeddings) -> Makers:
    """What `update_shares` needs of the source's parameters before a step."""
    leaves, kept = flatten_dict(source), {}
    for path in _leaves_of(config):
        layer = layer_name(path[:-1])
        offset = offset_path((layer, path[-1]))
        if offset in leaves:
            kept[offset] = leaves[offset]
    return Makers(embeddings, kept)


def update_shares(
    config: ModelConfig, change: Weights, before: Makers, source: dict, embeddings: Embeddings
) -> Shares:
    """The shares of W0, P and e in a change, as `W0/LAYER`, `P/LAYER` and `e/LAYER` at each node.

    They are 0 where nothing changes.

    Args:
      config: the model's config.
      change: D W at the nodes.
      before: of the parameters before the step.
      source: the source's parameters after it.
      embeddings: e(t) after it.
    """
    changes, leaves = flatten_dict(change), flatten_dict(source)
    products: dict[str, dict[str, Array]] = defaultdict(lambda: defaultdict(lambda: jnp.zeros(())))
    for path, names in _leaves_of(config).items():
        layer, dW = layer_name(path[:-1]), changes[path]
        de = embeddings[layer] - before.embeddings[layer]
        offset = offset_path((layer, path[-1]))
        d_offset = leaves[offset] - before.offsets[offset] if offset in leaves else 0 * dW[0]
        parts = {"W0": d_offset, "e": contract(de, leaves[layer, path[-1]], names, jnp.float32)}
        axes = tuple(range(1, dW.ndim))
        for part, value in {**parts, "all": dW}.items():
            products[part][layer] += (value * dW).sum(axes)
    whole = products.pop("all")
    shares = {
        part: {layer: of[layer] / jnp.maximum(whole[layer], 1e-30) for layer in whole}
        for part, of in products.items()
    }
    shares["P"] = {
        layer: jnp.where(square > 0, 1 - shares["W0"][layer] - shares["e"][layer], 0)
        for layer, square in whole.items()
    }
    return {f"{part}/{layer}": x for part, of in shares.items() for layer, x in of.items()}


def _leaves_of(config: ModelConfig) -> dict[LeafPath, tuple[str | None, ...]]:
    """The logical axes of the block's parameters, by path."""
    block = block_of_shapes(config)
    return {
        path: leaf.names for path, leaf in block_parameters(block, block.input_shapes()).items()
    }
