"""Schemes for dy/dt = f(y; W(t)) + g(y; W(t)), each as short as in the textbook.

A scheme says at which times within a step it reads W (its nodes, in units of the step size) and
how one step advances the state with the weights at those nodes. It uses only sums of states and
their products with numbers. Steps take

    field: `field.f(W, y)` and `field.g(W, y)` are the sub-fields, `field(W, y)` is their sum
    W: tuple of weights, one per node
    y: the state
    dt: the step size
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from t5x_diffeq.model.layers.array_types import Tree, Vector

SubField = Callable[[Tree, Vector], Vector]


class VectorField(NamedTuple):
    """A field split in two: attention f and MLP g."""

    f: SubField
    g: SubField

    def __call__(self, W: Tree, y: Vector) -> Vector:
        """f + g."""
        return self.f(W, y) + self.g(W, y)


def euler(field: VectorField, W: tuple[Tree], y: Vector, dt: float) -> Vector:
    """Euler: order 1, one stage; both sub-fields from the same y (the paper's scheme)."""
    (W1,) = W
    return y + dt * field(W1, y)


def lie_trotter(field: VectorField, W: tuple[Tree], y: Vector, dt: float) -> Vector:
    """Lie-Trotter splitting with Euler substeps: order 1; the classical residual block.

    Lu et al. 2019 read a transformer's layer, attention and then MLP, as this scheme.
    """
    (W1,) = W
    y = y + dt * field.f(W1, y)
    return y + dt * field.g(W1, y)


def strang(field: VectorField, W: tuple[Tree], y: Vector, dt: float) -> Vector:
    """Strang splitting with Euler substeps, MacaronNet's form (Lu et al. 2019): half f, g, half f.

    Strang splitting has order 2 when its substeps have order 2; with Euler substeps it has order 1.
    """
    (W1,) = W
    y = y + dt / 2 * field.f(W1, y)
    y = y + dt * field.g(W1, y)
    return y + dt / 2 * field.f(W1, y)


def midpoint(field: VectorField, W: tuple[Tree, Tree], y: Vector, dt: float) -> Vector:
    """Explicit midpoint, the modified Euler method: order 2, two stages."""
    W0, Wh = W
    k1 = field(W0, y)
    return y + dt * field(Wh, y + dt / 2 * k1)


def heun(field: VectorField, W: tuple[Tree, Tree], y: Vector, dt: float) -> Vector:
    """Heun, the explicit trapezoidal rule, RK2: order 2, two stages."""
    W0, W1 = W
    k1 = field(W0, y)
    k2 = field(W1, y + dt * k1)
    return y + dt / 2 * (k1 + k2)


def rk4(field: VectorField, W: tuple[Tree, Tree, Tree], y: Vector, dt: float) -> Vector:
    """The classical Runge-Kutta method (Kutta 1901): order 4, four stages at three nodes."""
    W0, Wh, W1 = W
    k1 = field(W0, y)
    k2 = field(Wh, y + dt / 2 * k1)
    k3 = field(Wh, y + dt / 2 * k2)
    k4 = field(W1, y + dt * k3)
    return y + dt / 6 * (k1 + 2 * k2 + 2 * k3 + k4)


@dataclass(frozen=True)
class Scheme:
    """A step and the nodes at which it reads the weights, in units of the step size.

    Attributes:
      step: the function.
      nodes: times within a step, in units of the step size.
      order: order of accuracy, for a field that is not split.
      evaluations: how many times a step evaluates f, and g.
    """

    step: Callable[..., Vector]
    nodes: tuple[float, ...]
    order: int
    evaluations: tuple[int, int]
