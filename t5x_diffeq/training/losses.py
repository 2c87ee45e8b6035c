"""Next-token cross entropy and KL divergence, in nats per token, without ever materialising all
logits.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int, Num

from t5x_diffeq.layers.array_types import State, Tokens
from t5x_diffeq.layers.mesh import mesh_axes, on_shards


class TokenLosses(NamedTuple):
    """What is computed from the logits of each token, in nats; float32.

    A further number per token is computed in `_losses_of_logits`, chunk by chunk. It must leave out
    the logits of padding, and sum over the mesh axes that split the vocabulary.

    Attributes:
      losses: -log p(target).
      normalisers: the log of the softmax's normaliser.
      divergences: KL(teacher || student); None without a teacher.
    """

    losses: Float[Array, "B L"]
    normalisers: Float[Array, "B L"]
    divergences: Float[Array, "B L"] | None = None


StateAndHead = tuple[Float[Array, "B L _"], Float[Array, "V _"]]  # [B, L, D] and [V, D]
_Axes = tuple[str, ...]
_Heads = tuple[Float[Array, "v _"], ...]  # of each model, the width whole
_ChunkOfTokens = tuple[tuple[Float[Array, "chunk _"], ...], Int[Array, " chunk"]]


def token_losses(
    y: State, head: Float[Array, "V D"], targets: Tokens, *, vocab_size: int, chunk: int
) -> TokenLosses:
    """The losses of each token, without a teacher.

    Args:
      y: the model's last state, normalised.
      head: one vector per token of the padded vocabulary.
      targets: the tokens to predict.
      vocab_size: the unpadded vocabulary; the padding has probability 0.
      chunk: tokens per device whose logits exist at once.
    """
    return TokenLosses(*_by_chunk(_losses_of_chunk, [(y, head)], targets, vocab_size, chunk))


def distillation_losses(
    student: StateAndHead,
    teacher: StateAndHead,
    targets: Tokens,
    *,
    vocab_size: int,
    chunk: int,
) -> TokenLosses:
    """The student's losses of each token, and its divergence from the teacher.

    The KL divergence is that of the two distributions of the next token. The teacher gets no
    gradient (Hinton et al. 2015, at temperature 1).

    Args:
      student: its last state, normalised, and its head.
      teacher: likewise; its width may differ, its vocabulary may not.
      targets: the tokens to predict.
      vocab_size: the unpadded vocabulary.
      chunk: tokens per device whose logits exist at once.
    """
    return TokenLosses(
        *_by_chunk(
            _distillation_of_chunk, [student, teacher], targets, vocab_size, chunk, results=3
        )
    )


def losses_and_choices(
    y: State, head: Float[Array, "V D"], targets: Tokens, *, vocab_size: int, chunk: int
) -> tuple[Float[Array, "B L"], Int[Array, "B L"]]:
    """-log p(target) of each token, and the likeliest token; takes `token_losses`' arguments."""
    losses, choices = _by_chunk(_choices_of_chunk, [(y, head)], targets, vocab_size, chunk)
    return losses, choices


def _by_chunk(
    of_chunk: Callable[..., tuple[Array, ...]],
    models: list[StateAndHead],
    targets: Tokens,
    vocab_size: int,
    chunk: int,
    results: int = 2,
) -> tuple[Num[Array, "B L"], ...]:
    """Applies `of_chunk`, which returns some numbers per token, to all tokens chunk by chunk.

    Each device gathers the head along its width once, then goes through its own tokens chunk by
    chunk; the backward pass recomputes logits. Under automatic sharding every chunk would gather
    the head. Where the vocabulary is sharded, only sums over it are exchanged.

    Args:
      of_chunk: takes the heads, where they begin in the vocabulary, the vocabulary's mesh axes and
        size, and a chunk of the states and the targets.
      models: the last state and the head of each model that it compares.
      targets: the tokens to predict.
      vocab_size: the unpadded vocabulary.
      chunk: tokens per device whose logits exist at once.
      results: how many numbers per token it returns.
    """
    rows, length, vocab, width = map(mesh_axes, ("batch", "length", "vocab", "embed"))
    by_token = PartitionSpec(rows or None, length or None)
    local = partial(
        _on_device,
        of_chunk,
        tokens=(*rows, *length),
        vocab=vocab,
        width=width,
        vocab_size=vocab_size,
        chunk=chunk,
    )
    of_model = (by_token, PartitionSpec(vocab or None, width or None))
    in_specs = ([of_model] * len(models), by_token)
    return on_shards(local, in_specs, (by_token,) * results)(models, targets)


