"""Products of Jacobian blocks along a trajectory, by chunks of tokens and vectors.

A step of any scheme is y(n+1) = S_n(y(n)). Its Jacobian between all tokens is `[L D, L D]`. For
one output token j, a vector-Jacobian product gives a row of the blocks of all input tokens at once,
so D products per step suffice, whatever the length.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from t5x_diffeq.model.layers.array_types import State

StepWeights = Any  # a tree with leaves `[N, ...]`, of a block or any other field
StepMap = Callable[[State, StepWeights], State]
Tangents = Float[Array, "B K D D"]


class Chunks(NamedTuple):
    """What is held in memory at once."""

    tokens: int  # number of input tokens whose `[D, D]` tangents are carried together
    products: int  # number of vector-Jacobian products computed together


def _blocks(
    step: StepMap,
    W: StepWeights,
    y: State,
    outputs: Int[Array, " B"],
    start: Int[Array, ""],
    chunks: Chunks,
) -> Tangents:
    """d S(y)_j / d y_k for the output token j of each row and the tokens k of one chunk."""
    rows = jnp.arange(len(y))
    _, pull_back = jax.vjp(lambda y: step(y, W)[rows, outputs], y)

    def row_of_blocks(unit: Float[Array, " D"]) -> Float[Array, "B K D"]:
        (gradient,) = pull_back(jnp.broadcast_to(unit, (len(y), len(unit))))
        return jax.lax.dynamic_slice_in_dim(gradient, start, chunks.tokens, axis=1)

    units = jnp.eye(y.shape[-1], dtype=y.dtype)
    blocks = jax.lax.map(row_of_blocks, units, batch_size=chunks.products)
    return jnp.moveaxis(blocks, 0, 2)


@partial(jax.jit, static_argnames=("step", "chunks"))
def pair_growth(
    step: StepMap,
    weights: StepWeights,
    states: Float[Array, "N B L D"],
    outputs: Int[Array, " B"],
    start: Int[Array, ""],
    chunks: Chunks,
) -> tuple[Float[Array, "N B K D"], Tangents]:
    """M <- (I + (dS_n - I)_jk) M from M = I, with a QR decomposition at each step.

    For Euler's step (dS_n - I)_jk is dt J_jk, J the field's Jacobian (paper, equation 7).

    Returns:
      log |diag R| of each step; and R_N ... R_1, whose singular values are those of M.
    """
    identity = jnp.eye(states.shape[-1], dtype=states.dtype)
    inputs = start + jnp.arange(chunks.tokens)
    # Of a token with respect to itself, dS already contains I.
    elsewhere = (inputs != outputs[:, None])[..., None, None]

    def advance(
        carry: tuple[Tangents, Tangents], at: tuple[StepWeights, State]
    ) -> tuple[tuple[Tangents, Tangents], Float[Array, "B K D"]]:
        Q, product = carry
        W, y = at
        dS = _blocks(step, W, y, outputs, start, chunks)
        Q, R = jnp.linalg.qr((dS + elsewhere * identity) @ Q)
        logs = jnp.log(jnp.abs(jnp.diagonal(R, axis1=-2, axis2=-1)))
        return (Q, R @ product), logs

    first = jnp.broadcast_to(identity, (len(outputs), chunks.tokens, *identity.shape))
    (_, product), logs = jax.lax.scan(advance, (first, first), (weights, states))
    return logs, product


@partial(jax.jit, static_argnames=("step", "products"))
def full_tangent(
    step: StepMap,
    weights: StepWeights,
    states: Float[Array, "N B L D"],
    outputs: Int[Array, " B"],
    units: Float[Array, "C D"],
    products: int,
) -> Float[Array, "C B L D"]:
    """Rows of d y_j(1) / d y(0) over all paths through all tokens, backwards along the trajectory.

    Args:
      units: the rows, as vectors by which the output token's state is multiplied.
    """
    rows = jnp.arange(len(outputs))

    def along(unit: Float[Array, " D"]) -> State:
        end = jnp.zeros(states.shape[1:], states.dtype).at[rows, outputs].set(unit)

        def back(cotangent: State, at: tuple[StepWeights, State]) -> tuple[State, None]:
            W, y = at
            return jax.vjp(lambda y: step(y, W), y)[1](cotangent)[0], None

        return jax.lax.scan(back, end, (weights, states), reverse=True)[0]

    return jax.lax.map(along, units, batch_size=products)
