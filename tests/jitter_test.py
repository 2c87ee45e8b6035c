"""Training between the nodes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import train_keys
from small_models import TOKENS, random_params, small

from t5x_diffeq.models.language_model import LanguageModel, nodes
from t5x_diffeq.runtime.config import Config
from t5x_diffeq.runtime.errors import InputError
from t5x_diffeq.training.gradient import batch_losses, make_gradient
from t5x_diffeq.training.jitter import check_jitter, move_nodes

KEY = jax.random.key(3)
BATCH = {
    "inputs": TOKENS[:, :-1],
    "targets": TOKENS[:, 1:],
    "mask": jnp.asarray(np.random.default_rng(0).random((2, 9)), jnp.float32),
}


@pytest.mark.parametrize("jitter", [0.5, 1.0])
def test_nodes_move_within_their_intervals(jitter):
    grid = np.array([0, 0.25, 0.5, 1], np.float32)
    moved = np.stack([move_nodes(grid, jitter, jax.random.key(n)) for n in range(200)])
    back = (grid[1:] - moved[:, 1:]) / np.diff(grid)
    assert (moved[:, 0] == 0).all()
    assert (back >= 0).all() and (back <= jitter).all()
    np.testing.assert_allclose(back.mean(0), jitter / 2, atol=0.1 * jitter)
    assert (np.diff(moved) > 0).all()


def gradient(model, params, jitter, microbatches=1, depths=None):
    keys = train_keys(jitter=jitter, microbatches=microbatches)
    of_batch = make_gradient(model, lambda part: True, keys, depths)
    return jax.jit(of_batch)(params, BATCH, KEY)


def agree(found, expected):
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, atol=2e-5 * np.abs(b).max() + 1e-9),
        found,
        expected,
    )


@pytest.mark.parametrize("scheme", ["euler", "heun"])
def test_the_gradient_is_that_at_the_moved_nodes(scheme):
    """Also where two steps share a node: both read it at one time."""
    model = small(time_basis="chebyshev:4", scheme=scheme)
    params = random_params(model)
    grid, place = np.unique(nodes(model.config), return_inverse=True)
    times = move_nodes(grid, 1.0, KEY)[place]

    def loss(params):
        weights = model.apply({"params": params}, times, method=LanguageModel.weights)
        losses = batch_losses(model, params, BATCH, 32, weights).losses
        return (losses * BATCH["mask"]).sum() / BATCH["mask"].sum()

    found = gradient(model, params, 1.0)
    value, expected = jax.jit(jax.value_and_grad(loss))(params)
    np.testing.assert_allclose(found.means["loss"], value, rtol=1e-5)
    agree(found.gradient, expected)
    assert abs(found.means["loss"] - gradient(model, params, 0.0).means["loss"]) > 1e-4


def test_microbatches_share_the_times():
    model = small(time_basis="splines:4")
    params = random_params(model)
    agree(gradient(model, params, 0.7, microbatches=2)[:3], gradient(model, params, 0.7)[:3])


def test_grids_share_their_common_nodes():
    """With depths 1 and 3, e(t) comes at three times: 1/3, 2/3 and 1 have moved, 1 for both."""
    model = small(time_basis="table:3")
    params = random_params(model)
    found = gradient(model, params, 1.0, depths=(1, 3))
    times = move_nodes(np.array([1, 2, 3], np.float32) / 3, 1.0, KEY)
    _, expected = model.apply({"params": params}, times, method="weights_and_embeddings")
    agree(found.embeddings, expected)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"model.weights": "shared"}, "model.weights=shared has no W"),
        ({"optimizer.moments": "factored"}, "moments=factored keeps gradients; take int8"),
    ],
    ids=str,
)
def test_what_it_needs(small, keys, message):
    small.update_from_flattened_dict({"train.jitter": 0.5, **keys})
    with pytest.raises(InputError, match=message):
        check_jitter(Config.of(small))
