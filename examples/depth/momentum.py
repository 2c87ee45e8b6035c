"""Momentum residual networks (arXiv 2102.07870): the residual stream has a velocity.

    --config.model.scheme=examples.depth.momentum:momentum

v(n+1) = gamma v(n) + (1 - gamma) F(y(n)) and y(n+1) = y(n) + dt v(n+1), from v(0) = 0. F is f + g,
both at the same state. The backward pass stores states as for any scheme; the paper's backward pass
recomputes them by running the steps backwards.
"""

import t5x_diffeq as td


def momentum(gamma: float = 0.9) -> td.Scheme:
    """The scheme with this momentum: `momentum(gamma=0.5)`."""

    def step(field, W, memory, dt):
        y, v = memory
        v = gamma * v + (1 - gamma) * field(W[0], y)
        return y + dt * v, v

    return td.Scheme(
        step,
        nodes=(1.0,),
        order=None,
        evaluations=(1, 1),
        remembers="the velocity",
        begin=lambda y, num_steps: (y, 0.0 * y),
        end=lambda memory: memory[0],
    )
