"""Tokens that stop where they are still: against NumPy, in generation, and what is refused."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from helpers import setup_of, small_config

from t5x_diffeq.inference.sampling import Sampling, generate
from t5x_diffeq.models.language_model import DEPTHS, LanguageModel
from t5x_diffeq.ode.early_exit import integrate_with_exits
from t5x_diffeq.ode.integrate import integrate
from t5x_diffeq.ode.solvers import VectorField
from t5x_diffeq.runtime.errors import InputError

N, RATES = 10, np.array([0.0, 0.3, 2.0, 6.0], np.float32)  # of four tokens
FIELD = VectorField(f=lambda W, y: -W * y, g=lambda W, y: 0 * y)


def decay(tolerance):
    """dy/dt = -r W(t) y, with W falling from 1 to 0.1: each token by itself, at its own rate."""
    weights = jnp.linspace(1.0, 0.1, N)
    y = jnp.ones((1, 4, 3))
    rates = jnp.asarray(RATES)[:, None]
    field = VectorField(lambda W, y: FIELD.f(W * rates, y), FIELD.g)
    common = {"scheme": "euler", "num_steps": N, "step_size": 1 / N}
    if not tolerance:
        return integrate(lambda _: field, weights, y, **common)
    return integrate_with_exits(lambda _: field, weights, y, **common, tolerance=tolerance)


def test_a_token_stops_after_the_first_step_that_hardly_moves_it():
    y, steps = decay(0.05)
    expected, taken = np.ones(4), np.zeros(4, int)
    for token, rate in enumerate(RATES):
        for W in np.linspace(1.0, 0.1, N):
            taken[token] += 1
            expected[token] *= 1 - rate * W / N
            if rate * W / N < 0.05:
                break
    np.testing.assert_array_equal(steps[0], taken)
    assert taken.tolist() == [1, 1, 9, N]  # some stop at once, one on the way, one never
    np.testing.assert_allclose(y[0, :, 0], expected, rtol=1e-5)


def test_with_a_tiny_tolerance_nothing_changes():
    y, steps = decay(1e-9)
    np.testing.assert_allclose(y, decay(0), rtol=1e-6)
    assert steps[0].tolist() == [1, N, N, N]  # what doesn't move at all stops


@pytest.fixture(scope="module")
def exiting(text):
    """A model of random weights, and a tolerance at which its tokens stop at different steps."""
    config = small_config(text)
    config.model.update(num_steps=4, dropout_rate=0.0)
    setup = setup_of(config, devices=jax.devices()[:1])
    with setup.context():
        params = setup.init_state().params
    return setup, params


def read(setup, params, tokens):
    """Logits, and the steps of each token."""
    with setup.context():
        return nn.apply(LanguageModel.__call__, setup.model, mutable=[DEPTHS])(
            {"params": params}, tokens
        )


@pytest.mark.slow
def test_what_is_generated_is_what_a_whole_pass_predicts(exiting):
    setup, params = exiting
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, 250, (2, 9)), jnp.int32)
    sizes = [float(x) for x in np.geomspace(0.05, 0.5, 6)]
    spread = {x: read(setup.with_exits(x), params, tokens)[1][DEPTHS]["steps"][0] for x in sizes}
    tolerance = max(sizes, key=lambda x: len(np.unique(spread[x])))
    assert len(np.unique(spread[tolerance])) >= 2
    setup = setup.with_exits(tolerance)
    taken = []
    with setup.context():
        greedy, key = Sampling(temperature=0), jax.random.key(0)
        drawn = [*generate(setup.model, params, tokens.tolist(), 6, greedy, key, taken)]
    whole = jnp.concatenate((tokens, jnp.stack(drawn, 1)), axis=1)
    logits, sown = read(setup, params, whole)
    np.testing.assert_array_equal(logits[:, 8:-1].argmax(-1), jnp.stack(drawn, 1))
    np.testing.assert_array_equal(sown[DEPTHS]["steps"][0][:, 9:-1], np.stack(taken, 1))
    without, _ = read(exiting[0], params, whole)
    assert float(jnp.abs(without - logits)[..., :250].max()) > 1e-3


def test_schemes_between_whose_steps_no_token_can_stop(exiting):
    setup, _ = exiting
    for scheme in ("leapfrog", "reversible:midpoint"):
        with pytest.raises(InputError, match=f"with scheme {scheme}.*: its steps take the states"):
            setup.at_depth(None, scheme).with_exits(0.1)
    assert setup.at_depth(None, "leapfrog").with_exits(0.0).model.config.exit_tolerance == 0
