"""LayerNorm and RMSNorm, in one module."""

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from t5x_diffeq.layers.parameter import declare


class Norm(nn.Module):
    """`(x - mean) / sqrt(var + eps) * scale + shift`, over the last axis, in float32.

    Attributes:
      centred: whether to subtract the mean (LayerNorm), or only divide by the root mean square
        (RMSNorm, Zhang and Sennrich 2019).
      use_shift: whether to add a shift.
      epsilon: added to the variance.
      dtype: dtype of the result.
    """

    centred: bool
    use_shift: bool
    epsilon: float
    dtype: DTypeLike = jnp.float32

    @nn.compact
    def __call__(self, x: Float[Array, "... D"]) -> Float[Array, "... D"]:
        """Normalises each vector of `x`."""
        width = (x.shape[-1],)
        scale = declare(self, "scale", nn.initializers.ones, width, ("embed",), "scale")
        y = x.astype(jnp.float32)
        if self.centred:
            y -= y.mean(-1, keepdims=True)
        y *= jax.lax.rsqrt(jnp.square(y).mean(-1, keepdims=True) + self.epsilon)
        y *= scale
        if self.use_shift:
            y += declare(self, "shift", nn.initializers.zeros, width, ("embed",), "shift")
        return y.astype(self.dtype)
