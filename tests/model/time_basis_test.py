"""The functions of time that a time embedding reads, against NumPy's."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.polynomial import legendre
from small_models import SMALL, random_params
from small_models import small as small_model

from t5x_diffeq.config.config import ModelKeys
from t5x_diffeq.model.ode.hyper_init import HyperInit
from t5x_diffeq.model.ode.time_basis import TIME_BASES, Legendre, TimeBasis, make_time_basis
from t5x_diffeq.system.errors import InputError

TIMES = np.linspace(0, 1, 61)
COUNTED = [name.removesuffix(":k") for name in TIME_BASES if name.endswith(":k")]
BASES = [f"{name}:{k}" for name in COUNTED for k in (1, 5)]


def basis_of(name):
    return make_time_basis(ModelKeys(time_basis=name))


def by_numpy(basis, t):
    kind, K = basis.split(":")[0], int(basis.split(":")[1])
    nodes = np.arange(1, K + 1) / K
    return {
        "legendre": lambda: legendre.legvander(2 * t - 1, K - 1),
        "table": lambda: np.stack([np.interp(t, nodes, row) for row in np.eye(K)], axis=-1),
    }[kind]()


@pytest.mark.slow
@pytest.mark.parametrize("basis", BASES)
def test_they_are_the_textbooks(basis):
    found = basis_of(basis)(jnp.asarray(TIMES))
    assert found.shape == (61, basis_of(basis).count)
    np.testing.assert_allclose(found, by_numpy(basis, TIMES), atol=1e-5)


@pytest.mark.parametrize("basis", ["legendre:7", "table:5"])
def test_their_derivatives_are_the_difference_quotients(basis):
    t, h = TIMES[1:-1] + 1e-3, 1e-6  # beside the knots, where a table has two slopes
    _, found = jax.jvp(basis_of(basis), (jnp.asarray(t),), (jnp.ones(59),))
    expected = (by_numpy(basis, t + h) - by_numpy(basis, t - h)) / (2 * h)
    np.testing.assert_allclose(found, expected, atol=1e-4 * np.abs(expected).max())


@pytest.mark.parametrize("basis", ["sinusoids", *BASES])
def test_a_time_embedding_has_unit_scale(basis):
    """The mean over T of e(t)^2, averaged over t: also where it is a network of sinusoids."""
    features = basis_of(basis)
    embedding = HyperInit("invariant", 2000, features).embedding(parent=None)
    times = features(jnp.asarray(TIMES))
    e, _ = embedding.init_with_output(jax.random.key(0), times)
    assert 0.6 < jnp.square(e).mean() < 1.6


@pytest.mark.parametrize("basis", ["legendre:7", "table:5"])
def test_a_step_moves_it_by_about_the_learning_rate(basis):
    features = basis_of(basis)
    step = HyperInit("invariant", 8, features).embedding(parent=None).step_multiplier
    moved = step * np.abs(by_numpy(basis, TIMES)).sum(1)
    assert 0.7 < moved.mean() < 1.05


def test_a_table_is_read_at_its_own_nodes_and_between_them():
    model = small_model(time_basis="table:3", num_steps=3)
    params = random_params(model)
    C = params["source"]["mlp.up"]["time_embedding"]["coefficients"]
    _, embeddings = model.at_depth(6).apply(
        {"params": params}, jnp.arange(1, 7) / 6, method="weights_and_embeddings"
    )
    expected = jnp.stack((C[0], C[0], (C[0] + C[1]) / 2, C[1], (C[1] + C[2]) / 2, C[2]))
    np.testing.assert_allclose(embeddings["mlp.up"], expected, atol=1e-6)


def test_attention_and_its_norm_have_a_width_of_their_own():
    model = small_model(attention_time_embed_dim=2)
    _, embeddings = model.apply(
        {"params": random_params(model)}, jnp.zeros(1), method="weights_and_embeddings"
    )
    widths = {name: e.shape[1] for name, e in embeddings.items()}
    T = model.config.time_embed_dim
    assert widths.pop("attention_norm") == widths.pop("attention.qkv") == 2
    assert widths.pop("attention.output") == 2
    assert set(widths.values()) == {T} != {2}


def test_one_time_embedding_has_one_width():
    with pytest.raises(InputError, match=r"embed_dim=2 with model.time_embedding=common"):
        dataclasses.replace(SMALL, attention_time_embed_dim=2, time_embedding="common")


def test_a_block_without_attention_has_no_width_of_it():
    own = "examples.own_block:QKNormBlock"
    with pytest.raises(InputError, match="attention_time_embed_dim=2: the block has no layer"):
        random_params(small_model(block=own, attention_time_embed_dim=2))


class Sines(TimeBasis):
    """Two functions that are said to be polynomials, and aren't."""

    count = 2
    polynomial = True

    def __call__(self, times):
        return jnp.stack([jnp.sin(times), jnp.ones_like(times)], -1)


class WithoutMean(Sines):
    """A mean of squares that is 0."""

    polynomial = False
    mean_square = 0.0


class Random(Sines):
    """Other values each time."""

    polynomial = False

    def __call__(self, times):
        return jnp.asarray(np.random.default_rng().normal(size=(len(times), 2)), jnp.float32)


class Polynomials(Legendre):
    """Those of Legendre, as another package's."""


def test_functions_that_are_no_polynomials_are_refused():
    make_time_basis(ModelKeys(time_basis=f"{__name__}:Polynomials(9)"))
    with pytest.raises(InputError, match="its 2 functions aren't polynomials of degree 1 at most"):
        make_time_basis(ModelKeys(time_basis=f"{__name__}:Sines"))
    with pytest.raises(InputError, match=r"says mean_square=0\.0; it is the mean of the squares"):
        make_time_basis(ModelKeys(time_basis=f"{__name__}:WithoutMean"))
    with pytest.raises(InputError, match="gives other values each time; it must be a function of"):
        make_time_basis(ModelKeys(time_basis=f"{__name__}:Random"))
