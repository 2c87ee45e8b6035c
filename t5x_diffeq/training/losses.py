"""Computes sums of terms over tokens, and next-token losses, without making all logits at once.

Each device goes through its tokens chunk by chunk. In training, the logits of a chunk are made only
once: the forward pass also computes the chunk's part of the gradient.
"""

from collections.abc import Callable, Sequence
from functools import partial, reduce

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int, Num

from t5x_diffeq.model.layers.array_types import State, Tokens
from t5x_diffeq.model.layers.mesh import mesh_axes, on_shards
from t5x_diffeq.training.logits import Vocabulary, logits_of
from t5x_diffeq.training.terms import LogitsTerm

StateAndHead = tuple[Float[Array, "B L _"], Float[Array, "V _"]]  # [B, L, D] and [V, D]
_Axes = tuple[str, ...]
_Chunks = tuple[Float[Array, "chunks chunk _"], Float[Array, "v _"]]  # states, and head


def sum_of_terms(
    terms: Sequence[LogitsTerm],
    student: StateAndHead,
    teacher: StateAndHead | None,
    targets: Tokens,
    weights: Float[Array, "B L"],
    *,
    vocab_size: int,
    chunk: int,
) -> tuple[Float[Array, ""], list[Float[Array, "B L"]]]:
    """The weighted sum of the terms over tokens, and each term's values, which have no gradient.

    The teacher gets no gradient.

    Args:
      terms: the terms, each of which has a value per token.
      student: the normalised state at t = 1, and the head: one vector per token of the padded
        vocabulary.
      teacher: the state and the head of the teacher, whose width may differ, but not whose
        vocabulary.
      targets: the tokens to predict.
      weights: the weight of each token.
      vocab_size: the unpadded vocabulary; the padding has probability 0.
      chunk: tokens per device whose logits exist at once.
    """
    models = [student] if teacher is None else [student, teacher]
    token_arrays = (targets, weights)
    compute = partial(_sums, tuple(terms))
    sums, *values = _by_chunk(compute, models, token_arrays, vocab_size, chunk, 1 + len(terms))
    return sums.sum(), jax.lax.stop_gradient(values)


def losses_and_choices(
    y: State, head: Float[Array, "V D"], targets: Tokens, *, vocab_size: int, chunk: int
) -> tuple[Float[Array, "B L"], Int[Array, "B L"]]:
    """-log p(target) of each token, and the likeliest token; arguments as in `sum_of_terms`.

    Don't differentiate it: JAX would keep all logits.
    """
    losses, choices = _by_chunk(_choices, [(y, head)], (targets,), vocab_size, chunk, 2)
    return losses, choices


def _by_chunk(
    compute: Callable[..., tuple[Array, ...]],
    models: list[StateAndHead],
    token_arrays: tuple[Num[Array, "B L"], ...],
    vocab_size: int,
    chunk: int,
    results: int,
) -> tuple[Num[Array, "_ _"], ...]:
    """Applies `compute`, which returns some numbers per token or device, to tokens in chunks.

    Each device gathers the head along its width once, then goes through its own tokens. Under
    automatic sharding every chunk would gather the head. Where the vocabulary is sharded, only
    sums and extremes over it are exchanged.

    `compute` takes a `Vocabulary`, the chunks of each model, and the chunks of each token array.
    It returns `results` arrays; a scalar of each device becomes an array with an entry for each
    device that has tokens of its own.
    """
    rows, length, vocab, width = map(mesh_axes, ("batch", "length", "vocab", "embed"))
    tokens = (*rows, *length)

    def on_device(
        models: list[StateAndHead], token_arrays: tuple[Num[Array, "b L"], ...]
    ) -> tuple[Num[Array, "_ _"], ...]:
        """One device's part, where heads are sharded over `vocab` and `width`."""
        shape, size = token_arrays[0].shape, token_arrays[0].size
        length = min(chunk, size)
        missing = -size % length

        def prepare(y: Array, head: Array) -> _Chunks:
            # The head becomes float32, so that its gradient is summed over chunks and devices in
            # float32. The transpose of `_vary` is a sum over devices. So `_vary` is outside the
            # loop over chunks, to sum once, and before the gather, to sum shards of the head.
            dtype, head = head.dtype, _vary(head.astype(jnp.float32), tokens, (*vocab, *width))
            if width:
                head = _gather(head, width, dtype)
            y = _vary(y, (*vocab, *width), tokens)
            states = jnp.pad(y.reshape(-1, y.shape[-1]), ((0, missing), (0, 0)))
            return states.reshape(-1, length, y.shape[-1]), head

        in_chunks = [jnp.pad(x.reshape(-1), (0, missing)).reshape(-1, length) for x in token_arrays]
        chunks = [prepare(*model) for model in models]
        values = compute(Vocabulary(vocab_size, vocab), chunks, *in_chunks)
        return tuple(
            x.reshape(-1)[:size].reshape(shape) if x.ndim else x.reshape(1, 1) for x in values
        )

    by_token = PartitionSpec(rows or None, length or None)
    model_specs = (by_token, PartitionSpec(vocab or None, width or None))
    in_specs = ([model_specs] * len(models), (by_token,) * len(token_arrays))
    return on_shards(on_device, in_specs, (by_token,) * results)(models, token_arrays)


