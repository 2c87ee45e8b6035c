"""A linear map, whatever the axes, and whether or not their tokens are merged."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from t5x_diffeq.model.layers.linear import Linear


@pytest.mark.parametrize(("num_inputs", "axes"), [(1, "bld,dhg->blhg"), (2, "bldh,dhg->blg")])
def test_values_and_gradients_are_those_of_einsum(num_inputs, axes):
    shape = (3, 4, 5)
    keys = jax.random.split(jax.random.key(0), 3)
    x = jax.random.normal(keys[0], (2, 7, *shape[:num_inputs]))
    kernel = jax.random.normal(keys[1], shape)
    bias = jax.random.normal(keys[2], shape[num_inputs:])

    def expected(kernel, x):
        return jnp.sin(jnp.einsum(axes, x, kernel) + bias).sum()

    for merged in (True, False):
        linear = Linear(shape, (None,) * 3, num_inputs, use_bias=True, merge_tokens=merged)

        def loss(kernel, x, linear=linear):
            return jnp.sin(linear.apply({"params": {"kernel": kernel, "bias": bias}}, x)).sum()

        for found, wanted in zip(
            jax.value_and_grad(loss, (0, 1))(kernel, x)[1],
            jax.value_and_grad(expected, (0, 1))(kernel, x)[1],
            strict=True,
        ):
            np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-5)
        traced = str(jax.make_jaxpr(loss)(kernel, x))
        assert ("reshape" in traced) == merged
