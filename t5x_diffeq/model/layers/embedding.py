"""Tables of vectors, for tokens and for learned positions."""

from functools import partial

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax.sharding import PartitionSpec
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from t5x_diffeq.model.layers.mesh import mesh_axes, on_shards, shards_over, sum_shards
from t5x_diffeq.model.layers.parameter import declare

Indices = Int[Array, "B L"]
Vectors = Float[Array, "B L D"]


class Embedding(nn.Module):
    """A table `[size, D]`."""

    size: int
    embed_dim: int
    axis: str | None = "vocab"  # logical axis of the rows
    init_std: float = 0.02
    dtype: DTypeLike = jnp.float32  # dtype in which devices exchange and read the table
    state_dtype: DTypeLike = jnp.float32  # dtype of the vectors

    def setup(self):  # noqa: D102
        self.table = declare(
            self,
            "table",
            nn.initializers.normal(self.init_std),
            (self.size, self.embed_dim),
            (self.axis, "embed"),
            "embedding",
        )

    def __call__(self, indices: Indices) -> Vectors:
        """The rows at `indices`."""
        dtypes = jnp.dtype(self.dtype), jnp.dtype(self.state_dtype)
        return _rows(self.table, indices, self.size, self.axis, *dtypes)


@partial(jax.custom_vjp, nondiff_argnums=(2, 3, 4, 5))
def _rows(
    table: Float[Array, "V D"],
    indices: Indices,
    size: int,
    axis: str | None,
    dtype: DTypeLike,
    state_dtype: DTypeLike,
) -> Vectors:
    """The rows of the table at `indices`, read in `dtype`; the gradient is summed in float32.

    If a token occurs thousands of times, its row of the gradient has as many summands. In bfloat16,
    which has 8 significant bits, such a sum stops growing when it is some 256 times as large as its
    summands. Without a gradient of our own, the sum would be in float32 only if the table were read
    in float32, and devices would gather twice the bytes.
    """
    # The table is gathered along its width first, so that the look-up moves no activations.
    full_width = nn.with_logical_constraint(table.astype(dtype), (axis, None))
    vectors = jnp.take(full_width, indices, axis=0)
    vectors = nn.with_logical_constraint(vectors, ("batch", "length", None))
    return vectors.astype(state_dtype)


def _rows_forward(table: Float[Array, "V D"], indices: Indices, *static: object) -> tuple:
    return _rows(table, indices, *static), indices


def _rows_backward(
    size: int,
    axis: str | None,
    dtype: DTypeLike,
    state_dtype: DTypeLike,
    indices: Indices,
    d_vectors: Vectors,
) -> tuple[Float[Array, "V D"], None]:
    """The transpose of the look-up, in float32 whatever the dtypes of the forward pass.

    Each device sums the rows of its own tokens, and the devices exchange shards of these sums.
    Automatic sharding would exchange whole sums where the table is sharded along its width.
    """
    del dtype, state_dtype
    d_vectors = nn.with_logical_constraint(d_vectors.astype(jnp.float32), ("batch", "length", None))
    rows, length = mesh_axes("batch"), mesh_axes("length")
    vocab, width = mesh_axes(axis) if axis else (), mesh_axes("embed")

    def add_rows(indices: Indices, d_vectors: Vectors) -> Float[Array, "v _"]:
        num_rows = size // shards_over(vocab)
        local = indices - (jax.lax.axis_index(vocab) * num_rows if vocab else 0)
        is_here = (local >= 0) & (local < num_rows)
        d_table = jnp.zeros((num_rows, d_vectors.shape[-1]), jnp.float32)
        # `drop` alone isn't enough: negative indices would count from the end.
        d_table = d_table.at[jnp.where(is_here, local, num_rows)].add(d_vectors, mode="drop")
        return sum_shards(d_table, (*rows, *length), width)

    by_token = PartitionSpec(rows or None, length or None)
    table_spec = PartitionSpec(vocab or None, width or None)
    return on_shards(add_rows, (by_token, by_token), table_spec)(indices, d_vectors), None


_rows.defvjp(_rows_forward, _rows_backward)
