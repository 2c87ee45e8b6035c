"""The parameter and the solver step at which values stop being finite."""

import jax
import jax.numpy as jnp
import pytest
from flax.traverse_util import flatten_dict, unflatten_dict
from helpers import setup_of, small_config

from configs import default
from t5x_diffeq.training.hooks.spike_hook import find_cause


@pytest.fixture(scope="module")
def baseline(text):
    """The setup of a baseline of three layers, its parameters and a batch."""
    config = default.set_variant(small_config(text), "baseline")
    config.model.num_steps = 3
    config.mesh.fsdp = 1
    setup = setup_of(config)
    with setup.context():
        params = setup.init_state().params
    tokens = jnp.ones((8, 16), jnp.int32)
    places = {"segments": jnp.zeros_like(tokens), "positions": jnp.arange(16) + 0 * tokens}
    return setup, params, {"inputs": tokens, "targets": tokens, "mask": jnp.ones((8, 16)), **places}


def change(params, path, layer, factor):
    """The parameters with the entries of one leaf of one layer multiplied."""
    flat = flatten_dict(params, sep="/")
    leaf = flat[f"source/weights/{path}"].at[layer].multiply(factor)
    return unflatten_dict({**flat, f"source/weights/{path}": leaf}, sep="/")


@pytest.mark.parametrize(
    ("path", "factor", "cause"),
    [
        ("mlp/up/kernel", jnp.nan, "source/weights/mlp/up/kernel of the parameters isn't finite"),
        ("mlp/down/kernel", 1e38, "g (the MLP) isn't finite in solver step 2 of 3"),
        ("attention/output/kernel", 1e38, "f (attention) isn't finite in solver step 2 of 3"),
    ],
)
def test_the_cause_is_named(baseline, path, factor, cause):
    setup, params, batch = baseline
    with setup.context():
        found = find_cause(setup, change(params, path, 1, factor), batch)
    assert found == cause


@pytest.mark.slow
def test_of_a_batch_that_is_not_finite_the_gradient_is_named(baseline):
    setup, params, batch = baseline
    with setup.context():
        assert find_cause(setup, params, batch) is None
        bad = {**batch, "mask": batch["mask"] * jnp.nan}
        assert "all states are finite, but the gradient of" in find_cause(setup, params, bad)
    assert all(jnp.isfinite(x).all() for x in jax.tree.leaves(params))
