"""Late growth: a run takes few solver steps at first, then all, and begins as the same model.

With `train.growth=copy` and `train.depths=(M,)`, the first part of a run takes M solver steps and
trains everything except the P of kernels and the time embeddings, which wait. For M = 1 they would
be no more than another way to move W0, and they are most of an optimizer step's cost.

Then the grid grows to N = `model.num_steps`. Let row n of E be e(t_n) at the fine nodes, and row n
of C be e at the node of the coarse step in which the fine step n begins. The least change of P, in
the Frobenius norm, with which W(t_n) is what W was in that coarse step, makes E P what C P was:

    P <- P + E^+ (C - E) P,    E^+ the pseudo-inverse of E.

It exists if the rows of E are independent. With fewer functions of time than steps, T < N, they are
not; then e must be a table with a row for each fine node, which takes the values of C, and P stays.
So the fine model integrates the piecewise constant field of the coarse one with smaller steps, and
from there on P and e(t) learn, too. As P has no moments yet, the optimizer begins anew; the
schedule of the learning rate goes on.

At initialisation with 12 nodes and T = 48, the condition number of E is 6, and P changes by 0.6 of
its norm. A smooth e(t) can't jump between neighbouring nodes: with `model.time_scale=10` it is
10^4, and P changes by 70 times its norm for M = 3, though only by 0.5 for M = 1.

Zhiqi Bu, "Deep Progressive Training" (2025), grows layers from one, late and once, with the decay
of the learning rate after it.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from flax.traverse_util import flatten_dict, unflatten_dict
from jaxtyping import Array, Float

from t5x_diffeq.layers.parameter import Parameter, is_parameter
from t5x_diffeq.models.language_model import LanguageModel, nodes
from t5x_diffeq.ode.contraction import project
from t5x_diffeq.ode.weights import LeafPath
from t5x_diffeq.training.host_memory import fetch
from t5x_diffeq.training.optimizer import make_optimizer
from t5x_diffeq.training.setup import Setup
from t5x_diffeq.training.state import TrainState, declared_params


def while_waiting(
    setup: Setup, depths: tuple[int, ...] | None
) -> tuple[frozenset[LeafPath], optax.GradientTransformationExtraArgs]:
    """The paths of the parameters that wait in a step on these grids, and the others' optimizer."""
    if setup.config.train.growth == "jump" or depths in (None, (setup.model.config.num_steps,)):
        return frozenset(), setup.optimizer
    declared = declared_params(setup.model)
    waiting = waiting_leaves(declared)
    learning = unflatten_dict(
        {
            path: leaf
            for path, leaf in _leaves(declared).items()
            if path not in waiting and setup.trains(path[0])
        }
    )
    return waiting, make_optimizer(setup.config.optimizer, learning, setup.schedule)


def waiting_leaves(declared: dict) -> frozenset[LeafPath]:
    """The paths of the parameters that learn only after growth: P of kernels and e(t).

    Args:
      declared: the parameters in their boxes, from `state.declared_params`.
    """
    return frozenset(
        path
        for path, leaf in _leaves(declared).items()
        if leaf.role == "time_embedding" or (_is_projection(leaf) and leaf.role == "kernel")
    )


def make_grow(setup: Setup) -> jax.stages.Wrapped:
    """The compiled function from the last state on the coarse grid to the first on the fine one.

    It takes the place of the state that it is given.
    """
    shardings = jax.tree.map(lambda x: x.sharding, setup.abstract_state)
    return jax.jit(partial(_grow, setup), out_shardings=shardings, donate_argnums=0)


def _grow(setup: Setup, state: TrainState) -> TrainState:
    (coarse_steps,) = set(setup.config.train.depths)
    grown = copy_weights(setup.model, coarse_steps, state.params)
    averages = state.averages
    if averages is not None:
        averages = fetch(averages, setup.abstract_state.averages)
        of_averages = copy_weights(setup.model, coarse_steps, {**state.params, **averages})
        averages = {name: of_averages[name] for name in averages}
    fresh = setup.optimizer.init({name: grown[name] for name in grown if setup.trains(name)})
    return TrainState(
        state.step, grown, _keep_schedule(fresh, state.opt_state), averages, state.recent
    )


def copy_weights(model: LanguageModel, coarse_steps: int, params: dict) -> dict:
    """The parameters with which each step has the weights of the coarse step in which it begins.

    Args:
      model: the model on the fine grid.
      coarse_steps: M, the number of steps of the coarse grid.
      params: the parameters, trained on the coarse grid.
    """
    fine = nodes(model.config)
    coarse = nodes(model.at_depth(coarse_steps).config)[coarse_step_of(len(fine), coarse_steps)]
    make = nn.apply(LanguageModel.weights_and_embeddings, model)
    _, embeddings = make({"params": params}, jnp.asarray(np.concatenate((fine, coarse))))
    rows = {name: jnp.split(e, 2) for name, e in embeddings.items()}  # E and C
    leaves = flatten_dict(params)
    for path, leaf in _leaves(declared_params(model)).items():
        if _is_projection(leaf):
            E, C = rows[path[1]]
            if _independent(E):
                change = project(_change(E, C).T, leaves[path], leaf.names[1:])
                leaves[path] = leaves[path] + change
        elif leaf.role == "time_embedding":
            E, C = rows.get(path[1]) or next(
                iter(rows.values())
            )  # its own linear's, or all have it
            if not _independent(E):
                leaves[path] = C
    return unflatten_dict(leaves)


def coarse_step_of(fine_steps: int, coarse_steps: int) -> np.ndarray:
    """The coarse step in which each fine step begins: `[fine_steps]`."""
    return np.arange(fine_steps) * coarse_steps // fine_steps


def _independent(E: Float[Array, "N T"]) -> bool:
    """Whether there are as many functions of time as steps."""
    return E.shape[0] <= E.shape[1]


def _change(E: Float[Array, "N T"], C: Float[Array, "N T"]) -> Float[Array, "T T"]:
    """E^+ (C - E)."""
    return jnp.matmul(jnp.linalg.pinv(E), C - E, precision="highest")


def _leaves(declared: dict) -> dict[LeafPath, Parameter]:
    return flatten_dict(declared, is_leaf=lambda _, node: is_parameter(node))


def _is_projection(leaf: Parameter) -> bool:
    """Whether a parameter is a P."""
    return leaf.names[0] == "time_embed" and leaf.role != "time_embedding"


def _keep_schedule(fresh: optax.OptState, old: optax.OptState) -> optax.OptState:
    """A new optimizer's state, at the old one's place in the schedule."""

    def counts_steps(node: object) -> bool:
        return isinstance(node, optax.ScaleByScheduleState)

    return jax.tree.map(
        lambda new, before: before if counts_steps(new) else new, fresh, old, is_leaf=counts_steps
    )
