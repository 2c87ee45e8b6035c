"""Time embeddings: e(t) of the features of t (`time_basis`)."""

import jax
import jax.numpy as jnp
from flax import linen as nn
from jaxtyping import Array, Float

from t5x_diffeq.model.layers.parameter import declare


class TimeEmbedding(nn.Module):
    """e(t) = Linear2(SiLU(Linear1(gamma(t)))), in float32 (paper, section 4.2).

    Attributes:
      width: output width T of both linears.
      hidden_std: standard deviation of Linear1's kernel at initialisation.
      output_std: the same for Linear2's kernel.
      step_multiplier: factor on the optimizer's step for Linear1's kernel and both biases.
      output_multiplier: the same for Linear2's kernel.
    """

    width: int
    hidden_std: float = 0.02
    output_std: float = 0.02
    step_multiplier: float = 1.0
    output_multiplier: float = 1.0

    @nn.compact
    def __call__(self, features: Float[Array, "nodes features"]) -> Float[Array, "nodes T"]:
        """The embedding of each time."""
        hidden = self._linear("hidden", features, self.hidden_std, self.step_multiplier)
        return self._linear("output", jax.nn.silu(hidden), self.output_std, self.output_multiplier)

    def _linear(
        self, name: str, x: Float[Array, "nodes _"], std: float, kernel_multiplier: float
    ) -> Float[Array, "nodes T"]:
        """`x @ kernel + bias`; both are small, so they are replicated on every device."""
        kernel = declare(
            self,
            f"{name}_kernel",
            nn.initializers.normal(std),
            (x.shape[-1], self.width),
            (None, "time_embed"),
            "time_embedding",
            step_multiplier=kernel_multiplier,
        )
        bias = declare(
            self,
            f"{name}_bias",
            nn.initializers.zeros,
            (self.width,),
            ("time_embed",),
            "time_embedding",
            step_multiplier=self.step_multiplier,
        )
        return jnp.dot(x, kernel, precision="highest") + bias


class LinearTimeEmbedding(nn.Module):
    """e(t) = C^T gamma(t), in float32: a row of C for each feature.

    If the features are the hats of `table:K`, the rows are the values of e at their knots.

    Attributes:
      width: T.
      std: standard deviation of C at initialisation.
      step_multiplier: factor on the optimizer's step for C.
    """

    width: int
    std: float = 0.02
    step_multiplier: float = 1.0

    @nn.compact
    def __call__(self, features: Float[Array, "nodes features"]) -> Float[Array, "nodes T"]:
        """The embedding of each time."""
        C = declare(
            self,
            "coefficients",
            nn.initializers.normal(self.std),
            (features.shape[-1], self.width),
            (None, "time_embed"),
            "time_embedding",
            step_multiplier=self.step_multiplier,
        )
        return jnp.dot(features, C, precision="highest")