def _in_dtype_of_states(models: list[_Chunks]) -> tuple[tuple[Array, ...], tuple[Array, ...]]:
    """The states and the heads of the models, for products in the states' dtype."""
    return tuple(y for y, _ in models), tuple(head.astype(y.dtype) for y, head in models)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _sums(
    terms: tuple[LogitsTerm, ...],
    vocabulary: Vocabulary,
    models: list[_Chunks],
    targets: Int[Array, "chunks chunk"],
    weights: Float[Array, "chunks chunk"],
) -> tuple[Array, ...]:
    """The weighted sum of the terms over the tokens of all chunks, and each term's values."""
    return _sums_forward(terms, vocabulary, models, targets, weights)[0]


def _sums_forward(
    terms: tuple[LogitsTerm, ...],
    vocabulary: Vocabulary,
    models: list[_Chunks],
    targets: Int[Array, "chunks chunk"],
    weights: Float[Array, "chunks chunk"],
) -> tuple[tuple[Array, ...], tuple[Array, ...]]:
    """The results, and the gradient of the student's states and head for a gradient of 1.

    The products of the gradient have operands in the states' dtype. JAX's own gradient would
    multiply by the float32 gradient of the logits, at the speed of float32.
    """
    states, heads = _in_dtype_of_states(models)
    product = partial(jnp.einsum, preferred_element_type=jnp.float32)

    def compute_chunk(d_head: Array, chunk: tuple) -> tuple[Array, tuple]:
        states, targets, weights = chunk
        logits = logits_of(vocabulary, states, heads, targets)
        values = tuple(term.value(logits) for term in terms)
        charged = sum(term.weight * x for term, x in zip(terms, values, strict=True))
        gradients = (term.pull_back(logits, term.weight * weights) for term in terms)
        d_logits = reduce(jnp.add, gradients).astype(states[0].dtype)
        d_states = product("tv,vd->td", d_logits, heads[0]).astype(states[0].dtype)
        d_head += product("tv,td->vd", d_logits, states[0])
        return d_head, (charged * weights, values, d_states)

    # This varies over the same mesh axes as the sum, which plain zeros would not.
    zeros = 0 * heads[0].astype(jnp.float32)
    d_head, (charged, values, d_states) = jax.lax.scan(
        compute_chunk, zeros, (states, targets, weights)
    )
    return (charged.sum(), *values), (d_states, d_head, *heads[1:])


def _sums_backward(
    terms: tuple[LogitsTerm, ...],
    vocabulary: Vocabulary,
    kept: tuple[Array, ...],
    gradients: tuple[Array, ...],
) -> tuple[list[tuple[Array, Array] | None], None, None]:
    """The kept gradient times the gradient of the sum, which is one number for all tokens."""
    (d_states, d_head, *teachers), d_sum = kept, gradients[0]
    student = ((d_sum * d_states).astype(d_states.dtype), d_sum * d_head)
    return [student, *[None] * len(teachers)], None, None


_sums.defvjp(_sums_forward, _sums_backward)


def _choices(
    vocabulary: Vocabulary, models: list[_Chunks], targets: Int[Array, "chunks chunk"]
) -> tuple[Float[Array, "chunks chunk"], Int[Array, "chunks chunk"]]:
    """Losses, and the most likely token at each position; the first in a tie."""
    states, heads = _in_dtype_of_states(models)

    def compute_chunk(chunk: tuple) -> tuple[Array, Array]:
        states, targets = chunk
        chunk_logits = logits_of(vocabulary, states, heads, targets)
        (logits,) = chunk_logits.logits
        is_best = logits == vocabulary.max(logits)[:, None]
        best = jnp.where(is_best, vocabulary.tokens(len(heads[0])), vocabulary.size).min(-1)
        losses = chunk_logits.cross_entropy()
        return losses, jax.lax.pmin(best, vocabulary.axes) if vocabulary.axes else best

    return jax.lax.map(compute_chunk, (states, targets))


@partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def _gather(head: Float[Array, "v _"], width: _Axes, dtype: jnp.dtype) -> Float[Array, "v D"]:
    """The head's whole width, gathered in `dtype`; its gradient is scattered in float32."""
    gathered = jax.lax.all_gather(head.astype(dtype), width, axis=1, tiled=True)
    return gathered.astype(jnp.float32)


def _gather_forward(head: Array, width: _Axes, dtype: jnp.dtype) -> tuple[Array, None]:
    return _gather(head, width, dtype), None


def _gather_backward(width: _Axes, dtype: jnp.dtype, _: None, d_head: Array) -> tuple[Array]:
    return (jax.lax.psum_scatter(d_head, width, scatter_dimension=1, tiled=True),)


_gather.defvjp(_gather_forward, _gather_backward)


def _vary(x: Float[Array, "..."], over: _Axes, already: _Axes) -> Float[Array, "..."]:
    """x as a value that may vary over the mesh axes `over`; it already varies over `already`."""
    missing = tuple(axis for axis in over if axis not in already)
    return jax.lax.pcast(x, missing, to="varying") if missing else x
