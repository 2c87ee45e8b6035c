"""A loop with input injection: one layer read N times, each time with the embedded tokens.

    --config.model.weights=shared --config.model.scheme=examples.depth.loop:injected

y <- layer(y + A y(0)), where A is a learned matrix, zero at first: without it this is the Universal
Transformer's recurrence (arXiv 1807.03819), without its embeddings of the step. Huginn (arXiv
2502.05171) maps [y, y(0)] linearly, begins with noise in place of y(0), and has own layers before
and after the loop: see `own_ends`. A loop can be read more often than it was trained:
`evaluate --num_steps`.
"""

from flax import linen as nn

import t5x_diffeq as td
from t5x_diffeq.model.layers.parameter import declare
from t5x_diffeq.model.ode.solvers import lie_trotter


def step(field, W, memory, dt):
    """A layer that reads the state and the embedded tokens."""
    y, y0 = memory
    A = W[0]["scheme"]["injection"].astype(y.dtype)
    return lie_trotter(field, W, y + y0 @ A, dt), y0


def leaves(module, config):
    """A."""
    shape, axes = (config.embed_dim, config.embed_dim), ("embed", None)
    declare(
        module, "injection", nn.initializers.zeros, shape, axes, "kernel", fan_in=config.embed_dim
    )


injected = td.Scheme(
    step,
    nodes=(1.0,),
    order=None,
    evaluations=(1, 1),
    remembers="the embedded tokens",
    begin=lambda y, num_steps: (y, y),
    end=lambda memory: memory[0],
    leaves=leaves,
)
