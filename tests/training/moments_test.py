"""Adam's moments in few bytes: what they round, on a mesh, and in training."""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.traverse_util import flatten_dict
from helpers import assert_learns_and_resumes, setup_of, small_config

from t5x_diffeq.config.config import Config
from t5x_diffeq.system.errors import InputError
from t5x_diffeq.training.checks import run_checks
from t5x_diffeq.training.optimizers.moments import random_bits, round_to_bfloat16
from t5x_diffeq.training.setup import make_setup

RNG = np.random.default_rng(0)
QKV = ("source", "attention.qkv", "kernel")


def normal(*shape):
    return jnp.asarray(RNG.normal(size=shape), jnp.float32)


def draw(seed, shape):
    return random_bits(jnp.uint32(seed), shape)


# ---------------------------------------------------------------------------- rounding


def mean_of_roundings(round_once, x, count=4000):
    """The mean over many draws of random bits, and that of its standard error over x."""
    many = jax.jit(jax.vmap(lambda seed: round_once(x, random_bits(seed, x.shape))))
    drawn = np.asarray(many(jax.random.bits(jax.random.key(1), count, jnp.uint32)), np.float64)
    return drawn.mean(0), drawn.std(0) / count**0.5


def test_rounding_has_no_bias():
    x = normal(25, 30) * jnp.exp(normal(25, 30))
    mean, error = mean_of_roundings(
        lambda x, bits: round_to_bfloat16(x, bits).astype(jnp.float32), x
    )
    assert (error > 0).mean() > 0.9
    off = np.abs(mean - x) / (error + 1e-6 * np.abs(x).max())
    assert off.max() < 6 and off.mean() < 1.2


def test_rounding_keeps_what_it_can_hold():
    kept = jnp.asarray([0, 1.5, -2.0, 2**-130, jnp.inf, -jnp.inf], jnp.float32)
    for seed in range(5):
        rounded = round_to_bfloat16(kept, draw(seed, kept.shape))
        np.testing.assert_array_equal(rounded.astype(jnp.float32), kept)
    assert jnp.isnan(round_to_bfloat16(jnp.float32([jnp.nan]), draw(0, (1,))))[0]


# ---------------------------------------------------------------------------- in a train state


@cache
def setup_with(moments, **mesh):
    config = small_config("unused")
    config.optimizer.moments = moments
    config.mesh.update(mesh or {"fsdp": 1})
    return setup_of(config)


@pytest.mark.slow
def test_bytes_of_the_state():
    setup = setup_with("bfloat16")
    numbers = sum(x.size for x in jax.tree.leaves(setup.abstract_state.params))
    found = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(setup.abstract_state.opt_state))
    assert found == 4 * numbers + 2 * 4  # two counts of steps


def test_moments_are_sharded_like_their_kernel():
    setup = setup_with("bfloat16", data=2, fsdp=2, tensor=2)
    state = setup.abstract_state
    spec = flatten_dict(state.params)[QKV].sharding.spec
    _, adam, *_ = state.opt_state
    for part in (adam.mu, adam.nu):
        assert part["source"]["attention.qkv"]["kernel"].sharding.spec == spec


@cache
def updates_of(moments, **mesh):
    """The parameters' updates in the second of two steps on random gradients."""
    setup, rng = setup_with(moments, **mesh), np.random.default_rng(3)

    def like(tree):
        return jax.tree.map(lambda x: jnp.asarray(rng.normal(size=x.shape), jnp.float32), tree)

    params = setup.abstract_state.params
    gradients = [like(params) for _ in range(2)]

    def two_steps(gradients):
        state = setup.optimizer.init(jax.tree.map(jnp.zeros_like, gradients[0]))
        facts = {"norm": jnp.float32(2), "schedule": setup.schedule}
        for gradient in gradients:
            found, state = setup.optimizer.update(gradient, state, gradient, **facts)
        return found

    shardings = jax.tree.map(lambda x: x.sharding, params)
    with setup.context():
        return jax.jit(two_steps, in_shardings=([shardings] * 2,), out_shardings=shardings)(
            gradients
        )


@pytest.mark.slow
def test_a_mesh_changes_nothing():
    """Not even what is drawn."""
    found = updates_of("bfloat16", data=2, fsdp=2, tensor=2)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-6),
        found,
        updates_of("bfloat16"),
    )


@pytest.mark.slow
def test_parameters_move_as_with_adam():
    found, expected = (flatten_dict(updates_of(kind)) for kind in ("bfloat16", "float32"))
    embedding = ("token_embedding", "table")
    np.testing.assert_allclose(found[embedding], expected[embedding], rtol=2e-2, atol=2e-4)
    distance = jnp.linalg.norm(found[QKV] - expected[QKV]) / jnp.linalg.norm(expected[QKV])
    assert distance < 0.05


# ---------------------------------------------------------------------------- runs


@pytest.mark.slow
@pytest.mark.in_turns("trainings")
def test_training_resumes_bit_for_bit(text, tmp_path):
    config = small_config(text)
    config.optimizer.update(moments="bfloat16", learning_rate=1e-2)
    config.mesh.fsdp = 1
    config.train.update(microbatches=2, eval_batches=2)
    assert_learns_and_resumes(config, tmp_path)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (
            {"optimizer.moments": "float16"},
            r"optimizer.moments is 'float16'; it can be float32, bf",
        ),
        (
            {"optimizer.moments": "bfloat16", "optimizer.name": "muon"},
            r"=bfloat16 is for Adam; with optimizer.name=muon it can only be float32",
        ),
        (
            {"optimizer.moments": "bfloat16", "optimizer.name": "studies.muon_variants:held"},
            r"is for Adam; with optimizer.name=studies.muon_variants:held it can only be float32",
        ),
    ],
)
def test_moments_that_cannot_be(keys, message, small):
    with pytest.raises(InputError, match=message):
        config = Config.of(small).with_values(keys)
        run_checks("train", config)
        make_setup(config, 256)
