"""Products on fp8 operands are the products of the rounded operands, and so are their gradients."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from t5x_diffeq.model.layers.fp8 import fp8_tensordot
from t5x_diffeq.model.ode.integrate import integrate
from t5x_diffeq.model.ode.solvers import VectorField


def arrays(*shapes):
    keys = jax.random.split(jax.random.key(0), len(shapes))
    return [jax.random.normal(k, s, jnp.bfloat16) for k, s in zip(keys, shapes, strict=True)]


def rounded(x, dtype):
    """x as fp8 with its largest entry at the dtype's largest, as float64."""
    scale = np.float32(np.abs(np.float32(x)).max()) / np.float32(ml_dtypes.finfo(dtype).max)
    return (np.float32(x) / scale).astype(dtype).astype(np.float64) * scale


SHAPES = {  # x, kernel, and how many dimensions are contracted
    "mlp": ((6, 32), (32, 48), 1),
    "heads": ((6, 32), (32, 3, 2, 8), 1),
    "output": ((6, 2, 16), (2, 16, 32), 2),
}


@pytest.mark.parametrize("shapes", SHAPES.values(), ids=SHAPES)
def test_product_and_gradients_are_those_of_the_rounded_arrays(shapes):
    *shapes, axes = shapes
    x, kernel = arrays(*shapes)
    y, pull_back = jax.vjp(lambda x, kernel: fp8_tensordot(x, kernel, axes), x, kernel)
    (d,) = arrays(y.shape)
    dx, dkernel = pull_back(d)
    x8, k8 = (rounded(a, ml_dtypes.float8_e4m3fn) for a in (x, kernel))
    d8 = rounded(d, ml_dtypes.float8_e5m2)
    outputs = d.ndim - 1
    expected = (
        np.tensordot(x8, k8, axes),
        np.tensordot(d8, k8, (range(1, d.ndim), range(axes, axes + outputs))),
        np.tensordot(x8, d8, (0, 0)),
    )
    for found, exact in zip((y, dx, dkernel), expected, strict=True):
        assert found.dtype == jnp.bfloat16
        # The sum and its multiple are each rounded to bfloat16, 2^-9 of the entry at most. With
        # several dimensions of outputs, jax 0.12 on a CPU also rounds the sum of each two terms.
        np.testing.assert_allclose(
            np.float64(found), exact, rtol=2.1 * 2**-9, atol=5e-3 * np.abs(exact).max()
        )


def test_zeros_stay_zeros_and_nan_is_seen():
    x, kernel = arrays((6, 32), (32, 48))
    assert not fp8_tensordot(0 * x, kernel, 1).any()
    assert jnp.isnan(fp8_tensordot(x.at[0, 0].set(jnp.nan), kernel, 1)).all()
    assert jnp.isnan(fp8_tensordot(x.at[0, 0].set(jnp.inf), kernel, 1)).any()


@pytest.mark.parametrize("remat", ["full", "keep:fp8", "keep:mlp,fp8"])
def test_kept_operands_give_the_same_gradient(remat):
    """Also the largest ones, which a policy that stores e4m3 itself turns into NaN."""
    y, kernel = arrays((6, 32), (32, 32))

    def gradient(remat):
        def loss(kernel):
            field = VectorField(lambda W, y: fp8_tensordot(y, W, 1), lambda W, y: 0 * y)
            end = integrate(
                lambda _: lambda key: field,
                jnp.stack([kernel] * 2) / 8,
                y,
                scheme="euler",
                num_steps=2,
                step_size=0.5,
                remat=remat,
            )
            return (end.astype(jnp.float32) ** 2).sum()

        return jax.jit(jax.grad(loss))(kernel)

    assert jnp.isfinite(gradient("none")).all()
    np.testing.assert_array_equal(gradient(remat), gradient("none"))
