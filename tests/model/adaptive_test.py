"""Adaptive integration by diffrax agrees with fine fixed steps, gradients included."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small_models import SMALL, TOKENS, random_params

from t5x_diffeq.model.adaptive import Adaptive, check_adaptive, solve_adaptively
from t5x_diffeq.model.language_model import LanguageModel
from t5x_diffeq.system.errors import InputError

pytestmark = pytest.mark.slow

# Smooth in t, so that there is a solution that schemes can agree on.
SMOOTH = dataclasses.replace(SMALL, time_scale=3.0, num_steps=32, scheme="rk4")
EXACT = Adaptive("dopri5", rtol=1e-6)


def final_state(model, params):
    weights = model.apply({"params": params}, method="weights")
    return model.apply({"params": params}, TOKENS, weights, method="trajectory")[-1]


@pytest.mark.slow
@pytest.mark.parametrize("weights", ["time_dependent", "shared"])
def test_equals_fine_fixed_steps(weights):
    model = LanguageModel(dataclasses.replace(SMOOTH, weights=weights))
    params = random_params(model, scale=0.2)
    solution = jax.jit(lambda p: solve_adaptively(model, p, TOKENS, EXACT))(params)
    assert solution.reached
    assert 3 < solution.steps < 200
    np.testing.assert_allclose(solution.y, final_state(model, params), atol=2e-4)


@pytest.mark.slow
def test_gradients():
    model = LanguageModel(SMOOTH)
    params = random_params(model)

    def gradient(final):
        return jax.jit(jax.grad(lambda p: jnp.sin(final(p)).mean()))(params)["source"]

    found = gradient(lambda p: solve_adaptively(model, p, TOKENS, EXACT).y)
    expected = gradient(lambda p: final_state(model, p))
    for a, b in zip(*map(jax.tree.leaves, (found, expected)), strict=True):
        np.testing.assert_allclose(a, b, atol=2e-3 * float(jnp.abs(b).max()))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"weights": "per_layer"}, "tsit5 needs W.t. at any t"),
        ({"weights": "shared", "step_size": "1"}, "not shared with step_size 1"),
    ],
)
def test_what_it_cannot_solve(changes, message):
    with pytest.raises(InputError, match=message):
        check_adaptive(dataclasses.replace(SMALL, **changes), Adaptive())
