"""Norms of weights over depth: those of the gradient of W(t) come with the train step."""

from collections import defaultdict

import jax.numpy as jnp
from flax.traverse_util import flatten_dict
from jaxtyping import Array, Float

from t5x_diffeq.model.layers.array_types import Weights
from t5x_diffeq.model.ode.weight_source import layer_name

Curves = dict[str, Float[Array, " n"]]


def norms(weights: Weights) -> Curves:
    """The norm of each layer at each node: leaves `[nodes, ...]` become `[nodes]` by layer."""
    squares: dict[str, Array] = defaultdict(lambda: jnp.zeros(()))
    for path, leaf in flatten_dict(weights).items():
        kernel = tuple(range(1, leaf.ndim))
        squares[layer_name(path[:-1])] += jnp.square(leaf.astype(jnp.float32)).sum(kernel)
    return {layer: jnp.sqrt(square) for layer, square in squares.items()}


def watch_gradient(d_weights: Weights, every: int | None) -> Curves:
    """The norms of the gradient of W(t_n); {} if no step is watched.

    They belong to every step's program, not to a branch for the steps to watch: in a branch, XLA's
    CPU devices of several processes sometimes waited for each other's sums without end.
    """
    return {} if every is None else named("gradient", norms(d_weights))


def named(kind: str, of_layers: Curves) -> Curves:
    """`KIND/LAYER` for each layer."""
    return {f"{kind}/{layer}": curve for layer, curve in of_layers.items()}
