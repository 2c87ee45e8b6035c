"""LayerNorm and RMSNorm, in one module."""

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from t5x_diffeq.model.layers.parameter import declare


class Norm(nn.Module):
    """`(x - mean) / sqrt(var + eps) * scale + shift`, over the last axes, in float32."""

    # whether to subtract the mean (LayerNorm), or only divide by the root mean square (RMSNorm,
    # Zhang and Sennrich 2019)
    centred: bool
    use_shift: bool  # whether to add a shift
    epsilon: float
    # logical axes of the scale, one per axis of `x` that is normalised
    axes: tuple[str | None, ...] = ("embed",)
    writes_residual: bool = False
    dtype: DTypeLike = jnp.float32
    unrolled: bool = False  # whether the body of the loop over solver steps has several steps

    @nn.compact
    def __call__(self, x: Float[Array, "... D"]) -> Float[Array, "... D"]:
        """Normalises each vector of `x`, or each matrix if there are two `axes`."""
        shape, over = x.shape[-len(self.axes) :], tuple(range(-len(self.axes), 0))

        def parameter(role: str, initializer: nn.initializers.Initializer) -> Array:
            return declare(
                self,
                role,
                initializer,
                shape,
                self.axes,
                role,
                writes_residual=self.writes_residual,
            )

        scale = parameter("scale", nn.initializers.ones)
        y = x.astype(jnp.float32)
        if self.centred:
            y -= y.mean(over, keepdims=True)
        y *= jax.lax.rsqrt(jnp.square(y).mean(over, keepdims=True) + self.epsilon)
        y *= scale
        if self.use_shift:
            y += parameter("shift", nn.initializers.zeros)
        y = y.astype(self.dtype)
        # Without a barrier, XLA stores the norms of unrolled steps for the backward pass instead of
        # recomputing them: 4 GiB for Llama-1B's ODE on 8 H100s, and no faster.
        return jax.lax.optimization_barrier(y) if self.unrolled else y
