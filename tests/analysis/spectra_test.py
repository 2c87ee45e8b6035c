"""Spectra against numpy's eigenvalues of the full products, and what must be true of them."""

import jax.numpy as jnp
import numpy as np
import pytest
from scipy.optimize import linear_sum_assignment
from small_models import LLAMA, random_params, small

from t5x_diffeq.analysis.spectra import (
    copying_score,
    eigenvalues,
    growth,
    positive_fraction,
    roughness,
    spectra,
    weights_at,
)
from t5x_diffeq.model.ode.solvers import grid
from t5x_diffeq.model.sub_fields import make_block
from t5x_diffeq.system.errors import InputError


def spectra_of(model, W):
    return spectra(make_block(model.config), W)


def weights_of(model, params):
    return model.apply({"params": params}, method="weights")


def assert_same_set(found, expected):
    """Each of `found` has its own partner; what is left of `expected` is zero."""
    cost = np.abs(found[:, None] - expected[None])
    rows, columns = linear_sum_assignment(cost)
    tolerance = 1e-6 * np.abs(expected).max()
    assert cost[rows, columns].max() < tolerance
    assert np.abs(np.delete(expected, columns)).max(initial=0) < tolerance


def full_products(W, n, h):
    """W_Q W_K^T, W_V W_O and W_up W_down, each `[D, D]`, written out for GPT and Llama."""
    attention = W["attention"]
    output = np.asarray(attention["output"]["kernel"], np.float64)[n, h]
    if "qkv" in attention:
        q, k, v = np.moveaxis(np.asarray(attention["qkv"]["kernel"], np.float64)[n, :, :, h], 1, 0)
    else:
        of = h * attention["key"]["kernel"].shape[2] // attention["query"]["kernel"].shape[2]
        q = np.asarray(attention["query"]["kernel"], np.float64)[n, :, h]
        k, v = (np.asarray(attention[x]["kernel"], np.float64)[n, :, of] for x in ("key", "value"))
    up, down = (np.asarray(W["mlp"][x]["kernel"], np.float64)[n] for x in ("up", "down"))
    return q @ k.T, v @ output, up @ down


@pytest.mark.parametrize("changes", [{}, LLAMA, {"mlp_dim": 6}], ids=["gpt", "llama", "narrow"])
def test_equal_the_full_products(changes):
    model = small(**changes)
    W = weights_of(model, random_params(model))
    found = spectra_of(model, W)
    assert found["qk"].shape == found["ov"].shape == (3, 4, 4)
    assert found["mlp"].shape == (3, min(16, model.config.mlp_dim))
    for n in range(3):
        for h in range(4):
            qk, ov, mlp = (np.linalg.eigvals(A) for A in full_products(W, n, h))
            assert_same_set(found["qk"][n, h], qk)
            assert_same_set(found["ov"][n, h], ov)
        assert_same_set(found["mlp"][n], mlp)


def test_complex_pairs_stay():
    turn = np.array([[0.0, -2, 0], [2, 0, 0], [0, 0, 1]])
    np.testing.assert_allclose(eigenvalues(turn[None])[0], [2j, -2j, 1], atol=1e-12)
    model = small()
    found = spectra_of(model, weights_of(model, random_params(model)))
    assert (np.abs(found["qk"].imag) > 1e-3).any()
    np.testing.assert_allclose(found["qk"].sum(-1).imag, 0, atol=1e-9)


def test_any_times_hold_the_nodes():
    model = small()
    params = random_params(model)
    nodes = grid("euler", 3)[:, 0]
    at_nodes = spectra_of(model, weights_at(model.config, params, jnp.asarray(nodes)))
    np.testing.assert_allclose(
        at_nodes["ov"], spectra_of(model, weights_of(model, params))["ov"], atol=1e-5
    )
    many = spectra_of(model, weights_at(model.config, params, jnp.linspace(0, 1, 7)))
    assert many["qk"].shape == (7, 4, 4)
    np.testing.assert_allclose(many["mlp"][[2, 4, 6]], at_nodes["mlp"], atol=1e-4)


def test_weights_that_are_not_finite():
    model = small()
    W = weights_of(model, random_params(model))
    W["mlp"]["up"]["kernel"] = W["mlp"]["up"]["kernel"].at[0, 0, 0].set(jnp.nan)
    with pytest.raises(InputError, match="some weights are not finite"):
        spectra_of(model, W)


def test_copying():
    values = np.array([[2, 1, 1], [-1, 1, 0], [1j, -1j, 2]], complex)
    np.testing.assert_allclose(copying_score(values), [1, 0, 0.5])
    np.testing.assert_allclose(positive_fraction(values), [1, 1 / 3, 1 / 3])
    np.testing.assert_allclose(copying_score(np.zeros((1, 2), complex)), 0)


def test_growth():
    values = np.arange(1, 7)[:, None, None] * np.ones((6, 2, 3)) * 1j
    found = growth(values)
    assert (found["first"], found["last"]) == (1.5, 5.5)
    assert found["ratio"] == found["radius_ratio"] == 5.5 / 1.5
    assert found["rank_correlation"] == pytest.approx(1)
    assert growth(values[::-1])["rank_correlation"] == pytest.approx(-1)
    assert growth(np.ones((3, 2), complex))["rank_correlation"] == 0


def test_roughness():
    """Straight lines between the nodes, frequencies far above them, and no change at all."""
    for changes, least, most in (
        ({"time_basis": "table:3"}, 0, 1e-4),
        ({"time_scale": 1000.0}, 0.5, 10),
        ({"weights": "shared"}, 0, 0),
    ):
        model = small(**changes)
        assert least <= roughness(model.config, random_params(model)) <= most
