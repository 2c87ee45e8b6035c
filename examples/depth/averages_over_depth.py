"""DenseFormer (arXiv 2402.02622): after each layer, a learned average of all states so far.

    --config.model.scheme=examples.depth.averages_over_depth:averages

Layer n maps y_(n-1) to x_n; then y_n = sum over k = 0..n of a_(n,k) x_k, with x_0 = y_0 the
embedded tokens and a_n the layer's own averages, which begin as (0, ..., 0, 1). Every layer
averages (the paper's dilation and period are 1). With `:ode` the averages are functions of t, too.
"""

from flax import linen as nn

import t5x_diffeq as td
from t5x_diffeq.model.layers.parameter import declare
from t5x_diffeq.model.ode.solvers import lie_trotter


def step(field, W, memory, dt):
    """The layer, and its average with all states before it."""
    states, y = memory  # x_0 .. x_(n-1), and y_(n-1)
    states = (*states, lie_trotter(field, W, y, dt))
    a = W[0]["scheme"]["averages"].astype(y.dtype)  # what is added to (0, ..., 0, 1)
    return states, states[-1] + sum(a[k] * x for k, x in enumerate(states))


def leaves(module, config):
    """a_(n,k) for k = 0..N; layer n reads n + 1 of them."""
    declare(module, "averages", nn.initializers.zeros, (config.num_steps + 1,), (None,), "shift")


averages = td.Scheme(
    step,
    nodes=(1.0,),
    order=None,
    evaluations=(1, 1),
    remembers="the states of all earlier layers",
    begin=lambda y, num_steps: ((y,), y),
    end=lambda memory: memory[1],
    grows=True,
    leaves=leaves,
    any_grid=False,
)
