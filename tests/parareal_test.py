"""Parareal: exact after S iterations, on a mesh axis too, and as it compares on a model."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import call
from small_models import LLAMA, TOKENS, random_params, small

from t5x_diffeq.contrib.parareal import __main__ as command
from t5x_diffeq.contrib.parareal.comparison import best_slices, compare_with_serial, solvers_of
from t5x_diffeq.contrib.parareal.integration import iterate, solve, steps_in_sequence
from t5x_diffeq.models.language_model import in_one_document
from t5x_diffeq.runtime.errors import InputError

STEPS, SLICES = 12, 4


@pytest.fixture(scope="module")
def model():
    return small(num_steps=STEPS, dropout_rate=0.0, **LLAMA)


@pytest.fixture(scope="module")
def params(model):
    return random_params(model)


@pytest.fixture(scope="module")
def start(model, params):
    return model.apply({"params": params}, TOKENS, in_one_document(TOKENS), method="embed")


@pytest.fixture(scope="module")
def serial(model, params):
    """The states of the model's own pass where slices begin and end."""
    variables = {"params": params}
    weights = model.apply(variables, method="weights")
    states = model.apply(variables, TOKENS, weights, method="trajectory")
    return states[:: STEPS // SLICES]


def apart(x, y):
    return float(jnp.linalg.norm(x - y) / jnp.linalg.norm(y))


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["euler", "midpoint"])
def test_each_iteration_makes_one_more_state_exact(model, params, start, scheme):
    model = model.at_depth(STEPS, scheme)
    variables = {"params": params}
    weights = model.apply(variables, method="weights")
    serial = model.apply(variables, TOKENS, weights, method="trajectory")[:: STEPS // SLICES]
    found, residuals = jax.jit(
        lambda params, start: iterate(solvers_of(model, params, TOKENS, SLICES), start, SLICES)
    )(params, start)
    for n, states in enumerate(found):
        assert apart(states[: n + 1], serial[: n + 1]) < 1e-5
        if n < SLICES - 1:
            assert apart(states[n + 1], serial[n + 1]) > 1e-4  # and no more than one
    assert residuals[0] > 1e-3


@pytest.mark.slow
def test_tolerance(model, params, start, serial):
    """It stops when the residual allows, and at S iterations it is exact."""

    @partial(jax.jit, static_argnames="tolerance")
    def end(tolerance):
        solvers = solvers_of(model, params, TOKENS, SLICES)
        return solve(solvers, start, tolerance=tolerance, slices=SLICES)

    y, count = end(0.0)
    assert int(count) == SLICES and apart(y, serial[-1]) < 1e-5
    _, residuals = iterate(solvers_of(model, params, TOKENS, SLICES), start, SLICES)
    y, count = end(float(residuals[1]) * 1.01)
    assert int(count) == 2 and 1e-6 < apart(y, serial[-1]) < residuals[0]


@pytest.mark.slow
def test_slices_lie_on_a_mesh_axis(model, params, start, serial):
    """Each device solves its own slice: what it computes at once is a fourth of all."""
    mesh = jax.make_mesh(
        (SLICES, 2), ("slices", "data"), axis_types=(jax.sharding.AxisType.Auto,) * 2
    )

    starts = jnp.stack([start] * (SLICES + 1))

    def ends(weights, axis):
        solvers = solvers_of(model, params, TOKENS, SLICES, axis)
        return solvers._replace(weights=weights).fine_ends(starts)

    with jax.set_mesh(mesh):
        solvers = solvers_of(model, params, TOKENS, SLICES, "slices")
        states, _ = jax.jit(partial(iterate, solvers, iterations=SLICES))(start)
        assert apart(states[-1, -1], serial[-1]) < 1e-5
        flops = [
            jax.jit(ends, static_argnums=1).lower(solvers.weights, axis).compile().cost_analysis()
            for axis in ("slices", None)
        ]
    assert flops[0]["flops"] == pytest.approx(flops[1]["flops"] / SLICES, rel=0.05)


@pytest.mark.slow
def test_comparison(model, params):
    found = compare_with_serial(model, params, TOKENS, SLICES)
    assert found.in_sequence == [4, 11, 18, 25, 32]
    logits = model.apply({"params": params}, TOKENS[:, :-1])
    wanted = jnp.take_along_axis(jax.nn.log_softmax(logits), TOKENS[:, 1:, None], -1)
    assert found.serial_loss == pytest.approx(-float(wanted.mean()), rel=1e-5)
    assert np.all(found.state_errors[:-1] > 0.1) and found.state_errors[-1] == 0
    assert np.all(found.gradient_errors[:-1] > 0.1) and found.gradient_errors[-1] == 0
    assert np.all(found.residuals[:-1] > 0.1) and found.residuals[-1] < 1e-5


def test_best_slices():
    assert [best_slices(n) for n in (1, 7, 12, 48)] == [1, 7, 2, 4]
    assert steps_in_sequence(48, 4, 1) == 4 + 12 + 4


@pytest.mark.parametrize(
    ("changes", "slices", "words"),
    [
        ({}, 5, "--slices=5 doesn't divide the 12 solver steps; take one of 1, 2, 3, 4, 6, 12"),
        ({"weights": "per_layer"}, 4, "which per-layer weights don't have"),
    ],
)
def test_bad_input(changes, slices, words):
    with pytest.raises(InputError, match=words):
        compare_with_serial(small(num_steps=STEPS, **changes), {}, TOKENS, slices)


@pytest.mark.slow
def test_command(finished, tmp_path, capsys):
    call(command, f"--workdir={finished[1]}", f"--output={tmp_path}")
    page = (tmp_path / "parareal.html").read_text()
    assert "Parallel in depth" in page and "steps in sequence instead of" in page
    assert '"parareal/iterations"' in capsys.readouterr().out