def _on_device(
    of_chunk: Callable[..., tuple[Array, ...]],
    models: list[tuple[Float[Array, "b L _"], Float[Array, "v _"]]],
    targets: Tokens,
    *,
    tokens: _Axes,
    vocab: _Axes,
    width: _Axes,
    vocab_size: int,
    chunk: int,
) -> tuple[Num[Array, "b L"], ...]:
    """One device's part, where heads are sharded over `vocab` and `width`."""
    chunk = min(chunk, targets.size)
    missing = -targets.size % chunk

    def prepare(y: Array, head: Array) -> tuple[Array, Array]:
        # Float32 here makes its gradient a float32 sum over chunks and devices; each chunk casts it
        # to y's dtype. The gradient of a value is summed over devices where it is made to vary over
        # them: here, before the loop, so that this happens once, and before the gather, so that it
        # is a sum of shards.
        dtype, head = head.dtype, _vary(head.astype(jnp.float32), tokens, (*vocab, *width))
        if width:
            head = _gather(head, width, dtype)
        y = _vary(y, (*vocab, *width), tokens)
        states = jnp.pad(y.reshape(-1, y.shape[-1]), ((0, missing), (0, 0)))
        return states.reshape(-1, chunk, y.shape[-1]), head

    states, heads = zip(*(prepare(*model) for model in models), strict=True)
    first = jax.lax.axis_index(vocab) * len(heads[0]) if vocab else 0
    wanted = jnp.pad(targets.reshape(-1), (0, missing))
    per_chunk = jax.lax.map(
        jax.checkpoint(partial(of_chunk, heads, first, vocab, vocab_size)),
        (states, wanted.reshape(-1, chunk)),
    )
    shape, size = targets.shape, targets.size
    return tuple(x.reshape(-1)[:size].reshape(shape) for x in per_chunk)


def _losses_of_chunk(
    heads: _Heads, first: Array | int, vocab: _Axes, vocab_size: int, tokens: _ChunkOfTokens
) -> tuple[Float[Array, " chunk"], Float[Array, " chunk"]]:
    """Losses and log normalisers of a chunk; the head holds the vocabulary from `first` on."""
    (states,), targets = tokens
    logits, numbers = _logits_of_chunk(heads[0], first, vocab_size, states)
    return _losses_of_logits(logits, numbers, targets, vocab)


def _losses_of_logits(
    logits: Float[Array, "chunk v"], numbers: Int[Array, " v"], targets: Array, vocab: _Axes
) -> tuple[Float[Array, " chunk"], Float[Array, " chunk"]]:
    """Losses and log normalisers of a chunk's logits, of the tokens `numbers` on each device."""
    highest = _highest(logits, vocab)
    total = jnp.exp(logits - highest[:, None]).sum(-1)
    chosen = jnp.where(numbers == targets[:, None], logits, 0).sum(-1)
    if vocab:
        total, chosen = jax.lax.psum((total, chosen), vocab)
    normaliser = jnp.log(total) + highest
    return normaliser - chosen, normaliser


def _highest(logits: Float[Array, "chunk v"], vocab: _Axes) -> Float[Array, " chunk"]:
    """The highest logit of each token over all devices, as a constant."""
    highest = jax.lax.stop_gradient(logits.max(-1))
    return jax.lax.stop_gradient(jax.lax.pmax(highest, vocab)) if vocab else highest


def _distillation_of_chunk(
    heads: _Heads, first: Array | int, vocab: _Axes, vocab_size: int, tokens: _ChunkOfTokens
) -> tuple[Float[Array, " chunk"], Float[Array, " chunk"], Float[Array, " chunk"]]:
    """The student's losses and log normalisers, and sum_v p_v (log p_v - log q_v) for the teacher's
    p and the student's q."""
    states, targets = tokens
    logits, numbers = _logits_of_chunk(heads[0], first, vocab_size, states[0])
    losses, normaliser = _losses_of_logits(logits, numbers, targets, vocab)
    theirs, _ = _logits_of_chunk(heads[1], first, vocab_size, states[1])
    theirs = jax.lax.stop_gradient(theirs)
    weights = jnp.exp(theirs - _highest(theirs, vocab)[:, None])
    total, apart = weights.sum(-1), (weights * (theirs - logits)).sum(-1)
    if vocab:
        total, apart = jax.lax.psum((total, apart), vocab)
    their_normaliser = jnp.log(total) + _highest(theirs, vocab)
    return losses, normaliser, apart / total - (their_normaliser - normaliser)


