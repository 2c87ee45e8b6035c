"""Training on random grids: `train.jitter`.

Trained on one grid, W(t) is fitted at its nodes and for its step size. With jitter r, each
optimizer step solves the ODE on another grid of N steps: step n ends at

    t_n = (n + r (u_n - 1/2)) / N,    u_n uniform in [0, 1),   t_0 = 0 and t_N = 1 stay

and has its own length h_n = t_(n+1) - t_n, between 1 - r and 1 + r of 1/N, and 1/N in the mean. The
scheme reads W(t) where it does within a step, now at t_n + c h_n. Steps of random lengths are those
of Abdulle and Garegnani (2020), who measure the error of a solver by them; here, the model learns
to have little. All layers and microbatches share the grid. It depends on the seed and the step's
number alone, so a resumed run has the same ones. In evaluation, all steps are equal.

A sub-field is linear in the last kernel before the residual stream and its bias, so a step of
another length is one with these leaves times h_n N: schemes need no step sizes of their own.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict
from jaxtyping import Array, Float

from t5x_diffeq.array_types import Times, Weights
from t5x_diffeq.layers.parameter import Parameter
from t5x_diffeq.ode.weights import LeafPath
from t5x_diffeq.runtime.config import Config
from t5x_diffeq.runtime.errors import InputError

_DRAW = 0x1771E5  # distinguishes this use of a step's key from others


class MovedGrid(NamedTuple):
    """A grid whose steps differ in length.

    Attributes:
      times: its nodes, in the order in which a pass reads them.
      stretch: of each node, the length of its step times N.
    """

    times: Times
    stretch: Float[Array, " nodes"]


def check_jitter(config: Config) -> None:
    """Checks that the grid can move.

    Raises:
      InputError: if weights exist at their own nodes alone or don't depend on time, the scheme
        needs equal steps, other grids are drawn as well, or the optimizer keeps gradients at the
        nodes.
    """
    if not config.train.jitter:
        return
    given, model = f"train.jitter={config.train.jitter}", config.model
    if model.weights != "time_dependent":
        raise InputError(
            f"{given} moves the nodes of W(t), and model.weights={model.weights} has no W(t); "
            "leave it out, or take time_dependent"
        )
    if model.scheme == "leapfrog":
        raise InputError(
            f"{given} makes steps of different lengths, and model.scheme=leapfrog needs equal ones;"
            " leave it out, or take another scheme"
        )
    if config.train.depths:
        raise InputError(
            f"{given} moves one grid, and train.depths={config.train.depths} draws several; leave "
            "one of them out"
        )
    if config.optimizer.moments == "factored":
        raise InputError(
            f"{given} moves the nodes, at which optimizer.moments=factored keeps gradients; take "
            "int8, or leave train.jitter out"
        )


def move_grid(nodes: Float[np.ndarray, "N nodes_per_step"], jitter: float, key: Array) -> MovedGrid:
    """The grid of an optimizer step.

    Args:
      nodes: the nodes of N equal steps, as `schemes.grid` gives them.
      jitter: r, in [0, 1].
      key: the key of the step.
    """
    N = len(nodes)
    fractions = nodes[0] * N  # where a step reads W, from 0 at its start to 1 at its end
    u = jax.random.uniform(jax.random.fold_in(key, _DRAW), (N - 1,))
    inner = (jnp.arange(1, N) + jitter * (u - 0.5)) / N
    ends = jnp.concatenate((jnp.zeros(1), inner, jnp.ones(1)))
    lengths = jnp.diff(ends)
    times = ends[:-1, None] + fractions * lengths[:, None]
    return MovedGrid(times.reshape(-1), jnp.repeat(N * lengths, nodes.shape[1]))


def stretch_steps(
    weights: Weights, stretch: Float[Array, " nodes"], declared: dict[LeafPath, Parameter]
) -> Weights:
    """The weights of a pass with equal steps that takes steps of these lengths instead."""
    leaves = flatten_dict(weights)
    for path, leaf in leaves.items():
        if declared[path].writes_residual:
            factor = stretch.reshape(-1, *(1,) * (leaf.ndim - 1))
            leaves[path] = leaf * factor.astype(leaf.dtype)
    return unflatten_dict(leaves)
