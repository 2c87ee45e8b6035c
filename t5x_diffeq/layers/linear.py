"""A linear map of any rank: the module owns the kernel, the caller owns the einsum."""

from math import prod

import jax.numpy as jnp
from flax import linen as nn
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from t5x_diffeq.layers.parameter import declare


class Linear(nn.Module):
    """`einsum(equation, x, kernel) + bias`.

    Attributes:
      shape: the kernel's shape, inputs first, e.g. `(D, 3, H, G)` for fused q, k and v. Axes
        that are sharded stay axes: splitting a fused `[D, 3D]` along its sharded axis would
        move data between devices.
      axes: the kernel's logical axes, one per dimension.
      num_inputs: how many leading dimensions are contracted; the bias has the others.
      use_bias: whether to add a bias.
      init_std: standard deviation of the kernel's normal initialisation.
      writes_residual: whether the result is added to the residual stream.
      dtype: dtype of the computation.
    """

    shape: tuple[int, ...]
    axes: tuple[str | None, ...]
    num_inputs: int = 1
    use_bias: bool = False
    init_std: float = 0.02
    writes_residual: bool = False
    dtype: DTypeLike = jnp.float32

    @nn.compact
    def __call__(self, equation: str, x: Float[Array, "..."]) -> Float[Array, "..."]:
        """Applies the map along the axes that `equation` names."""
        kernel = declare(
            self,
            "kernel",
            nn.initializers.normal(self.init_std),
            self.shape,
            self.axes,
            "kernel",
            writes_residual=self.writes_residual,
            fan_in=prod(self.shape[: self.num_inputs]),
        )
        y = jnp.einsum(equation, x, kernel.astype(self.dtype))
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
            y += bias.astype(self.dtype)
        return y
