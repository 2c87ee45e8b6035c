"""Reversible schemes in the system: what reads their states, and what refuses them."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
from helpers import small_config
from small_models import SMALL, TOKENS, random_params, small

from t5x_diffeq.analysis.lyapunov import lyapunov_exponents
from t5x_diffeq.diagnostics.watch import sizes
from t5x_diffeq.exchange.save_pretrained import check_form
from t5x_diffeq.models.language_model import in_one_document
from t5x_diffeq.ode.reversible import Pair
from t5x_diffeq.ode.schemes import find_scheme, is_reversible
from t5x_diffeq.planner.search import with_remats
from t5x_diffeq.runtime.config import Config
from t5x_diffeq.runtime.errors import InputError
from t5x_diffeq.training.config_checks import check_new

MCCALLUM_FOSTER = "reversible:midpoint"


@pytest.mark.slow
def test_watching_sees_the_state_and_not_the_pair():
    model = small(scheme=MCCALLUM_FOSTER)
    params, places = random_params(model), in_one_document(TOKENS)
    weights = model.apply({"params": params}, method="weights")
    states = model.apply({"params": params}, TOKENS, weights, method="trajectory")
    curves = sizes(model.config, weights, states[0], places)
    rms = jnp.sqrt(jnp.square(states).mean((1, 2, 3)))
    np.testing.assert_allclose(curves["state"], rms, rtol=1e-5)


def test_the_coupling_is_the_configs():
    config = dataclasses.replace(SMALL, scheme=MCCALLUM_FOSTER, reversibility=0.5)
    couplings = [c.c for c in find_scheme(config.solver).couplings]
    assert couplings == [0.5, 1.0]
    assert [c.c for c in find_scheme(MCCALLUM_FOSTER).couplings] == [0.99, 1.0]
    assert is_reversible("leapfrog") and not is_reversible("midpoint")
    assert isinstance(find_scheme("leapfrog").start(jnp.zeros((3, 16))), Pair)


@pytest.mark.parametrize("name", ["reversible:leapfrog", "reversible:eular", "reversible:rk4(x)"])
def test_only_one_step_schemes_are_made_reversible(name):
    with pytest.raises(InputError, match=r"is unknown; there are euler.*reversible: with one of"):
        find_scheme(name)
    with pytest.raises(InputError, match=r"model\.scheme is 'reversible:.*it can be euler, .*lea"):
        dataclasses.replace(SMALL, scheme=name)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"remat": "dots"},
            "model.remat=dots with model.scheme=leapfrog: .* take full, .* or none",
        ),
        (
            {"dtype": "bfloat16", "state_dtype": "bfloat16"},
            "model.state_dtype=bfloat16 with model.scheme=leapfrog: .* leave model.state_dtype out",
        ),
    ],
)
def test_what_reversible_schemes_refuse(changes, message):
    with pytest.raises(InputError, match=message):
        dataclasses.replace(SMALL, scheme="leapfrog", **changes)


def test_another_scheme_evaluates_a_run_of_any_remat():
    config = dataclasses.replace(SMALL, remat="keep:mlp", dtype="bfloat16", state_dtype="bfloat16")
    other = config.at_depth(5, "leapfrog")
    assert (other.remat, other.state_dtype, other.num_steps) == ("full", "float32", 5)


def test_a_coupling_that_loses_the_states_is_refused(tmp_path):
    config = small_config(tmp_path)
    config.model.update(scheme=MCCALLUM_FOSTER, reversibility=0.5, num_steps=48, remat="full")
    message = r"reversibility=0\.5 with 48 solver steps .* 10\^14 times; raise it to at least 0\.86"
    with pytest.raises(InputError, match=message):
        check_new(Config.of(config))
    config.model.remat = "none"
    check_new(Config.of(config))
    assert with_remats(Config.of(config)) == [{"model.remat": "full"}]


def test_verbs_that_need_one_state_refuse():
    model = small(scheme="leapfrog")
    with pytest.raises(InputError, match="leapfrog: a step of it is no layer"):
        check_form(model.config)
    with pytest.raises(InputError, match="leapfrog takes each step from two states, and exponents"):
        lyapunov_exponents(model, {}, TOKENS)
