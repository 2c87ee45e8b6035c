"""Next-token cross entropy and KL divergence, in nats per token, without ever materialising all
logits.

Each device goes through its tokens chunk by chunk, and so does the backward pass, which makes the
logits again. The gradient is written by hand. In the one that JAX derives, masks and constants of
the logits' size are moved out of the loop, and every chunk reads them from memory: a seventh of the
memory traffic of a step of GPT-small on an H100 (docs/lab/h100.md).
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int, Num

from t5x_diffeq.layers.array_types import State, Tokens
from t5x_diffeq.layers.mesh import mesh_axes, on_shards, shards_over


class TokenLosses(NamedTuple):
    """What is computed from the logits of each token, in nats; float32.

    With q the distribution that the logits z give, and p the teacher's, the gradients are

        d loss / dz = q - onehot(target)    d normaliser / dz = q    d divergence / dz = q - p

    A further number per token is computed in `_chunks_forward` and needs its gradient in
    `_chunks_backward`. It must leave out the logits of padding, and sum over the mesh axes that
    split the vocabulary.

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
_Chunks = tuple[Float[Array, "chunks chunk _"], Float[Array, "v _"]]  # states, and head


class _Vocabulary(NamedTuple):
    """The vocabulary, of which a device's head holds an equal part.

    Attributes:
      size: the number of tokens, without padding.
      axes: the mesh axes that split it.
    """

    size: int
    axes: _Axes

    def tokens(self, head: Float[Array, "v _"]) -> Int[Array, " v"]:
        """The tokens of this device's head; from `size` on, they are padding."""
        first = jax.lax.axis_index(self.axes) * len(head) if self.axes else 0
        return first + jnp.arange(len(head))

    def logits(
        self, states: Float[Array, "chunk D"], head: Float[Array, "v D"]
    ) -> Float[Array, "chunk v"]:
        """This device's logits, summed in float32; the lowest float for padding."""
        logits = jnp.einsum("td,vd->tv", states, head, preferred_element_type=jnp.float32)
        if len(head) * shards_over(self.axes) == self.size:
            return logits
        return jnp.where(self.tokens(head) < self.size, logits, jnp.finfo(jnp.float32).min)

    def sum(self, x: Float[Array, "chunk v"]) -> Float[Array, " chunk"]:
        """Sums over the vocabulary."""
        return jax.lax.psum(x.sum(-1), self.axes) if self.axes else x.sum(-1)

    def max(self, x: Float[Array, "chunk v"]) -> Float[Array, " chunk"]:
        """The highest over the vocabulary."""
        return jax.lax.pmax(x.max(-1), self.axes) if self.axes else x.max(-1)

    def normaliser(self, logits: Float[Array, "chunk v"]) -> Float[Array, " chunk"]:
        """The log of the softmax's normaliser."""
        highest = self.max(logits)
        return jnp.log(self.sum(jnp.exp(logits - highest[:, None]))) + highest


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
    return TokenLosses(*_by_chunk(_chunks, [(y, head)], targets, vocab_size, chunk))


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
        *_by_chunk(_chunks, [student, teacher], targets, vocab_size, chunk, results=3)
    )


def losses_and_choices(
    y: State, head: Float[Array, "V D"], targets: Tokens, *, vocab_size: int, chunk: int
) -> tuple[Float[Array, "B L"], Int[Array, "B L"]]:
    """-log p(target) of each token, and the likeliest token; takes `token_losses`' arguments.

    Don't differentiate it: JAX would keep all logits.
    """
    losses, choices = _by_chunk(_choices, [(y, head)], targets, vocab_size, chunk)
    return losses, choices


def _by_chunk(
    of_chunks: Callable[..., tuple[Array, ...]],
    models: list[StateAndHead],
    targets: Tokens,
    vocab_size: int,
    chunk: int,
    results: int = 2,
) -> tuple[Num[Array, "B L"], ...]:
    """Applies `of_chunks`, which returns some numbers per token, to all tokens in chunks.

    Each device gathers the head along its width once, then goes through its own tokens. Under
    automatic sharding every chunk would gather the head. Where the vocabulary is sharded, only
    sums and extremes over it are exchanged.

    Args:
      of_chunks: takes a `_Vocabulary`, the chunks of each model, and the chunks of the targets.
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
        partial(of_chunks, _Vocabulary(vocab_size, vocab)),
        tokens=(*rows, *length),
        vocab=vocab,
        width=width,
        chunk=chunk,
    )
    of_model = (by_token, PartitionSpec(vocab or None, width or None))
    in_specs = ([of_model] * len(models), by_token)
    return on_shards(local, in_specs, (by_token,) * results)(models, targets)


def _on_device(
    of_chunks: Callable[..., tuple[Array, ...]],
    models: list[tuple[Float[Array, "b L _"], Float[Array, "v _"]]],
    targets: Tokens,
    *,
    tokens: _Axes,
    vocab: _Axes,
    width: _Axes,
    chunk: int,
) -> tuple[Num[Array, "b L"], ...]:
    """One device's part, where heads are sharded over `vocab` and `width`."""
    chunk = min(chunk, targets.size)
    missing = -targets.size % chunk

    def prepare(y: Array, head: Array) -> _Chunks:
        # In float32, so that the head's gradient is summed in it over chunks and devices. The
        # gradient of a value is summed over devices where it is made to vary over them: here, so
        # that this happens once, and before the gather, so that it is a sum of shards.
        dtype, head = head.dtype, _vary(head.astype(jnp.float32), tokens, (*vocab, *width))
        if width:
            head = _gather(head, width, dtype)
        y = _vary(y, (*vocab, *width), tokens)
        states = jnp.pad(y.reshape(-1, y.shape[-1]), ((0, missing), (0, 0)))
        return states.reshape(-1, chunk, y.shape[-1]), head

    wanted = jnp.pad(targets.reshape(-1), (0, missing)).reshape(-1, chunk)
    per_chunk = of_chunks([prepare(*model) for model in models], wanted)
    shape, size = targets.shape, targets.size
    return tuple(x.reshape(-1)[:size].reshape(shape) for x in per_chunk)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _chunks(
    vocabulary: _Vocabulary, models: list[_Chunks], targets: Int[Array, "chunks chunk"]
) -> tuple[Float[Array, "chunks chunk"], ...]:
    """The fields of `TokenLosses` of all chunks, of one model or of a student and its teacher."""
    return _chunks_forward(vocabulary, models, targets)[0]


