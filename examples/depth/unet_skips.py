"""U-net skips: each layer of the second half also reads what its mirror image wrote.

    --config.model.scheme=examples.depth.unet_skips:skips

The first N // 2 steps keep the states that they return. Each later step takes the newest kept state
that is left, times the step's own gain g (1 at first), adds it to the state, and then acts as a
layer, as in the nanoGPT speedruns. If N is odd, none is left for the last step.
"""

from flax import linen as nn

import t5x_diffeq as td
from t5x_diffeq.model.layers.parameter import declare
from t5x_diffeq.model.ode.solvers import lie_trotter


def step(field, W, memory, dt):
    """A layer of the first half, or of the second."""
    kept, y, to_keep = memory
    if kept and not to_keep:
        *kept, skipped = kept
        y = y + W[0]["scheme"]["gain"].astype(y.dtype) * skipped
    y = lie_trotter(field, W, y, dt)
    return ((*kept, y) if to_keep else tuple(kept)), y, to_keep[1:]


def leaves(module, config):
    """The gain of a step, a number."""
    declare(module, "gain", nn.initializers.ones, (), (), "scale")


skips = td.Scheme(
    step,
    nodes=(1.0,),
    order=None,
    evaluations=(1, 1),
    remembers="the states of the first half",
    # A None for each state to keep: it holds no array, so their number is known while tracing.
    begin=lambda y, num_steps: ((), y, (None,) * (num_steps // 2)),
    end=lambda memory: memory[1],
    grows=True,
    leaves=leaves,
)
