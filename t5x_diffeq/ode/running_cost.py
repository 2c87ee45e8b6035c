"""A running cost: the integral over depth of what a vector field is charged for its choices.

Optimal control knows it as the Lagrangian of a trajectory, the integral of l(y(t), t) over t, which
is added to the cost of the state at t = 1. Here l balances the experts of a mixture, for example.
The state carries the cost, so every scheme integrates both: dy/dt = F(y; W), dc/dt = l(y; W).
"""

from typing import Any

import jax.numpy as jnp
from flax import struct
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from t5x_diffeq.array_types import State


@struct.dataclass
class StateWithCost:
    """The state y and the cost so far: a vector space, as schemes need.

    Attributes:
      y: the state, `[B, L, D]`.
      cost: the integral of the cost's rate, a float32 scalar.
    """

    y: Any  # JAX makes trees of placeholders, too, so no shape is checked here
    cost: Any

    @classmethod
    def at_start(cls, y: State) -> "StateWithCost":
        """y(0), at no cost."""
        return cls(y, jnp.zeros((), jnp.float32))

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
