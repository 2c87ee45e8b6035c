"""The solver on a vector field of one's own."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike
from jaxtyping import Array

from t5x_diffeq.model.layers.array_types import Tree, Vector
from t5x_diffeq.model.ode.integrate import integrate, trajectory
from t5x_diffeq.model.ode.schemes import grid
from t5x_diffeq.model.ode.solvers import VectorField
from t5x_diffeq.system.errors import InputError


def integrate_field(
    field: VectorField | Callable[[Tree, Vector], Vector],
    weights: Tree | Callable[[Array], Tree],
    y: ArrayLike,
    *,
    scheme: str = "euler",
    num_steps: int,
    keep: bool = False,
) -> Array:
    """y(1) of dy/dt = field(W(t), y) from y(0); differentiable with respect to weights and y.

    Args:
      field: the field, or a `VectorField` of two sub-fields that a splitting scheme takes in turn.
      weights: W(t), as a function of the times at which the scheme reads it, `[nodes]`, or as its
        values there: a tree of arrays `[nodes, ...]` in the order of `grid(scheme, num_steps)`.
      y: the state at t = 0, an array of any shape.
      scheme: a scheme's name, such as "rk4", or the importable name of one of another package.
      num_steps: number of solver steps N, of size 1/N.
      keep: whether to return the states at t = 0, 1/N, ..., 1, stacked, instead of the last one.

    Raises:
      InputError: if there is no such scheme, or the weights have another number of nodes.
    """
    times = grid(scheme, num_steps).reshape(-1)
    made = weights(jnp.asarray(times)) if callable(weights) else weights
    for leaf in jax.tree.leaves(made):
        if jnp.ndim(leaf) == 0 or len(leaf) != len(times):
            raise InputError(
                f"the weights have a leaf of shape {jnp.shape(leaf)}; {num_steps} steps of "
                f"{scheme} read them at {len(times)} times, which must be its first axis"
            )
    if not isinstance(field, VectorField):
        field = VectorField(field, lambda W, y: jnp.zeros_like(y))
    solve = trajectory if keep else integrate
    y = jnp.asarray(y)
    return solve(
        lambda args: lambda key: field,
        made,
        y,
        scheme=scheme,
        num_steps=num_steps,
        step_size=1 / num_steps,
    )
