"""A function of whole matrices, where each device holds a part of every matrix.

The devices exchange parts so that each has some of the matrices whole, and get their own parts back
afterwards. While the function runs, they exchange nothing. The alternative, to let the compiler
gather what each product needs, moves every matrix in every iteration.
"""

from collections.abc import Callable, Sequence
from math import prod

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from t5x_diffeq.model.layers.mesh import mesh_sizes


def map_whole_matrices(
    function: Callable[[Float[Array, "some m k"]], Float[Array, "some m k"]],
    parts: Float[Array, "many rows columns"],
    row_axes: Sequence[str] = (),
    column_axes: Sequence[str] = (),
) -> Float[Array, "many rows columns"]:
    """This device's parts of `function(matrices)`; under `jax.shard_map`, if there is a mesh.

    The function may get the rows and the columns of a matrix in another order: those that were on
    one device are contiguous.

    Args:
      function: maps a stack of matrices to a stack of the same shape, each by itself, and zeros to
        zeros.
      parts: this device's part of each matrix.
      row_axes: the mesh axes that split the rows.
      column_axes: the mesh axes that split the columns.
    """
    sizes = mesh_sizes()
    exchanges = [(axis, 1) for axis in row_axes] + [(axis, 2) for axis in column_axes]
    splitting = {*row_axes, *column_axes}
    copies = tuple(axis for axis in sizes if sizes[axis] > 1 and axis not in splitting)
    num_copies = prod(sizes[axis] for axis in copies)
    holders = num_copies * prod(sizes[axis] for axis, _ in exchanges)

    # Zero matrices fill up the stack, so that all devices get equally many.
    whole = jnp.pad(parts, ((0, -len(parts) % holders), (0, 0), (0, 0)))
    for axis, dimension in exchanges:
        whole = jax.lax.all_to_all(whole, axis, 0, dimension, tiled=True)
    if copies:  # of the same matrices: each takes its share
        share = len(whole) // num_copies
        whole = jax.lax.dynamic_slice_in_dim(whole, jax.lax.axis_index(copies) * share, share)
    whole = function(whole)
    if copies:
        whole = jax.lax.all_gather(whole, copies, tiled=True)
    for axis, dimension in reversed(exchanges):
        whole = jax.lax.all_to_all(whole, axis, dimension, 0, tiled=True)
    return whole[: len(parts)]
