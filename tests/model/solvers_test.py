"""Order of accuracy, measured on a field that depends on time and whose parts don't commute."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.integrate import solve_ivp

from t5x_diffeq.model.ode.solvers import SCHEMES, VectorField, find_scheme, grid
from t5x_diffeq.system.errors import InputError

A0, A1, B0, B1 = np.random.default_rng(0).normal(size=(4, 3, 3))
FIELD = VectorField(f=lambda W, y: y @ W["A"].T, g=lambda W, y: y @ W["B"].T)


def matrices(t):
    return {"A": A0 + np.sin(3 * t) * A1, "B": B0 + np.cos(2 * t) * B1}


def solution():
    def field(t, y):
        return sum(matrices(t).values()) @ y

    return solve_ivp(field, (0, 1), np.ones(3), rtol=1e-12, atol=1e-12).y[:, -1]


def integrate(name, num_steps):
    scheme = find_scheme(name)
    y = jnp.ones((1, 1, 3))
    starts = np.arange(num_steps)[:, None]
    for times in (starts + np.array(scheme.nodes)) / num_steps:
        y = scheme.step(FIELD, tuple(matrices(t) for t in times), y, 1 / num_steps)
    return y[0, 0]


@pytest.mark.parametrize("scheme", SCHEMES)
def test_order(scheme):
    exact = solution()
    with jax.enable_x64(True):
        errors = [np.linalg.norm(integrate(scheme, n) - exact) for n in (64, 128)]
    assert np.log2(errors[0] / errors[1]) == pytest.approx(find_scheme(scheme).order, abs=0.15)


def test_grid_is_the_official_one():
    np.testing.assert_allclose(grid("euler", 4)[:, 0], [0.25, 0.5, 0.75, 1])
    np.testing.assert_allclose(grid("rk4", 2), [[0, 0.25, 0.5], [0.5, 0.75, 1]])


def test_bad_grid():
    with pytest.raises(InputError, match="num_steps is 0"):
        grid("euler", 0)
    with pytest.raises(InputError, match="'eular' is unknown; there are euler"):
        grid("eular", 3)


@pytest.mark.parametrize("name", SCHEMES)
def test_evaluations(name):
    calls, scheme = [], find_scheme(name)
    zero = jnp.zeros((1, 1, 1))
    field = VectorField(
        f=lambda W, y: calls.append("f") or zero, g=lambda W, y: calls.append("g") or zero
    )
    scheme.step(field, ({},) * len(scheme.nodes), zero, 1.0)
    assert (calls.count("f"), calls.count("g")) == scheme.evaluations
