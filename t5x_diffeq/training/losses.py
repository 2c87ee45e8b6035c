"""Next-token cross entropy, in nats per token, whose logits never all exist at once."""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int, Num

from t5x_diffeq.array_types import State, Tokens
from t5x_diffeq.layers.mesh import mesh_axes, on_shards

Axes = tuple[str, ...]


def token_losses(
    y: State,
    head: Float[Array, "V D"],
    targets: Tokens,
    *,
    vocab_size: int,
    chunk: int,
    of_chunk: Callable[..., tuple[Array, Array]] | None = None,
) -> tuple[Num[Array, "B L"], Num[Array, "B L"]]:
    """-log p(target) of each token, and log of the softmax's normaliser; float32.

    Each device gathers the head along its width once, then goes through its own tokens chunk by
    chunk; logits are made again backward. Under automatic sharding every chunk would gather the
    head. Where the vocabulary is split, only sums over it are exchanged.

    Args:
      y: the model's last state, normalised.
      head: a vector per token of the padded vocabulary.
      targets: the tokens to be predicted.
      vocab_size: tokens that exist; the rest is padding and has probability 0.
      chunk: tokens per device whose logits exist at once.
      of_chunk: makes two numbers of each token; None: `chunk_losses`, those named above.
    """
    rows, vocab, width = (mesh_axes(logical) for logical in ("batch", "vocab", "embed"))
    by_row = PartitionSpec(rows or None)
    local = partial(
        local_losses,
        rows=rows,
        vocab=vocab,
        width=width,
        vocab_size=vocab_size,
        chunk=chunk,
        of_chunk=of_chunk or chunk_losses,
    )
    in_specs = (by_row, PartitionSpec(vocab or None, width or None), by_row)
    return on_shards(local, in_specs, (by_row, by_row))(y, head, targets)


def local_losses(
    y: Float[Array, "b L D"],
    head: Float[Array, "v d"],
    targets: Tokens,
    *,
    rows: Axes,
    vocab: Axes,
    width: Axes,
    vocab_size: int,
    chunk: int,
    of_chunk: Callable[..., tuple[Array, Array]],
) -> tuple[Num[Array, "b L"], Num[Array, "b L"]]:
    """One device's part; tokens are split over `rows`, `head` over `vocab` and `width`."""
    if width:
        head = jax.lax.all_gather(head, width, axis=1, tiled=True)
    # Float32 here makes its gradient a float32 sum over chunks; each uses it in y's dtype.
    head = head.astype(jnp.float32)
    # Where a value begins to vary over devices, its gradient is summed over them: ahead of the
    # loop, so that this is done once.
    head, y = vary(head, rows, (*vocab, *width)), vary(y, (*vocab, *width), rows)
    first = jax.lax.axis_index(vocab) * len(head) if vocab else 0
    chunk = min(chunk, targets.size)
    missing = -targets.size % chunk
    states = jnp.pad(y.reshape(-1, y.shape[-1]), ((0, missing), (0, 0)))
    wanted = jnp.pad(targets.reshape(-1), (0, missing))
    losses, normalisers = jax.lax.map(
        jax.checkpoint(partial(of_chunk, head, first, vocab, vocab_size)),
        (states.reshape(-1, chunk, y.shape[-1]), wanted.reshape(-1, chunk)),
    )
    shape, size = targets.shape, targets.size
    return losses.reshape(-1)[:size].reshape(shape), normalisers.reshape(-1)[:size].reshape(shape)


def chunk_losses(
    head: Float[Array, "v D"],
    first: Array | int,
    vocab: Axes,
    vocab_size: int,
    tokens: tuple[Float[Array, "chunk D"], Array],
) -> tuple[Float[Array, " chunk"], Float[Array, " chunk"]]:
    """Losses and log normalisers of a chunk; `head` holds the vocabulary from `first` on."""
    states, targets = tokens
    logits, numbers = chunk_logits(head, first, vocab_size, states)
    highest = jax.lax.stop_gradient(logits.max(-1))
    highest = jax.lax.stop_gradient(jax.lax.pmax(highest, vocab)) if vocab else highest
    total = jnp.exp(logits - highest[:, None]).sum(-1)
    chosen = jnp.where(numbers == targets[:, None], logits, 0).sum(-1)
    if vocab:
        total, chosen = jax.lax.psum((total, chosen), vocab)
    normaliser = jnp.log(total) + highest
    return normaliser - chosen, normaliser


def chunk_choices(
    head: Float[Array, "v D"],
    first: Array | int,
    vocab: Axes,
    vocab_size: int,
    tokens: tuple[Float[Array, "chunk D"], Array],
) -> tuple[Float[Array, " chunk"], Int[Array, " chunk"]]:
    """Losses of a chunk, and the likeliest token at each place: of equal ones the first."""
    losses, _ = chunk_losses(head, first, vocab, vocab_size, tokens)
    logits, numbers = chunk_logits(head, first, vocab_size, tokens[0])  # the compiler's same ones
    highest = logits.max(-1)
    highest = jax.lax.pmax(highest, vocab) if vocab else highest
    best = jnp.where(logits == highest[:, None], numbers, vocab_size).min(-1)
    return losses, jax.lax.pmin(best, vocab) if vocab else best


def chunk_logits(
    head: Float[Array, "v D"], first: Array | int, vocab_size: int, states: Float[Array, "chunk D"]
) -> tuple[Float[Array, "chunk v"], Int[Array, " v"]]:
    """Logits of a chunk, lowest where there is no token, and the tokens that they are of."""
    logits = dot_products(states, head)
    numbers = first + jnp.arange(len(head))
    return jnp.where(numbers < vocab_size, logits, jnp.finfo(jnp.float32).min), numbers


def vary(x: Float[Array, "..."], over: Axes, already: Axes) -> Float[Array, "..."]:
    """x as a value that may differ over the mesh axes `over`, which it does over `already`."""
    missing = tuple(axis for axis in over if axis not in already)
    return jax.lax.pcast(x, missing, to="varying") if missing else x


@jax.custom_vjp
def dot_products(
    states: Float[Array, "chunk D"], head: Float[Array, "v D"]
) -> Float[Array, "chunk v"]:
    """Each state's products with the head's vectors: factors in the states' dtype, float32 sums.

    So they are backward: JAX's own transpose would multiply the float32 gradient of the logits,
    and at the pace of float32.
    """
    head = head.astype(states.dtype)
    return jnp.einsum("td,vd->tv", states, head, preferred_element_type=jnp.float32)


def dot_products_forward(
    states: Float[Array, "chunk D"], head: Float[Array, "v D"]
) -> tuple[Float[Array, "chunk v"], tuple[Array, Array]]:
    """`dot_products`, and what its backward pass needs."""
    return dot_products(states, head), (states, head)


def dot_products_backward(
    inputs: tuple[Array, Array], d_logits: Float[Array, "chunk v"]
) -> tuple[Float[Array, "chunk D"], Float[Array, "v D"]]:
    """The gradients on the states, in their dtype, and on the head, in float32."""
    states, head = inputs
    d_logits = d_logits.astype(states.dtype)
    product = partial(jnp.einsum, preferred_element_type=jnp.float32)
    d_states = product("tv,vd->td", d_logits, head.astype(states.dtype)).astype(states.dtype)
    return d_states, product("tv,td->vd", d_logits, states)


dot_products.defvjp(dot_products_forward, dot_products_backward)