def _chunks_forward(
    vocabulary: _Vocabulary, models: list[_Chunks], targets: Int[Array, "chunks chunk"]
) -> tuple[tuple[Array, ...], tuple]:
    """The results, and what the backward pass needs: the inputs and each model's normalisers."""
    states, heads = zip(*models, strict=True)
    heads = tuple(head.astype(y.dtype) for y, head in models)

    def of_chunk(chunk: tuple) -> tuple[tuple[Array, ...], list[Array]]:
        states, targets = chunk
        logits = [vocabulary.logits(*model) for model in zip(states, heads, strict=True)]
        normalisers = [vocabulary.normaliser(each) for each in logits]
        loss = normalisers[0] - _chosen(vocabulary, logits[0], heads[0], targets)
        if len(models) == 1:
            return (loss, normalisers[0]), normalisers
        log_q, log_p = (z - n[:, None] for z, n in zip(logits, normalisers, strict=True))
        divergence = vocabulary.sum(jnp.exp(log_p) * (log_p - log_q))
        return (loss, normalisers[0], divergence), normalisers

    results, normalisers = jax.lax.map(of_chunk, (states, targets))
    return results, (states, heads, targets, normalisers)


def _chosen(
    vocabulary: _Vocabulary, logits: Float[Array, "chunk v"], head: Array, targets: Array
) -> Float[Array, " chunk"]:
    """The logit of each target."""
    return vocabulary.sum(jnp.where(vocabulary.tokens(head) == targets[:, None], logits, 0))


def _chunks_backward(
    vocabulary: _Vocabulary, kept: tuple, gradients: tuple[Float[Array, "chunks chunk"], ...]
) -> tuple[list[tuple[Array, Array] | None], None]:
    """The gradient of the student's states and head; see `TokenLosses`.

    The products have operands in the states' dtype. JAX's own would have the float32 gradient of
    the logits as an operand, and run at the speed of float32.
    """
    states, heads, targets, normalisers = kept
    product = partial(jnp.einsum, preferred_element_type=jnp.float32)

    def of_chunk(d_head: Array, chunk: tuple) -> tuple[Array, Array]:
        states, targets, normalisers, (d_loss, *others) = chunk
        q, *p = (
            jnp.exp(vocabulary.logits(y, head) - normaliser[:, None])
            for y, head, normaliser in zip(states, heads, normalisers, strict=True)
        )
        hit = vocabulary.tokens(heads[0]) == targets[:, None]
        d_logits = (d_loss + sum(others))[:, None] * q - jnp.where(hit, d_loss[:, None], 0)
        if p:
            d_logits -= others[-1][:, None] * p[0]
        d_logits = d_logits.astype(states[0].dtype)
        d_states = product("tv,vd->td", d_logits, heads[0]).astype(states[0].dtype)
        return d_head + product("tv,td->vd", d_logits, states[0]), d_states

    zeros = 0 * heads[0].astype(jnp.float32)  # which varies over the same mesh axes
    d_head, d_states = jax.lax.scan(of_chunk, zeros, (states, targets, normalisers, gradients))
    return [(d_states, d_head), *[None] * len(states[1:])], None


_chunks.defvjp(_chunks_forward, _chunks_backward)


def _choices(
    vocabulary: _Vocabulary, models: list[_Chunks], targets: Int[Array, "chunks chunk"]
) -> tuple[Float[Array, "chunks chunk"], Int[Array, "chunks chunk"]]:
    """Losses, and the most likely token at each position; the first in a tie."""
    ((states, head),) = models
    head = head.astype(states.dtype)

    def of_chunk(chunk: tuple) -> tuple[Array, Array]:
        states, targets = chunk
        logits = vocabulary.logits(states, head)
        loss = vocabulary.normaliser(logits) - _chosen(vocabulary, logits, head, targets)
        is_best = logits == vocabulary.max(logits)[:, None]
        best = jnp.where(is_best, vocabulary.tokens(head), vocabulary.size).min(-1)
        return loss, jax.lax.pmin(best, vocabulary.axes) if vocabulary.axes else best

    return jax.lax.map(of_chunk, (states, targets))


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
