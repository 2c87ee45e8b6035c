"""Layers approximated by fewer functions of time: as well as any, and measured rightly."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from exported_models import CLASSIC, LENGTH, LLAMA, logits_of, random_run
from flax.traverse_util import flatten_dict

from t5x_diffeq.exchange.layouts import declared_leaves
from t5x_diffeq.exchange.low_rank import LeafFit, errors_by_kind, fit_layers
from t5x_diffeq.exchange.time_basis import smooth_frequencies, smooth_time_embedding
from t5x_diffeq.exchange.to_ode import ode_keys
from t5x_diffeq.models.config import ModelConfig
from t5x_diffeq.models.language_model import LanguageModel
from t5x_diffeq.ode.time_embedding import TimeEmbedding
from t5x_diffeq.ode.time_features import time_features
from t5x_diffeq.ode.weights import OFFSET

TOKENS = np.random.default_rng(1).integers(256, size=(2, LENGTH))
STEPS, WIDTH = 6, 3


def fit(changes, width=WIDTH, change=lambda weights: weights):
    """A random model of 6 layers, after `change`; its ODE's config and parameters, and the fits."""
    run, _, _ = random_run(({**CLASSIC, "num_steps": STEPS, **changes}, "bytes"))
    run.params["source"]["weights"] = jax.tree.map(
        np.asarray, change(run.params["source"]["weights"])
    )
    keys = ode_keys(run.placed.config.model, width)
    config = ModelConfig.of(keys, run.placed.model.config.vocab_size, LENGTH)
    config, _ = config.with_attention_for("cpu")
    params, fits = fit_layers(config, dict(run.params))
    return run, config, jax.tree.map(jnp.asarray, params), fits


def wanted_leaves(run, config):
    """Each leaf of the layers as a matrix, as the ODE should have it, by path."""
    declared = declared_leaves(config)
    return {
        path: np.asarray(leaf, np.float64).reshape(STEPS, -1)
        * (STEPS if declared[path].writes_residual else 1)
        for path, leaf in flatten_dict(run.params["source"]["weights"]).items()
    }


def found_leaves(config, params):
    model = LanguageModel(config)
    weights = jax.jit(lambda p: model.apply({"params": p}, method="weights"))(params)
    return {
        path: np.asarray(leaf, np.float64).reshape(STEPS, -1)
        for path, leaf in flatten_dict(weights).items()
    }


def least_squares_of(wanted, role, rank):
    """The squares of the error of the truncated SVD, of the centred kernel or the leaf's change."""
    rest = wanted - wanted.mean(0) if role == "kernel" else wanted - OFFSET[role]
    return np.square(np.linalg.svd(rest, compute_uv=False)[rank:]).sum()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changes", "factor"), [(LLAMA, 1.001), ({}, 1.05), ({"time_embedding": "common"}, np.inf)]
)
def test_errors_are_the_weights_own_and_the_least(changes, factor):
    """The squares are at most `factor` times those of the truncated SVD.

    Where an e(t) is for one leaf alone, as each of Llama's, the two are equal. GPT's kernels share
    it with the much smaller biases.
    """
    run, config, params, fits = fit(changes)
    wanted, found, declared = (
        wanted_leaves(run, config),
        found_leaves(config, params),
        declared_leaves(config),
    )
    assert fits.keys() == wanted.keys()
    for path, of_leaf in fits.items():
        squares = np.square(found[path] - wanted[path]).sum()
        role, whole = declared[path].role, np.square(wanted[path]).sum()
        least = least_squares_of(wanted[path], role, WIDTH)
        np.testing.assert_allclose(of_leaf.whole, whole, rtol=1e-5)
        np.testing.assert_allclose(of_leaf.reached, squares, rtol=1e-3)
        np.testing.assert_allclose(of_leaf.least, least, rtol=1e-3)
        assert 0.999 * least < squares < np.square(wanted[path] - OFFSET[role]).sum()
        if role == "kernel" or changes == LLAMA:
            assert squares < factor * least


