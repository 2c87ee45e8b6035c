"""Time features and their embedding (paper, section 4.2)."""

import jax
import jax.numpy as jnp
from flax import linen as nn
from jaxtyping import Array, Float

from t5x_diffeq.array_types import Times
from t5x_diffeq.layers.parameter import declare


def time_features(
    times: Times, num_frequencies: int, time_scale: float
) -> Float[Array, "nodes features"]:
    """gamma(t) = [t, sin(c t w), cos(c t w)], w_j = 10000^(-j/S); 2S + 1 features.

    Float32 whatever the model's dtype: bfloat16 times multiplied by c = 1000 are noise.

    Args:
      times: depth in [0, 1].
      num_frequencies: S.
      time_scale: c, 1000 in the paper.
    """
    t = times.astype(jnp.float32)[:, None]
    w = 10_000.0 ** (-jnp.arange(num_frequencies, dtype=jnp.float32) / num_frequencies)
    return jnp.concatenate((t, jnp.sin(time_scale * t * w), jnp.cos(time_scale * t * w)), axis=-1)


class TimeEmbedding(nn.Module):
    """e(t) = Linear2(SiLU(Linear1(gamma(t)))), in float32.

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
