"""A control: per-layer weights whose layers share Adam's mean of squared gradients.

Time-dependent weights have one P for all depths, so Adam scales the step of each of its entries by
what the gradients of all depths have in common. With this optimizer the baseline does so, too:

    --config.optimizer.name=t5x_diffeq.experiments.shared_squares:make
"""

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array

from t5x_diffeq.layers.parameter import Parameter, map_parameters
from t5x_diffeq.runtime.config import OptimizerKeys


def make(optimizer: OptimizerKeys, declared: dict) -> optax.GradientTransformation:
    """Adam's directions, the squares of whose stacked kernels are means over layers.

    Args:
      optimizer: `config.optimizer`.
      declared: the parameters in their boxes, which say what is stacked.
    """
    beta1, beta2, epsilon = optimizer.beta1, optimizer.beta2, optimizer.epsilon
    stacked = map_parameters(_is_stacked, declared)

    def square(g: Array, is_stacked: bool) -> Array:
        squares = jnp.square(g)
        return squares.mean(0, keepdims=True) if is_stacked else squares

    def init(params: dict) -> optax.ScaleByAdamState:
        # In boxes of the parameters' own shapes, so that they are sharded as these are.
        zeros = optax.tree.zeros_like(params)
        return optax.ScaleByAdamState(jnp.zeros((), jnp.int32), zeros, zeros)

    def update(
        gradient: dict, state: optax.ScaleByAdamState, params: dict | None = None
    ) -> tuple[dict, optax.ScaleByAdamState]:
        del params
        count = optax.safe_increment(state.count)
        mean = optax.tree.update_moment(gradient, state.mu, beta1, 1)
        squares = jax.tree.map(
            lambda v, g, is_stacked: beta2 * v + (1 - beta2) * square(g, is_stacked),
            state.nu,
            gradient,
            stacked,
        )
        directions = jax.tree.map(
            lambda m, v: (m / (1 - beta1**count)) / (jnp.sqrt(v / (1 - beta2**count)) + epsilon),
            mean,
            squares,
        )
        return directions, optax.ScaleByAdamState(count, mean, squares)

    return optax.GradientTransformation(init, update)


def _is_stacked(leaf: Parameter) -> bool:
    return leaf.role == "kernel" and leaf.names[0] == "steps"
