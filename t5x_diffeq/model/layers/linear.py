"""A linear map from any axes to any axes.

It adds a low-rank branch, `x W + (x a) b` (LoRA, Hu et al. 2021), when the collection `ADAPTERS`
holds `a` and `b` for it.
"""

from math import prod

import jax.numpy as jnp
from flax import linen as nn
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from t5x_diffeq.model.layers.fp8 import fp8_tensordot
from t5x_diffeq.model.layers.parameter import declare

ADAPTERS = "adapters"  # the collection of low-rank branches, which no hypernetwork makes


class Linear(nn.Module):
    """`x W + b`, contracted over the last axes of x."""

    # the kernel's shape, inputs first, e.g. `(D, 3, H, G)` for fused q, k and v. Sharded axes are
    # not merged with others: splitting a fused `[D, 3D]` along its sharded axis would move data
    # between devices.
    shape: tuple[int, ...]
    axes: tuple[str | None, ...]  # the kernel's logical axes, one per dimension
    num_inputs: int = 1  # number of leading dimensions that are contracted; the bias has the others
    use_bias: bool = False  # whether to add a bias
    init_std: float = 0.02
    writes_residual: bool = False
    dtype: DTypeLike = jnp.float32
    # whether `x W` has fp8 operands (`fp8.fp8_tensordot`); the low-rank branch never has
    fp8: bool = False
    # whether batch and length are one axis of the product. The gradient of W contracts over them,
    # and with two axes a CPU first transposes the whole output; the copy outlasts the product.
    merge_tokens: bool = True

    @nn.compact
    def __call__(self, x: Float[Array, "..."]) -> Float[Array, "..."]:
        """Maps `[..., *inputs]` to `[..., *outputs]`."""
        kernel = declare(
            self,
            "kernel",
            nn.initializers.normal(self.init_std),
            self.shape,
            self.axes,
            "kernel",
            writes_residual=self.writes_residual,
            fan_in=prod(self.shape[: self.num_inputs]),
            takes_adapter=True,
        )
        leading = x.shape[: x.ndim - self.num_inputs]
        if self.merge_tokens:
            x = x.reshape(-1, *x.shape[len(leading) :])
        product = fp8_tensordot if self.fp8 else jnp.tensordot
        y = product(x, kernel.astype(self.dtype), self.num_inputs)
        if self.has_variable(ADAPTERS, "a"):
            a: Array = self.get_variable(ADAPTERS, "a")
            b: Array = self.get_variable(ADAPTERS, "b")
            y += jnp.tensordot(jnp.tensordot(x, a, self.num_inputs), b, 1)
        if self.use_bias:
            bias = declare(
                self,
                "bias",
                nn.initializers.zeros,
                self.shape[self.num_inputs :],
                self.axes[self.num_inputs :],
                "bias",
                writes_residual=self.writes_residual,
            )
            # The sum is in float32, because the bias's gradient is a sum over all tokens.
            y = (y.astype(jnp.float32) + bias.astype(jnp.float32)).astype(self.dtype)
        return y.reshape(*leading, *self.shape[self.num_inputs :])