@pytest.mark.slow
@pytest.mark.parametrize("time_embedding", ["separate", "common"])
@pytest.mark.parametrize("architecture", [LLAMA, {}], ids=["llama", "gpt"])
def test_layers_made_by_so_few_functions_are_found_again(time_embedding, architecture):
    """Layers that an ODE of width T makes are that ODE's: the same logits."""
    random = np.random.default_rng(0)
    e = random.normal(size=(STEPS, WIDTH)) + 1

    def make(path, leaf):
        P = 0.1 * random.normal(size=(WIDTH, *leaf.shape[1:]))
        varying = np.tensordot(e, P, 1)
        name = path[-1].key
        kernel = np.asarray(leaf)[:1] + varying
        made = kernel if name == "kernel" else varying + OFFSET[name]
        return made.astype(np.float32)

    changes = {**architecture, "time_embedding": time_embedding}
    run, config, params, fits = fit(
        changes, change=lambda w: jax.tree_util.tree_map_with_path(make, w)
    )
    assert all(reached < 1e-4 for reached, _ in errors_by_kind(fits).values())
    logits = logits_of(run, TOKENS)
    found = jax.jit(LanguageModel(config).apply)({"params": params}, jnp.asarray(TOKENS))
    difference = np.asarray(found)[..., : config.vocab_size] - logits
    assert np.abs(difference).max() < 1e-3 * np.abs(logits).max()


def test_constant_biases_are_kept_and_cost_the_kernels_nothing():
    """Centred functions of time have no constant, of which GPT's biases consist here."""

    def make(path, leaf):
        return np.repeat(leaf[:1], STEPS, 0) if path[-1].key == "bias" else leaf

    _, _, _, fits = fit({}, change=lambda w: jax.tree_util.tree_map_with_path(make, w))
    for path, of_leaf in fits.items():
        if path[-1] == "bias":
            assert of_leaf.reached < 0.0101 * of_leaf.whole  # 0.1 of the constant is left out
        elif path[-1] == "kernel":
            assert of_leaf.reached < 1.001 * of_leaf.least


def test_equal_layers_are_exact():
    def make(leaf):
        return np.repeat(leaf[:1], STEPS, 0)

    _, _, _, fits = fit(LLAMA, 1, change=lambda w: jax.tree.map(make, w))
    assert all(reached < 1e-5 for reached, _ in errors_by_kind(fits).values())


def test_errors_by_kind():
    leaves = {
        ("mlp", "up", "kernel"): LeafFit(16.0, 1.0, 1.0),
        ("mlp", "up", "bias"): LeafFit(1.0, 1.0, 0.25),
        ("mlp", "down", "kernel"): LeafFit(9.0, 3.0, 0.0),
    }
    assert errors_by_kind(leaves) == {
        "up": (0.25, 0.25),
        "up bias": (1.0, 0.5),
        "down": (pytest.approx(3**-0.5), 0.0),
        "all kernels": (0.4, 0.2),
    }


@pytest.mark.slow
@pytest.mark.parametrize(
    ("num_nodes", "width"), [(2, 1), (12, 1), (12, 11), (24, 8), (48, 24), (96, 95)]
)
def test_a_time_embedding_has_the_given_values_and_is_smooth(num_nodes, width):
    """At the nodes to 1e-3; between them no larger than values near them."""
    random = np.random.default_rng(0)
    values = np.linalg.qr(random.normal(size=(num_nodes, width)))[0] * num_nodes**0.5
    frequencies, scale = smooth_frequencies(num_nodes)
    parameters, at_nodes = smooth_time_embedding(values, frequencies, scale)
    np.testing.assert_allclose(at_nodes, values, atol=1e-3)
    times = jnp.linspace(1 / num_nodes, 1, 10 * num_nodes)
    variables = {"params": {name: jnp.asarray(x) for name, x in parameters.items()}}
    features = time_features(times, frequencies, scale)
    between = np.asarray(TimeEmbedding(width).apply(variables, features))
    assert np.abs(between).max() < 1.5 * np.abs(values).max()
    assert max(np.abs(x).max() for x in parameters.values()) < 50
