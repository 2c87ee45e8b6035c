"""Depth of each token by itself: a token stops at the first step that hardly moves it.

With a[0] true and rms(.) the root mean square over the width of the state,

    z = the scheme's step from y[n]
    y[n+1] = z where a[n], else y[n]
    a[n+1] = a[n] and rms(z - y[n]) >= tolerance * rms(y[n])

so a token's state at all later t is that of the step at which it stopped. The other tokens go on,
and attend to keys and values that W(t) makes of that state. As in Universal Transformers (Dehghani
et al. 2019) and depth-adaptive transformers (Elbayad et al. 2020), depth depends on the input; here
nothing is trained for it, because the velocity of an ODE says when a token is still.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from t5x_diffeq.array_types import State, Tree
from t5x_diffeq.ode.integrate import FieldOfKey, step_function, step_inputs
from t5x_diffeq.ode.schemes import find_scheme
from t5x_diffeq.ode.solvers import Scheme, SubField
from t5x_diffeq.runtime.errors import InputError

Active = Bool[Array, "B L"]  # whether a token still moves


def integrate_with_exits(
    field: FieldOfKey,
    weights: Tree,
    y: State,
    *,
    scheme: str,
    num_steps: int,
    step_size: float,
    tolerance: float,
) -> tuple[State, Int[Array, "B L"]]:
    """y(1) from y(0), and the steps that each token took; the other arguments are `integrate`'s.

    Every step is computed for all tokens. Generation skips what it can (`skip_if_still`).

    Raises:
      InputError: if the scheme carries more than the state from step to step.
    """
    check_exits(scheme)
    step = step_function(field, scheme, step_size)

    def advance(carried: tuple, x: Tree) -> tuple[tuple, None]:
        y, active, steps = carried
        y, still_active = stop_still(y, step(y, x), active, tolerance)
        return (y, still_active, steps + active), None

    everywhere = jnp.ones(y.shape[:-1], bool)
    start = y, everywhere, jnp.zeros(y.shape[:-1], jnp.int32)
    (y, _, steps), _ = jax.lax.scan(advance, start, step_inputs(weights, scheme, num_steps, None))
    return y, steps


def check_exits(scheme: str) -> None:
    """Checks that tokens can stop between the steps of the scheme.

    Raises:
      InputError: if they can't.
    """
    if type(find_scheme(scheme)).start is not Scheme.start:
        raise InputError(
            f"--exit_tolerance with scheme {scheme}: its steps take the states of two times, so a "
            "token can't stop between them; give --scheme=euler or another one-step scheme"
        )


def stop_still(
    before: State, after: State, active: Active, tolerance: float
) -> tuple[State, Active]:
    """The states after a step, of which those that were active have moved; and who is active."""
    y = jnp.where(active[..., None], after, before)
    moved, size = _rms(after - before), _rms(before)
    return y, active & (moved >= tolerance * size)


def skip_if_still(g: SubField, active: Callable[[], Active]) -> SubField:
    """The sub-field, which is only computed if a token is active."""

    def g_or_nothing(W: Tree, y: State) -> State:
        return jax.lax.cond(active().any(), lambda: g(W, y), lambda: jnp.zeros_like(y))

    return g_or_nothing


def _rms(x: State) -> Float[Array, "B L"]:
    return jnp.sqrt(jnp.square(x.astype(jnp.float32)).mean(-1))
