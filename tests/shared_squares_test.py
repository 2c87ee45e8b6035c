"""Adam with a mean of squares that layers share."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import small_config

from t5x_diffeq.runtime.config import Config
from t5x_diffeq.training.setup import make_setup

SHARED = "t5x_diffeq.experiments.shared_squares:make"


def directions(name, text, gradients):
    """Of two steps, without clipping, decay and schedule: the second link of the chain alone."""
    config = small_config(text)
    config.model.update(weights="per_layer", num_steps=3)
    config.optimizer.update(name=name, max_grad_norm=1e9, weight_decay=0.0)
    setup = make_setup(Config.of(config), 256, jax.devices()[:1])
    params = jax.tree.map(lambda x: jnp.zeros(x.shape), setup.abstract_state.params)
    state = setup.optimizer.init(params)
    for scale in gradients:
        gradient = jax.tree.map(lambda x, scale=scale: scale(x.shape), params)
        found, state = setup.optimizer.update(
            gradient, state, params, norm=optax.tree.norm(gradient)
        )
    return found


@pytest.mark.slow
def test_layers_share_the_squares_of_their_kernels(text):
    """With gradients 1, 2 and 3 of three layers, moves are as 1 : 2 : 3, not all alike."""

    def gradient(shape):
        by_layer = jnp.arange(1.0, 4.0).reshape(-1, *(1,) * (len(shape) - 1))
        return jnp.broadcast_to(by_layer, shape) if shape[0] == 3 else jnp.ones(shape)

    shared = directions(SHARED, text, [gradient, gradient])
    adam = directions("adam", text, [gradient, gradient])
    weights = shared["source"]["weights"]["attention"]["output"]
    of_adam = adam["source"]["weights"]["attention"]["output"]
    moves = np.asarray(weights["kernel"]).reshape(3, -1)[:, 0]
    np.testing.assert_allclose(moves / moves[0], [1, 2, 3], rtol=1e-4)
    root_mean_square = np.sqrt(np.mean(np.square(moves)))
    np.testing.assert_allclose(root_mean_square, np.abs(of_adam["kernel"]).max(), rtol=1e-4)
    np.testing.assert_allclose(weights["bias"], of_adam["bias"], rtol=1e-4)  # as ever
    table = ("token_embedding", "table")
    np.testing.assert_allclose(shared[table[0]][table[1]], adam[table[0]][table[1]], rtol=1e-4)
