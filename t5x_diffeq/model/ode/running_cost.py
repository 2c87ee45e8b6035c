"""The running cost of a trajectory: the integral over depth of each token's squared velocity.

Optimal control knows it as the Lagrangian of a trajectory, which is added to the cost of the state
at t = 1. Finlay et al. 2020, "How to train your neural ODE", call the integral of |F|^2 the kinetic
energy. The state carries the cost, so every scheme integrates both: dy/dt = F(y; W) and
dc/dt = mean F^2. A splitting scheme, which moves the state by f and by g in turn, is charged for
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


@struct.dataclass
class StateWithCost:
    """The state y and the cost so far: a vector space, as schemes need.

    Attributes:
      y: the state, `[B, L, D]`.
      cost: the integral of each token's rate, `[B, L]`, float32.
    """

    y: Any  # JAX makes trees of placeholders, too, so no shape is checked here
    cost: Any

    @classmethod
    def at_start(cls, y: State) -> "StateWithCost":
        """y(0), at no cost."""
        return cls(y, jnp.zeros(y.shape[:2], jnp.float32))

    @property
    def dtype(self) -> DTypeLike:
        """The dtype of y."""
        return self.y.dtype

    def astype(self, dtype: DTypeLike) -> "StateWithCost":
        """With y in another dtype."""
        return StateWithCost(self.y.astype(dtype), self.cost)

    def __add__(self, other: "StateWithCost") -> "StateWithCost":
        return StateWithCost(self.y + other.y, self.cost + other.cost)

    def __sub__(self, other: "StateWithCost") -> "StateWithCost":
        return self + -1.0 * other

    def __rmul__(self, factor: float | Float[Array, ""]) -> "StateWithCost":
        return StateWithCost(factor * self.y, factor * self.cost)

    __mul__ = __rmul__

    def __truediv__(self, divisor: float) -> "StateWithCost":
        return StateWithCost(self.y / divisor, self.cost / divisor)


class _ChargedField(VectorField):
    """Sub-fields that charge for their own velocity, and their sum, which charges for its own."""

    def __call__(self, W: Tree, y: StateWithCost) -> StateWithCost:
        return _with_rate(super().__call__(W, y).y)


def charge_velocity(field: VectorField) -> VectorField:
    """The field of states on states with a cost, whose rate is the mean square of the velocity."""

    def charged(sub_field: SubField) -> Callable[[Tree, StateWithCost], StateWithCost]:
        return lambda W, y: _with_rate(sub_field(W, y.y))

    return _ChargedField(charged(field.f), charged(field.g))


def _with_rate(velocity: State) -> StateWithCost:
    return StateWithCost(velocity, jnp.square(velocity.astype(jnp.float32)).mean(-1))