def _choices_of_chunk(
    heads: _Heads, first: Array | int, vocab: _Axes, vocab_size: int, tokens: _ChunkOfTokens
) -> tuple[Float[Array, " chunk"], Int[Array, " chunk"]]:
    """Losses of a chunk, and the most likely token at each position; the first in a tie."""
    losses, _ = _losses_of_chunk(heads, first, vocab, vocab_size, tokens)
    (states,), _ = tokens
    logits, numbers = _logits_of_chunk(
        heads[0], first, vocab_size, states
    )  # XLA reuses those above
    highest = logits.max(-1)
    highest = jax.lax.pmax(highest, vocab) if vocab else highest
    best = jnp.where(logits == highest[:, None], numbers, vocab_size).min(-1)
    return losses, jax.lax.pmin(best, vocab) if vocab else best


def _logits_of_chunk(
    head: Float[Array, "v D"], first: Array | int, vocab_size: int, states: Float[Array, "chunk D"]
) -> tuple[Float[Array, "chunk v"], Int[Array, " v"]]:
    """Logits of a chunk, the lowest float for padding, and the tokens that they belong to."""
    logits = dot_products(states, head)
    numbers = first + jnp.arange(len(head))
    return jnp.where(numbers < vocab_size, logits, jnp.finfo(jnp.float32).min), numbers


@partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def _gather(head: Float[Array, "v _"], width: _Axes, dtype: jnp.dtype) -> Float[Array, "v D"]:
    """The head's whole width, gathered in `dtype`; its gradient is scattered in float32."""
    whole = jax.lax.all_gather(head.astype(dtype), width, axis=1, tiled=True)
    return whole.astype(jnp.float32)


def _gather_forward(head: Array, width: _Axes, dtype: jnp.dtype) -> tuple[Array, None]:
    return _gather(head, width, dtype), None


def _gather_backward(width: _Axes, dtype: jnp.dtype, _: None, d_whole: Array) -> tuple[Array]:
    return (jax.lax.psum_scatter(d_whole, width, scatter_dimension=1, tiled=True),)


_gather.defvjp(_gather_forward, _gather_backward)


def _vary(x: Float[Array, "..."], over: _Axes, already: _Axes) -> Float[Array, "..."]:
    """x as a value that may vary over the mesh axes `over`; it already varies over `already`."""
    missing = tuple(axis for axis in over if axis not in already)
    return jax.lax.pcast(x, missing, to="varying") if missing else x


@jax.custom_vjp
def dot_products(
    states: Float[Array, "chunk D"], head: Float[Array, "v D"]
) -> Float[Array, "chunk v"]:
    """Dot products of states and the head's vectors: operands in the states' dtype, float32 sums.

    The same holds backward: JAX's own transpose would use the float32 gradient of the logits as an
    operand, and run at the speed of float32.
    """
    head = head.astype(states.dtype)
    return jnp.einsum("td,vd->tv", states, head, preferred_element_type=jnp.float32)


def _dot_products_forward(
    states: Float[Array, "chunk D"], head: Float[Array, "v D"]
) -> tuple[Float[Array, "chunk v"], tuple[Array, Array]]:
    return dot_products(states, head), (states, head)


def _dot_products_backward(
    inputs: tuple[Array, Array], d_logits: Float[Array, "chunk v"]
) -> tuple[Float[Array, "chunk D"], Float[Array, "v D"]]:
    states, head = inputs
    d_logits = d_logits.astype(states.dtype)
    product = partial(jnp.einsum, preferred_element_type=jnp.float32)
    d_states = product("tv,vd->td", d_logits, head.astype(states.dtype)).astype(states.dtype)
    return d_states, product("tv,td->vd", d_logits, states)


dot_products.defvjp(_dot_products_forward, _dot_products_backward)
