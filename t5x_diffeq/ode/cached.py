"""Integration of new tokens, whose f takes what it remembers of the tokens before them."""

from collections.abc import Callable
from typing import Any

from t5x_diffeq.layers.array_types import State, Tree, Vector
from t5x_diffeq.ode.integrate import step_function
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
) -> tuple[State, list[Memory]]:
    """y(1) from y(0) with a memory for each evaluation of f; and the updated memories.

    A scheme's step evaluates sub-fields of weights and state, as in a textbook, and knows no
    memory, so this function gives each evaluation of f its own. The steps are unrolled: for a token
    or two most of the time goes into reading weights, and a scan would first copy the weights of
    each step.

    Args:
      f: one sub-field: from weights, state and memory to its value and the updated memory.
      g: the other sub-field, which has no memory.
      weights: the weights of each step, from `weights_by_step`.
      y: the state at t = 0.
      memories: one for each evaluation of f, in the order of the evaluations.
      scheme: the scheme's name, for `schemes.find_scheme`.
      step_size: dt.
    """
    before, after = iter(memories), []

    def f_with_next_memory(W: Tree, y: Vector) -> Vector:
        value, memory = f(W, y, next(before))
        after.append(memory)
        return value

    field = VectorField(f_with_next_memory, g)
    for n, of_step in enumerate(weights):
        step = step_function(lambda _: field, scheme, step_size, scope=f"step {n}")
        y = step(y, (of_step, None))
    return y, after
