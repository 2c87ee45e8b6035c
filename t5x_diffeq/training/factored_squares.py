"""The mean of squares of P's gradient as two factors, over T and over the kernel.

As in Adafactor (Shazeer and Stern 2018), for P as a matrix with T rows:

    V = R C / mean(R),   R [T] and C [kernel]: means of dP^2 over the kernel and over T

This is exact if the gradients of W(t) at the nodes are correlated in the same way in all entries of
the kernel.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, UInt32

from t5x_diffeq.layers.parameter import Parameter
from t5x_diffeq.training.moments import (
    Blocks,
    Step,
    decode_mean,
    encode_mean,
    init_blocks,
    like,
)


class Factors(NamedTuple):
    """The factors of the mean of squares of P's gradient.

    Attributes:
      of_time: its mean over the kernel, `[T]`.
      of_kernel: its mean over T, of the kernel's shape.
    """

    of_time: Any
    of_kernel: Any

    def product(self) -> Float[Array, "T ..."]:
        """V."""
        R = self.of_time[(..., *(None,) * self.of_kernel.ndim)]
        return R * self.of_kernel / jnp.maximum(R.mean(), 1e-30)

    def with_step(self, of_step: "Factors", beta2: float) -> "Factors":
        """The factors with those of one more gradient."""
        pairs = zip(self, of_step, strict=True)
        return Factors(*(beta2 * mean + (1 - beta2) * new for mean, new in pairs))


def init_factors(leaf: Parameter | Array, names: tuple[str | None, ...]) -> Factors:
    """The factors before the first step of a P with these logical axes."""
    T, *kernel = (leaf.value if isinstance(leaf, Parameter) else leaf).shape
    of_kernel = like(leaf, jnp.zeros(kernel), names[1:])
    return Factors(like(leaf, jnp.zeros(T), names[:1]), of_kernel)


@dataclass(frozen=True)
class EightBitsFactored:
    """Keeps the mean of P's gradient in 8 bits, and that of its squares in two factors."""

    names: tuple[str | None, ...]

    def init(self, leaf: Parameter | Array) -> tuple[Blocks, Factors]:  # noqa: D102
        return init_blocks(leaf, self.names, "int8"), init_factors(leaf, self.names)

    def update(  # noqa: D102
        self, step: Step, g: Array, mean: Blocks, square: Factors, bits: UInt32[Array, "..."]
    ) -> tuple[Array, Blocks, Factors]:
        m = step.beta1 * decode_mean(mean) + (1 - step.beta1) * g
        squares = jnp.square(g)
        of_step = Factors(squares.mean(tuple(range(1, g.ndim))), squares.mean(0))
        square = square.with_step(of_step, step.beta2)
        return step.direction(m, square.product()), encode_mean(m, bits), square
