"""The Adams-Bashforth method of order 2: one evaluation a step, and the value of the step before.

    --config.model.scheme=examples.depth.adams_bashforth:adams_bashforth

y(n+1) = y(n) + dt (3/2 F(n) - 1/2 F(n-1)), where the first step is Euler's. Like the Runge-Kutta
schemes, it reads W at the step's own time n/N.
"""

import jax.numpy as jnp

import t5x_diffeq as td


def step(field, W, memory, dt):
    """Maps (y(n), F(n-1), the weight of F(n-1)) to the same of the next step."""
    y, before, c = memory
    F = field(W[0], y)
    return y + dt * ((1 + c) * F - c * before), F, jnp.full_like(c, 0.5)


adams_bashforth = td.Scheme(
    step,
    nodes=(0.0,),
    order=2,
    evaluations=(1, 1),
    remembers="the field's value at the step before",
    begin=lambda y, num_steps: (y, 0.0 * y, jnp.zeros((), y.dtype)),
    end=lambda memory: memory[0],
)
