"""Integration in parallel over depth: parareal (Lions, Maday and Turinici 2001).

Depth is cut into S slices of N / S steps. The fine solver F takes these steps; the coarse solver G
crosses a slice in one long step of the same scheme, with W(t) at that step's own nodes. If u[s] is
the state with which slice s begins, and v[s] that of the iteration before, an iteration computes

    u[s+1] = G(u[s]) + F(v[s]) - G(v[s]),      u[0] = v[0] = y(0).

All F(v[s]) are computed at once, each slice by its own devices, so an iteration has N / S fine and
S coarse steps in sequence. After j iterations u[1], ..., u[j] are exactly those of the serial pass,
so S iterations are the serial pass. Only an ODE has a coarse solver: layers can't be skipped.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from t5x_diffeq.layers.array_types import State, States, Tree
from t5x_diffeq.ode.integrate import FieldOfKey, step_function, step_inputs

Ends = Float[Array, "slices B L D"]  # states with which slices end
Solver = Callable[[State, Tree], State]  # from the start of a slice, and its weights, to its end


class Iterate(NamedTuple):
    """The states of an iteration.

    Attributes:
      states: at the ends of the slices, u[0], ..., u[S].
      coarse: G(u[s]) of each slice.
    """

    states: States
    coarse: Ends


class Parareal(NamedTuple):
    """The two solvers of a slice, and the weights that they read.

    Attributes:
      fine: F.
      coarse: G.
      weights: of F and of G; leaves `[S, ...]`.
      axis: the mesh axis whose devices share the slices; None: each device computes all.
    """

    fine: Solver
    coarse: Solver
    weights: tuple[Tree, Tree]
    axis: str | None = None

    def start(self, y: State) -> Iterate:
        """The coarse pass."""
        return self._sweep(y, None)

    def fine_ends(self, states: States) -> Ends:
        """F(u[s]) of all slices at once."""
        return self._on_slices(self.fine)(states[:-1], self.weights[0])

    def correct(self, found: Iterate, ends: Ends) -> Iterate:
        """The next iteration, from F(v[s]) of this one."""
        return self._sweep(found.states[0], ends - found.coarse)

    def _sweep(self, y: State, jumps: Ends | None) -> Iterate:
        """u[s+1] = G(u[s]) + jumps[s], serially."""

        def advance(y: State, at: tuple[Tree, State | None]) -> tuple[State, tuple[State, State]]:
            W, jump = at
            end = self.coarse(y, W)
            after = end if jump is None else end + jump
            return after, (after, end)

        _, (after, ends) = jax.lax.scan(advance, y, (self.weights[1], jumps))
        return Iterate(jnp.concatenate((y[None], after)), ends)

    def _on_slices(self, solver: Solver) -> Solver:
        if self.axis is None:
            return jax.vmap(solver)
        slices = jax.sharding.PartitionSpec(self.axis)
        # The other mesh axes are left to the compiler, as outside.
        return jax.shard_map(
            jax.vmap(solver), in_specs=slices, out_specs=slices, axis_names={self.axis}
        )


def parareal(
    field: FieldOfKey,
    weights: Tree,
    coarse_weights: Tree,
    *,
    scheme: str,
    num_steps: int,
    step_size: float,
    slices: int,
    axis: str | None = None,
) -> Parareal:
    """The solvers of an integration by `scheme`, without dropout.

    Args:
      field: see `integrate`.
      weights: at the nodes of the N steps, leaves `[nodes, ...]`.
      coarse_weights: at the nodes of S steps.
      scheme: the scheme's name.
      num_steps: N, which S divides.
      step_size: dt of the fine steps.
      slices: S.
      axis: the mesh axis whose devices share the slices, if any.
    """
    within = num_steps // slices
    fine, _ = step_inputs(weights, scheme, num_steps, key=None)
    by_slice = jax.tree.map(lambda w: w.reshape(slices, within, *w.shape[1:]), fine)
    coarse, _ = step_inputs(coarse_weights, scheme, slices, key=None)
    step = step_function(field, scheme, step_size)
    long_step = step_function(field, scheme, step_size * within)

    def cross(y: State, weights: Tree) -> State:
        return jax.lax.scan(lambda y, W: (step(y, (W, None)), None), y, weights)[0]

    return Parareal(cross, lambda y, W: long_step(y, (W, None)), (by_slice, coarse), axis)


def iterate(
    solvers: Parareal, y: State, iterations: int
) -> tuple[Float[Array, "iterates states B L D"], Float[Array, " iterations"]]:
    """The states of the coarse pass and of each iteration; and the residual before each.

    It can be differentiated, unlike `solve`.

    Args:
      solvers: F and G.
      y: the state at t = 0.
      iterations: how many.
    """

    def once(found: Iterate, _: None) -> tuple[Iterate, tuple[States, Array]]:
        ends = solvers.fine_ends(found.states)
        after = solvers.correct(found, ends)
        return after, (after.states, _residual(ends, found.states))

    start = solvers.start(y)
    _, (states, residuals) = jax.lax.scan(once, start, None, length=iterations)
    return jnp.concatenate((start.states[None], states)), residuals


def solve(
    solvers: Parareal, y: State, *, tolerance: float, slices: int
) -> tuple[State, Int[Array, ""]]:
    """y(1), and the number of iterations that it took.

    It ends when the residual is at most `tolerance`, or after S iterations, which are exact
    whatever the coarse solver does.

    Args:
      solvers: F and G.
      y: the state at t = 0.
      tolerance: of the residual; 0 for the serial pass's own result.
      slices: S.
    """

    def goes_on(at: tuple[Iterate, Array, Array]) -> Array:
        _, count, residual = at
        return (residual > tolerance) & (count < slices)

    def once(at: tuple[Iterate, Array, Array]) -> tuple[Iterate, Array, Array]:
        found, count, _ = at
        ends = solvers.fine_ends(found.states)
        return solvers.correct(found, ends), count + 1, _residual(ends, found.states)

    first: Any = (solvers.start(y), jnp.zeros((), jnp.int32), jnp.asarray(jnp.inf, jnp.float32))
    found, count, _ = jax.lax.while_loop(goes_on, once, first)
    return found.states[-1], count


def _residual(ends: Ends, states: States) -> Float[Array, ""]:
    """The largest |F(u[s]) - u[s+1]| / |u[s+1]| over the slices: 0 if u is the serial pass's."""
    apart, size = (
        jnp.linalg.norm(x.reshape(len(x), -1), axis=1) for x in (ends - states[1:], states[1:])
    )
    return jnp.max(apart / size).astype(jnp.float32)


def steps_in_sequence(num_steps: int, slices: int, iterations: int) -> int:
    """How many steps, fine or coarse, follow one another: S, and N / S + S for each iteration."""
    return slices + iterations * (num_steps // slices + slices)
