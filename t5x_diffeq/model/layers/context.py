"""Splits sequences that are too long for a device over the mesh axes of the logical axis `length`.

Each of C devices holds two of a sequence's 2 C chunks: device i the chunks i and 2 C - 1 - i. In
this zig-zag order all devices have the same number of causal scores to compute, because a chunk
that attends to few tokens is paired with one that attends to many (Dubey et al. 2024, section
3.3.2, where keys and values are gathered, too).
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int

from t5x_diffeq.model.layers.array_types import Order, Places, Segments, State
from t5x_diffeq.model.layers.mesh import mesh_axes, on_shards, shards_over, spec_of


def length_shards() -> int:
    """The number of devices C that share each sequence, under the rules of the context."""
    return shards_over(mesh_axes("length"))


def zigzag_order(length: int, shards: int) -> Int[np.ndarray, " L"]:
    """Each token's index in its row, in the order in which `shards` devices hold the tokens."""
    chunks = np.arange(length, dtype=np.int32).reshape(2 * shards, -1)
    return np.stack([chunks[:shards], chunks[: shards - 1 : -1]], axis=1).reshape(-1)


def to_zigzag(y: State, places: Places) -> tuple[State, Places]:
    """A state and its places with the tokens in zig-zag order; unchanged if C = 1.

    The length must be divisible by 2 C.
    """
    shards = length_shards()
    if shards == 1:
        return y, places
    positions, segments = places.positions, places.segments
    order = jnp.broadcast_to(zigzag_order(y.shape[1], shards), y.shape[:2])
    segments = None if segments is None else _exchange(segments)
    return _exchange(y), Places(_exchange(positions), segments, order)


def from_zigzag(y: Float[Array, "B L *D"]) -> Float[Array, "B L *D"]:
    """Values of tokens, such as a state, in the order of the row; the inverse of `to_zigzag`."""
    return y if length_shards() == 1 else _exchange(y, back=True)


def on_local_tokens(
    attend: Callable[..., Array],
    how: tuple[Any, Any],
    q: Float[Array, "B L H G"],
    k: Float[Array, "B L K G"],
    v: Float[Array, "B L K G"],
    segments: Segments | None,
) -> Float[Array, "B L H G"]:
    """Attention of each device's own tokens to all tokens of their rows.

    Args:
      attend: called with the device's part of the arrays in `how`, the device's queries, the keys
        and values of whole rows in the order of the row, and the segments of queries and of keys,
        or None.
      how: an array or a tree of arrays that `attend` needs besides q, k and v, and its partition
        specs.
      q: queries, in zig-zag order, as all arguments are.
    """
    spec = spec_of(("batch", "length", "heads", "head_dim"))
    state, split = how

    def on_device(state: Any, q: Array, k: Array, v: Array, segments: Array | None) -> Array:
        key_segments = None if segments is None else _gather_in_order(segments)
        return attend(state, q, _gather_in_order(k), _gather_in_order(v), segments, key_segments)

    in_specs = (split, spec, spec, spec, PartitionSpec(*spec[:2]))
    # Pallas' kernels don't declare over which mesh axes their outputs vary.
    return on_shards(on_device, in_specs, spec, check_vma=False)(state, q, k, v, segments)


def attend_in_order(
    order: Order,
    q: Float[Array, "B L H G"],
    k: Float[Array, "B M K G"],
    v: Float[Array, "B M K G"],
    query_segments: Segments | None,
    key_segments: Int[Array, "B M"] | None,
) -> Float[Array, "B L H G"]:
    """XLA's attention of queries to whole rows; `order` has the queries' indices in their rows."""
    seen = order[:, None, :, None] >= jnp.arange(k.shape[1])
    if query_segments is not None and key_segments is not None:
        seen &= query_segments[:, None, :, None] == key_segments[:, None, None, :]
    return jax.nn.dot_product_attention(q, k, v, mask=seen, implementation="xla")


def _gather_in_order(x: Array) -> Array:
    """Whole rows `[b, L, ...]`, in their own order, from each device's tokens `[b, L / C, ...]`."""
    chunks = x.reshape(len(x), 2, -1, *x.shape[2:])
    gathered = jax.lax.all_gather(chunks, mesh_axes("length"), axis=1)
    # Device i has the chunks i and 2 C - 1 - i, so the second chunks come in reverse order.
    ordered = jnp.concatenate([gathered[:, :, 0], gathered[:, ::-1, 1]], axis=1)
    return ordered.reshape(len(x), -1, *x.shape[2:])


def _exchange(x: Array, back: bool = False) -> Array:
    """Tokens `[B, L, ...]` moved between the devices, into zig-zag order or back."""
    spec = PartitionSpec(*spec_of(("batch", "length")))
    return on_shards(lambda part: _exchange_halves(part, back), (spec,), spec)(x)


def _exchange_halves(x: Array, back: bool) -> Array:
    """One device's part. In a row's own order, device i has the chunks 2 i and 2 i + 1.

    Chunk n goes to device min(n, 2 C - 1 - n). So each device gets an even chunk and an odd chunk.
    On devices with an even number the even chunk comes first, on the others the odd chunk.
    """
    axes = mesh_axes("length")
    shards = jax.lax.axis_size(axes)
    swapped = jax.lax.axis_index(axes) % 2 == 1

    def send(half: Array, parity: int) -> Array:
        numbers = [2 * i + parity for i in range(shards)]
        moves = [(i, min(n, 2 * shards - 1 - n)) for i, n in enumerate(numbers)]
        return jax.lax.ppermute(half, axes, [(b, a) for a, b in moves] if back else moves)

    def swap(a: Array, b: Array) -> tuple[Array, Array]:
        return jnp.where(swapped, b, a), jnp.where(swapped, a, b)

    first, second = jnp.split(x, 2, axis=1)
    if back:
        first, second = swap(first, second)
    first, second = send(first, 0), send(second, 1)
    if not back:
        first, second = swap(first, second)
    return jnp.concatenate([first, second], axis=1)
