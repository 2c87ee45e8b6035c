"""The schemes by name, and the grid of times at which a scheme reads the weights."""

import numpy as np
from jaxtyping import Float

from t5x_diffeq.config.plugins import check_returns, is_plugin, load_plugin
from t5x_diffeq.model.ode.solvers import (
    Scheme,
    SubField,
    VectorField,
    euler,
    heun,
    lie_trotter,
    midpoint,
    rk4,
    strang,
)
from t5x_diffeq.system.errors import InputError

# Euler and the splittings read W at the right end of the step, as the official implementation does.
# The Runge-Kutta schemes read it at each stage's own time, which includes t = 0 and half nodes:
# times that training with Euler never saw.
SCHEMES = {
    "euler": Scheme(euler, nodes=(1.0,), order=1, evaluations=(1, 1)),
    "lie_trotter": Scheme(lie_trotter, nodes=(1.0,), order=1, evaluations=(1, 1)),
    "strang": Scheme(strang, nodes=(1.0,), order=1, evaluations=(2, 1)),
    "midpoint": Scheme(midpoint, nodes=(0.0, 1 / 2), order=2, evaluations=(2, 2)),
    "heun": Scheme(heun, nodes=(0.0, 1.0), order=2, evaluations=(2, 2)),
    "rk4": Scheme(rk4, nodes=(0.0, 1 / 2, 1.0), order=4, evaluations=(4, 4)),
}


def find_scheme(name: str) -> Scheme:
    """The scheme of this name: one of `SCHEMES`, or of another package by importable name.

    Raises:
      InputError: if there is no such scheme.
    """
    if name in SCHEMES:
        return SCHEMES[name]
    if not is_plugin(name):
        raise InputError(f"scheme {name!r} is unknown; there are {', '.join(SCHEMES)}")
    return _load_scheme(name)


def _load_scheme(name: str) -> Scheme:
    plugin = load_plugin("model.scheme", name)
    if not isinstance(plugin, Scheme):
        check_returns("model.scheme", name, plugin, Scheme)
    try:
        scheme = plugin if isinstance(plugin, Scheme) else plugin()
    except TypeError as error:
        raise InputError(
            f"model.scheme={name} can't be called without arguments ({error}); name a "
            "t5x_diffeq.Scheme, or a function that returns one"
        ) from error
    if not isinstance(scheme, Scheme):
        raise InputError(
            f"model.scheme={name} is a {type(scheme).__name__}, and must be (or return) a "
            "t5x_diffeq.Scheme: a step, its nodes, order and evaluations"
        )
    if not all(0 <= node <= 1 for node in scheme.nodes):
        raise InputError(
            f"model.scheme={name} has the nodes {scheme.nodes}; they must be in [0, 1]"
        )
    try:
        counted = _count_evaluations(scheme)
    except (TypeError, ValueError) as error:
        raise InputError(
            f"model.scheme={name} with {len(scheme.nodes)} nodes can't take a step: {error}"
        ) from error
    if counted != tuple(scheme.evaluations):
        raise InputError(
            f"model.scheme={name} says that a step evaluates f and g {scheme.evaluations} times, "
            f"and it does so {counted} times; correct its evaluations"
        )
    return scheme


def _count_evaluations(scheme: Scheme) -> tuple[int, int]:
    calls: list[str] = []

    def sub_field(name: str) -> SubField:
        return lambda W, y: calls.append(name) or y  # type: ignore[func-returns-value]

    field = VectorField(sub_field("f"), sub_field("g"))
    scheme.step(field, ({},) * len(scheme.nodes), np.zeros(()), 1.0)
    return calls.count("f"), calls.count("g")


def grid(scheme: str, num_steps: int) -> Float[np.ndarray, "N nodes_per_step"]:
    """The nodes: the times in [0, 1] at which each step reads its weights.

    Step n runs from n/N to (n+1)/N.

    Raises:
      InputError: if there is no such scheme, or `num_steps` is less than 1.
    """
    nodes = np.array(find_scheme(scheme).nodes)
    if num_steps < 1:
        raise InputError(f"num_steps is {num_steps}; integration takes at least 1 step")
    starts = np.arange(num_steps)[:, None]
    return ((starts + nodes) / num_steps).astype(np.float32)
