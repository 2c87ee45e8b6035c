"""The tables of rotary positions: those of transformers 5.23 to the last bit, and of old runs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from t5x_diffeq.hf.rope_parameters import rotary_from_json
from t5x_diffeq.model.layers.rotary import SCALINGS, check_scaling, rotary_table, rotate
from t5x_diffeq.system.errors import InputError

LLAMA3 = ("llama3", 8.0, 1.0, 4.0, 8192)
YARN = ("yarn", 4.0, 32, 1, 32768, 1.138629436111989)
# What `inv_freq` is there, for heads of width 16.
RECORDED = {
    (
        5e5,
        (),
    ): "1 0.19392276 0.03760603 0.007292665 0.0014142134 0.0002742482 5.3182957e-05 1.0313385e-05",
    (
        1e4,
        ("linear", 3.0),
    ): "0.33333334 0.10540926 0.033333335 0.010540926 0.0033333332 0.0010540927 "
    "0.00033333336 0.000105409265",
    (
        5e5,
        LLAMA3,
    ): "1 0.19392276 0.03760603 0.007292665 0.000524846 3.4281024e-05 6.6478697e-06 1.2891732e-06",
    (
        1e6,
        YARN,
    ): "1 0.17782794 0.03162278 0.00421756 0.0005 4.4456985e-05 7.905694e-06 1.4058534e-06",
}


@pytest.mark.parametrize(("base", "scaling"), RECORDED, ids=str)
def test_tables_are_those_of_transformers(base, scaling):
    frequencies, factor = rotary_table(16, base, scaling)
    assert frequencies.dtype == np.float32
    np.testing.assert_array_equal(frequencies, np.float32(RECORDED[base, scaling].split()))
    assert factor == (scaling[-1] if scaling[:1] == ("yarn",) else 1)


@pytest.mark.parametrize("width", [8, 64, 128])
def test_the_default_table_is_that_of_runs_before_the_keys(width):
    half = width // 2
    before = 10_000.0 ** (-jnp.arange(half, dtype=jnp.float32) / half)
    np.testing.assert_array_equal(rotary_table(width, 10_000.0, ())[0], before)


def test_the_factor_scales_queries_and_keys():
    x = jnp.ones((1, 3, 1, 8))
    positions = jnp.arange(3)[None]
    plain = rotate(x, positions, 1e6, ("yarn", 4.0, 32.0, 1.0, 8.0, 1.0))
    scaled = rotate(x, positions, 1e6, ("yarn", 4.0, 32.0, 1.0, 8.0, 1.5))
    np.testing.assert_allclose(scaled, 1.5 * plain, rtol=1e-6)


@pytest.mark.parametrize(
    ("scaling", "message"),
    [
        (("dynamic", 2.0), "the first entry can be linear, llama3, yarn"),
        (("linear",), "linear takes 1 numbers greater than 0: factor"),
        (("linear", 0.0), "linear takes 1 numbers greater than 0"),
        (("llama3", 8, 1, "4", 16), "llama3 takes 4 numbers greater than 0: factor, low_freq"),
        (("llama3", 8, 4, 4, 16), "low_freq_factor must be less than high_freq_factor"),
    ],
)
def test_scalings_that_are_none(scaling, message):
    with pytest.raises(InputError, match=message):
        check_scaling(scaling)


def test_every_scaling_is_checked_here():
    assert {scaling[0] for _, scaling in RECORDED if scaling} == SCALINGS.keys()


def test_pairs_are_rotated_by_position_times_frequency():
    """As complex numbers, x[i] + i x[i + G/2] times exp(i position frequency[i])."""
    x = np.random.default_rng(0).normal(size=(2, 5, 3, 16)).astype(np.float32)
    positions = np.arange(10).reshape(2, 5) * 7
    frequencies = 10_000.0 ** (-np.arange(8) / 8)
    pairs = x[..., :8] + 1j * x[..., 8:]
    turned = pairs * np.exp(1j * positions[..., None, None] * frequencies)
    expected = np.concatenate((turned.real, turned.imag), axis=-1)
    np.testing.assert_allclose(rotate(jnp.asarray(x), jnp.asarray(positions)), expected, atol=2e-5)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_halves_swapped_by_a_product_give_the_same(dtype):
    x, d = (jax.random.normal(jax.random.key(n), (2, 5, 3, 8)) for n in range(2))
    positions = jnp.arange(10).reshape(2, 5)
    outcomes = []
    for by_product in (False, True):

        def turn(x, by_product=by_product):
            return rotate(x, positions, dtype=jnp.float32, swap_by_product=by_product)

        y, pull_back = jax.vjp(turn, x.astype(dtype))
        outcomes.append((y, *pull_back(d)))
    (y, dx), (y_by_product, dx_by_product) = outcomes
    assert y_by_product.dtype == jnp.float32 and dx_by_product.dtype == dtype
    np.testing.assert_allclose(y_by_product, y, rtol=0, atol=1e-6)
    digits = 2**-8 if dtype == jnp.bfloat16 else 1e-6  # the gradient is rounded to x's dtype
    np.testing.assert_allclose(
        np.float32(dx_by_product), np.float32(dx), rtol=digits, atol=2 * digits
    )


def test_what_a_folder_leaves_out_of_yarn_has_the_librarys_values():
    folder = {"rope_theta": 1e6, "rope_scaling": {"type": "yarn", "factor": 4.0}}
    assert rotary_from_json(folder, 32768) == {"rope_theta": 1e6, "rope_scaling": YARN}
