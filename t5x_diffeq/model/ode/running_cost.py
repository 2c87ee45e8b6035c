"""The running cost of a trajectory: the integral over depth of a rate of each token.

In optimal control the rate is called the Lagrangian, and its integral is added to the cost of the
state at t = 1. The state carries its costs, so every scheme integrates both: dy/dt = F(y; W) and
dc/dt = rate(y, F). A splitting scheme, which moves the state by f and by g in turn, is charged for
each motion.
"""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from flax import struct
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from t5x_diffeq.model.layers.array_types import State, Tree
from t5x_diffeq.model.ode.solvers import SubField, VectorField

# A number per token, `[B, L]` in float32, from the state and the velocity, each `[B, L, D]`.
Rate = Callable[[State, State], Float[Array, "B L"]]


@struct.dataclass
class StateWithCost:
    """The state y and its costs so far: a vector space, as schemes need.

    Attributes:
      y: the state, `[B, L, D]`.
      costs: the integral of each rate, `[B, L]`, float32.
      rates: the rate of each cost.
    """

    y: Any  # JAX makes trees of placeholders, too, so no shape is checked here
    costs: tuple[Any, ...]
    rates: tuple[Rate, ...] = struct.field(pytree_node=False)

    @classmethod
    def at_start(cls, y: State, rates: tuple[Rate, ...]) -> "StateWithCost":
        """y(0), at no cost."""
        return cls(y, (jnp.zeros(y.shape[:2], jnp.float32),) * len(rates), rates)

    @property
    def dtype(self) -> DTypeLike:
        """The dtype of y."""
        return self.y.dtype

    def astype(self, dtype: DTypeLike) -> "StateWithCost":
        """The same with y in another dtype; costs stay float32."""
        return StateWithCost(self.y.astype(dtype), self.costs, self.rates)

    def __add__(self, other: "StateWithCost") -> "StateWithCost":
        costs = tuple(a + b for a, b in zip(self.costs, other.costs, strict=True))
        return StateWithCost(self.y + other.y, costs, self.rates)

    def __sub__(self, other: "StateWithCost") -> "StateWithCost":
        return self + -1.0 * other

    def __rmul__(self, factor: float | Float[Array, ""]) -> "StateWithCost":
        return StateWithCost(factor * self.y, tuple(factor * c for c in self.costs), self.rates)

    __mul__ = __rmul__

    def __truediv__(self, divisor: float) -> "StateWithCost":
        return StateWithCost(self.y / divisor, tuple(c / divisor for c in self.costs), self.rates)

    def moved_by(self, velocity: State) -> "StateWithCost":
        """The derivative of the state and of its costs, if the state moves with `velocity`."""
        rates = tuple(rate(self.y, velocity) for rate in self.rates)
        return StateWithCost(velocity, rates, self.rates)


class _ChargedField(VectorField):
    """Charged sub-fields, and a sum that is charged for f + g.

    The sum of the two charges would be another rate: |f|^2 + |g|^2 is not |f + g|^2.
    """

    def __call__(self, W: Tree, y: StateWithCost) -> StateWithCost:
        return y.moved_by(super().__call__(W, y).y)


def charge(field: VectorField) -> VectorField:
    """The field, on states with costs: dy/dt as before, and dc/dt by the costs' rates."""

    def charged(sub_field: SubField) -> Callable[[Tree, StateWithCost], StateWithCost]:
        return lambda W, y: y.moved_by(sub_field(W, y.y))

    return _ChargedField(charged(field.f), charged(field.g))
