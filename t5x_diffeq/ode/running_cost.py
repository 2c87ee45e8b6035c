"""A running cost: the integral over depth of what a vector field is charged for its choices.

Optimal control knows it as the Lagrangian of a trajectory, the integral of l(y(t), t) over t, which
is added to the cost of the state at t = 1. Here l balances the experts of a mixture, for example.
The state carries the cost, so every scheme integrates both: dy/dt = F(y; W), dc/dt = l(y; W).

With l = mean F^2, each token is charged for its velocity (Finlay et al. 2020, "How to train your
neural ODE", call the integral of |F|^2 the kinetic energy). That rate is not the sum of a rate of f
and a rate of g, as a block's own is, so the field itself computes it. A splitting scheme, which
moves the state by f and by g in turn, is charged for each motion.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
from flax import struct
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from t5x_diffeq.layers.array_types import Tree, Vector
from t5x_diffeq.ode.solvers import SubField, VectorField


class RunningCosts(NamedTuple):
    """Running costs of a pass, averaged over depth.

    Attributes:
      block: what the block charges; 0 if it charges nothing.
      velocity: the mean over the width of the squared velocity F of each token; None if it wasn't
        asked for.
    """

    block: Float[Array, ""]
    velocity: Float[Array, "B L"] | None


@struct.dataclass
class StateWithCost:
    """The state y and the cost so far: a vector space, as schemes need.

    Attributes:
      y: the state, `[B, L, D]`; or a `StateWithCost`, which then carries two costs.
      cost: the integral of the cost's rate, float32: a scalar, or `[B, L]`, a cost per token.
    """

    y: Any  # JAX makes trees of placeholders, too, so no shape is checked here
    cost: Any

    @classmethod
    def at_start(cls, y: Vector, shape: tuple[int, ...] = ()) -> "StateWithCost":
        """y(0), at no cost; `shape` is the cost's."""
        return cls(y, jnp.zeros(shape, jnp.float32))

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
    """The field on states with a cost per token, whose rate is the mean square of the velocity.

    Args:
      field: on the states inside, which may carry another cost.
    """

    def charged(sub_field: SubField) -> Callable[[Tree, StateWithCost], StateWithCost]:
        return lambda W, y: _with_rate(sub_field(W, y.y))

    return _ChargedField(charged(field.f), charged(field.g))


def _with_rate(value: Vector) -> StateWithCost:
    velocity = value.y if isinstance(value, StateWithCost) else value
    return StateWithCost(value, jnp.square(velocity.astype(jnp.float32)).mean(-1))
