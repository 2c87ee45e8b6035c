"""Integration of new tokens, whose f takes what it remembers of the tokens before them."""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from t5x_diffeq.array_types import State, Tree, Vector
from t5x_diffeq.ode.early_exit import skip_if_still, stop_still
from t5x_diffeq.ode.integrate import step_function
from t5x_diffeq.ode.schemes import find_scheme
from t5x_diffeq.ode.solvers import SubField, VectorField

Memory = Any  # of one evaluation of a sub-field: a tree of arrays
SubFieldWithMemory = Callable[[Tree, Vector, Memory], tuple[Vector, Memory]]


def integrate_with_memory(
    f: SubFieldWithMemory,
    g: SubField,
    weights: list[Tree],
    y: State,
    memories: list[Memory],
    *,
    scheme: str,
    step_size: float,
    tolerance: float = 0.0,
    real: Bool[Array, "B L"] | None = None,
) -> tuple[State, list[Memory], Int[Array, "B L"]]:
    """y(1) from y(0) with a memory for each evaluation of f; the updated memories; steps taken.

    A scheme's step evaluates sub-fields of weights and state, as in a textbook, and knows no
    memory, so this function gives each evaluation of f its own. The steps are unrolled: for a token
    or two most of the time goes into reading weights, and a scan would first copy the weights of
    each step.

    With a tolerance, tokens stop as in `early_exit`. Once all of them have, g is not evaluated; f
    is, because later tokens need what it remembers of them.

    Args:
      f: one sub-field: from weights, state and memory to its value and the updated memory.
      g: the other sub-field, which has no memory.
      weights: the weights of each step, from `weights_by_step`.
      y: the state at t = 0.
      memories: one for each evaluation of f, in the order of the evaluations.
      scheme: the scheme's name, for `schemes.find_scheme`.
      step_size: dt.
      tolerance: a token stops once its state changes by less than this, relatively; 0: never.
      real: with a tolerance, whether each is a token, not padding.
    """
    before, after = iter(memories), []

    def f_with_next_memory(W: Tree, y: Vector) -> Vector:
        value, memory = f(W, y, next(before))
        after.append(memory)
        return value

    active = jnp.ones(y.shape[:-1], bool) if real is None else real
    steps = jnp.zeros(y.shape[:-1], jnp.int32)
    field = VectorField(f_with_next_memory, skip_if_still(g, lambda: active) if tolerance else g)
    found = find_scheme(scheme)
    carried = found.start(y)
    for n, of_step in enumerate(weights):
        step = step_function(lambda _: field, scheme, step_size, scope=f"step {n}")
        following = step(carried, (of_step, None))
        steps += active
        if tolerance:
            carried, active = stop_still(carried, following, active, tolerance)
        else:
            carried = following
    return found.end(carried), after, steps
