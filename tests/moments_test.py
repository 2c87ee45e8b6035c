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
from t5x_diffeq.training.config_checks import check_combinations
from t5x_diffeq.training.optimizers.moments import (
    FINEST,
    LARGEST,
    OCTAVES,
    decode_mean,
    decode_square,
    encode_mean,
    encode_square,
    random_bits,
    round_to_bfloat16,
)
from t5x_diffeq.training.setup import make_setup

RNG = np.random.default_rng(0)
COMPRESSED = ("bfloat16", "int8")
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


def round_mean(x, bits):
    return decode_mean(encode_mean(x, bits))


def round_square(x, bits):
    return decode_square(encode_square(x, bits))


@pytest.mark.parametrize(
    ("round_once", "positive"),
    [
        (lambda x, bits: round_to_bfloat16(x, bits).astype(jnp.float32), False),
        (round_mean, False),
        (round_square, True),
    ],
    ids=["bfloat16", "8 bits", "8 bits of a square"],
)
def test_rounding_has_no_bias(round_once, positive):
    x = normal(25, 30) * jnp.exp(normal(25, 30))
    x = jnp.exp(normal(25, 30)) if positive else x  # squares within 10 octaves
    mean, error = mean_of_roundings(round_once, x)
    assert (error > 0).mean() > 0.9  # a block's largest number is kept as it is
    off = np.abs(mean - x) / (error + 1e-6 * np.abs(x).max())
    assert off.max() < 6 and off.mean() < 1.2


def test_rounding_keeps_what_it_can_hold():
    kept = jnp.asarray([0, 1.5, -2.0, 2**-130, jnp.inf, -jnp.inf], jnp.float32)
    for seed in range(5):
        rounded = round_to_bfloat16(kept, draw(seed, kept.shape))
        np.testing.assert_array_equal(rounded.astype(jnp.float32), kept)
    assert jnp.isnan(round_to_bfloat16(jnp.float32([jnp.nan]), draw(0, (1,))))[0]


@pytest.mark.slow
def test_coded_numbers_are_as_near_as_their_codes():
    L, F, K = LARGEST, FINEST, OCTAVES
    x = normal(95, 50) * jnp.exp(normal(95, 50))
    largest = jnp.abs(x).max(0)
    found = round_mean(x, draw(0, x.shape))
    gap = (2 * jnp.sqrt(jnp.abs(x) / largest) / L + 1 / L**2) * largest  # to the next code
    assert (jnp.abs(found - x) <= 1.001 * gap).all()
    square = jnp.square(x)
    found = round_square(square, draw(1, x.shape))
    above = square > 2.0**-K * jnp.square(largest)
    assert above.mean() > 0.5
    ratio = jnp.where(above, found / square, 1)
    assert ratio.min() > 2 ** (-K / F) - 1e-4 and ratio.max() < 2 ** (K / F) + 1e-4
    assert (found > 0).all()
    nothing = encode_square(jnp.zeros((5, 3)), draw(2, (5, 3)))
    assert nothing.codes.dtype == jnp.uint8 and not decode_square(nothing).any()


# ---------------------------------------------------------------------------- in a train state


@cache
def setup_with(moments, **mesh):
    config = small_config("unused")
    config.optimizer.moments = moments
    config.mesh.update(mesh or {"fsdp": 1})
    return setup_of(config)


@pytest.mark.slow
@pytest.mark.parametrize("moments", COMPRESSED)
def test_bytes_of_the_state(moments):
    """T = 4: of P's numbers, and of those of all other parameters."""
    setup = setup_with(moments)
    params = flatten_dict(setup.abstract_state.params)
    P = sum(
        x.size
        for path, x in params.items()
        if path[0] == "source" and path[-1] == "kernel" and path[1] != "time_embedding"
    )
    others = sum(x.size for x in params.values()) - P
    found = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(setup.abstract_state.opt_state))
    expected = {"bfloat16": 4 * (P + others), "int8": (2 + 2 * 4 / 4) * P + 8 * others}
    assert found == expected[moments] + 2 * 4  # two counts of steps


def test_moments_are_sharded_like_their_kernel():
    setup = setup_with("int8", data=2, fsdp=2, tensor=2)
    state = setup.abstract_state
    spec = flatten_dict(state.params)[QKV].sharding.spec
    _, adam, *_ = state.opt_state
    mean, square = (part["source"]["attention.qkv"]["kernel"] for part in (adam.mu, adam.nu))
    for blocks in (mean, square):
        assert blocks.codes.sharding.spec == spec
        assert tuple(blocks.scales.sharding.spec) == spec[1:]


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
        for gradient in gradients:
            found, state = setup.optimizer.update(gradient, state, gradient, norm=jnp.float32(2))
        return found

    shardings = jax.tree.map(lambda x: x.sharding, params)
    with setup.context():
        return jax.jit(two_steps, in_shardings=([shardings] * 2,), out_shardings=shardings)(
            gradients
        )


@pytest.mark.slow
@pytest.mark.parametrize("moments", COMPRESSED)
def test_a_mesh_changes_nothing(moments):
    """Not even what is drawn."""
    found = updates_of(moments, data=2, fsdp=2, tensor=2)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-6),
        found,
        updates_of(moments),
    )


@pytest.mark.slow
@pytest.mark.parametrize("moments", COMPRESSED)
def test_what_is_not_compressed_moves_as_with_adam(moments):
    found, expected = (flatten_dict(updates_of(kind)) for kind in (moments, "float32"))
    embedding = ("token_embedding", "table")
    exact = 1e-5 if moments == "int8" else 2e-2
    np.testing.assert_allclose(found[embedding], expected[embedding], rtol=exact, atol=exact / 100)
    distance = jnp.linalg.norm(found[QKV] - expected[QKV]) / jnp.linalg.norm(expected[QKV])
    assert distance < 0.05


# ---------------------------------------------------------------------------- runs


@pytest.mark.slow
@pytest.mark.parametrize("moments", COMPRESSED)
@pytest.mark.in_turns("trainings")
def test_training_resumes_bit_for_bit(moments, text, tmp_path):
    config = small_config(text)
    config.optimizer.update(moments=moments, learning_rate=1e-2)
    config.model.scheme = "heun" if moments == "int8" else "euler"
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
            {"optimizer.moments": "int8", "model.weights": "shared"},
            r"=int8 needs weights of several times or layers, and .*=shared has one set; set optim",
        ),
        (
            {"optimizer.moments": "int8", "train.trainable": ("embeddings",)},
            r"kernels of the source, and train.trainable=\('embeddings',\) leaves the source out",
        ),
        (
            {"optimizer.moments": "bfloat16", "optimizer.name": "muon"},
            r"=bfloat16 is for Adam; with optimizer.name=muon it can only be float32",
        ),
    ],
)
def test_moments_that_cannot_be(keys, message, small):
    with pytest.raises(InputError, match=message):
        config = Config.of(small).with_values(keys)
        check_combinations(config)
        make_setup(config, 256)
