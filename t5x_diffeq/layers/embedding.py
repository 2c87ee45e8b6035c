"""Tables of vectors, for tokens and for learned positions."""

import jax.numpy as jnp
from flax import linen as nn
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from t5x_diffeq.layers.parameter import declare


class Embedding(nn.Module):
    """A table `[size, D]`.

    Attributes:
      size: number of rows.
      embed_dim: width D.
      axis: logical axis of the rows.
      init_std: standard deviation of the initialisation.
      dtype: dtype of the vectors.
    """

    size: int
    embed_dim: int
    axis: str | None = "vocab"
    init_std: float = 0.02
    dtype: DTypeLike = jnp.float32

    def setup(self):  # noqa: D102
        self.table = declare(
            self,
            "table",
            nn.initializers.normal(self.init_std),
            (self.size, self.embed_dim),
            (self.axis, "embed"),
            "embedding",
        )

    def __call__(self, indices: Int[Array, "B L"]) -> Float[Array, "B L D"]:
        """The rows at `indices`."""
        # Gathered along its width first, so that the look-up itself moves no activations.
        table = nn.with_logical_constraint(self.table.astype(self.dtype), (self.axis, None))
        vectors = jnp.take(table, indices, axis=0)
        return nn.with_logical_constraint(vectors, ("batch", "length", None))
