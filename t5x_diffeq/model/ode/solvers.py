"""Schemes for dy/dt = f(y; W(t)) + g(y; W(t)), each as short as in the textbook.

A scheme says at which times within a step it reads W (its nodes, in units of the step size) and
how one step advances the state with the weights at those nodes. A solver of the equation uses only
sums of states and their products with numbers. Steps take

    field: `field.f(W, y)` and `field.g(W, y)` are the sub-fields, `field(W, y)` is their sum
    W: tuple of weights, one per node
    y: the state
    dt: the step size

A scheme may also remember: with `begin` and `end`, its steps take and return a memory in place of
the state. A scheme may learn, too: the weight source makes the `leaves` that the scheme declares
together with the block's, and a step reads them in `W["scheme"]`. `docs/extending.md` has the whole
contract.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
from flax import linen as nn
from jaxtyping import Float

from t5x_diffeq.config.keys.values import STEPS
from t5x_diffeq.config.plugins import is_plugin, make_plugin
from t5x_diffeq.model.layers.array_types import Tree, Vector
from t5x_diffeq.system.arguments import checked
from t5x_diffeq.system.errors import InputError, describe_foreign

SubField = Callable[[Tree, Vector], Vector]
Memory = Any  # what a scheme carries from step to step: the state, or a tree of arrays


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


@checked
@dataclass(frozen=True)
class Scheme:
    """A step, the nodes at which it reads the weights, and what it carries from step to step.

    A memory is a tree of arrays, of fixed shapes unless the scheme `grows`. What it holds of a
    token depends on no other token, so in generation new tokens begin with a memory of their own.
    """

    step: Callable[..., Memory]
    nodes: tuple[float, ...]  # times within a step, in units of the step size
    # order of accuracy, for a field that is not split; None: no solver of dy/dt = f + g
    order: int | None
    evaluations: tuple[int, int]  # how many times a step evaluates f, and g
    # the form of a transformer's layer that a step has: f and g read the same state (`parallel`),
    # or g reads what f has changed (`sequential`); None: it has neither
    layer: Literal["parallel", "sequential"] | None = None

    # what the memory holds, in a phrase; "" for the state alone
    remembers: str = ""
    # the memory at t = 0, given y(0) and the number of steps
    begin: Callable[[Vector, int], Memory] = lambda y, num_steps: y
    # the state in a memory
    end: Callable[[Memory], Vector] = lambda memory: memory
    # whether a step returns a memory of another shape than it takes; steps are then unrolled, so a
    # tuple of all states costs the memory of N states
    grows: bool = False
    # the function that declares the scheme's own leaves, by `declare`, in a Linen module, given the
    # module and the model's config
    leaves: Callable[[nn.Module, Any], None] | None = None
    any_grid: bool = True  # whether its leaves and steps exist for another number of steps


# Euler and the splittings read W at the right end of the step, as the official implementation does.
# The Runge-Kutta schemes read it at each stage's own time, which includes t = 0 and half nodes:
# times that training with Euler never saw.
SCHEMES = {
    "euler": Scheme(euler, nodes=(1.0,), order=1, evaluations=(1, 1), layer="parallel"),
    "lie_trotter": Scheme(
        lie_trotter, nodes=(1.0,), order=1, evaluations=(1, 1), layer="sequential"
    ),
    "strang": Scheme(strang, nodes=(1.0,), order=1, evaluations=(2, 1)),
    "midpoint": Scheme(midpoint, nodes=(0.0, 1 / 2), order=2, evaluations=(2, 2)),
    "heun": Scheme(heun, nodes=(0.0, 1.0), order=2, evaluations=(2, 2)),
    "rk4": Scheme(rk4, nodes=(0.0, 1 / 2, 1.0), order=4, evaluations=(4, 4)),
}


def find_scheme(name: str | Scheme) -> Scheme:
    """The scheme of this name: one of `SCHEMES`, or of another package by importable name.

    A scheme itself may stand for its name.

    Raises:
      InputError: if there is no such scheme, or the name stands for something else.
    """
    if isinstance(name, Scheme):
        return name
    if name in SCHEMES:
        return SCHEMES[name]
    if not is_plugin(name):
        raise InputError(f"scheme {name!r} is unknown; there are {', '.join(SCHEMES)}")
    return _load_scheme(name)


def _load_scheme(name: str) -> Scheme:
    scheme = make_plugin("model.scheme", name, Scheme)
    if not all(0 <= node <= 1 for node in scheme.nodes):
        raise InputError(
            f"model.scheme={name} has the nodes {scheme.nodes}; they must be in [0, 1]"
        )
    if bool(scheme.remembers) != (scheme.begin is not Scheme.begin):
        raise InputError(
            f"model.scheme={name} has remembers={scheme.remembers!r}; a scheme says what it "
            "remembers exactly if it has its own `begin`"
        )
    if scheme.order is not None and scheme.order < 1:
        raise InputError(
            f"model.scheme={name} has order={scheme.order}; it must be at least 1, or None for a "
            "step that is no solver's"
        )
    if scheme.leaves is not None:  # a step can't be taken without them: see `scheme_checks`
        return scheme
    try:
        counted = count_evaluations(scheme, {}, np.zeros((1, 1, 1), np.float32))
    except Exception as error:  # another package's code may raise anything
        raise InputError(
            f"model.scheme={name} with {len(scheme.nodes)} nodes can't take a step: "
            f"{describe_foreign(error)}"
        ) from error
    if counted != tuple(scheme.evaluations):
        raise InputError(
            f"model.scheme={name} says that a step evaluates f and g {scheme.evaluations} times, "
            f"and it does so {counted} times; correct its evaluations"
        )
    return scheme


def count_evaluations(scheme: Scheme, W: Tree, y: Vector) -> tuple[int, int]:
    """How many times the first step evaluates f, and g, from the state y with weights W."""
    calls: list[str] = []

    def sub_field(name: str) -> SubField:
        def note(W: Tree, y: Vector) -> Vector:
            if isinstance(W, tuple):
                raise TypeError("f and g take the weights of one node, W[i], and not all of W")
            if not isinstance(W, dict):
                raise TypeError("f and g take the weights first, and then the state: f(W[i], y)")
            calls.append(name)
            return y

        return note

    field = VectorField(sub_field("f"), sub_field("g"))
    scheme.step(field, (W,) * len(scheme.nodes), scheme.begin(y, 1), 1.0)
    return calls.count("f"), calls.count("g")


@checked
def grid(scheme: str | Scheme, num_steps: int) -> Float[np.ndarray, "N nodes_per_step"]:
    """The nodes: the times in [0, 1] at which each step reads its weights.

    Step n runs from n/N to (n+1)/N.

    Raises:
      InputError: if there is no such scheme, or `num_steps` isn't in 1 to 10,000.
    """
    nodes = np.array(find_scheme(scheme).nodes)
    if not 1 <= num_steps <= STEPS:
        raise InputError(f"num_steps is {num_steps}; integration takes 1 to {STEPS} steps")
    # Rounded to float32 last, so that a time which is in two grids is the same number in both.
    starts = np.arange(num_steps)[:, None]
    return ((starts + nodes) / num_steps).astype(np.float32)
