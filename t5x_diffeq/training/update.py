"""The optimizer's update of a train state: at once, or layer by layer from the host's memory.

With `optimizer.offload`, a layer's moments are on the device only while that layer is updated.
Compilers copy early and drop optimization barriers: in a program for a TPU, all moments were on the
device from the step's beginning to its end, and nothing was spared. But what the body of a loop
copies, they copy there. So each layer has a loop of its own, which runs once, or not at all if the
step is rejected. (A conditional would do, but the arrays that it hands on were copied once more.) A
layer's update needs no other's gradient or moments: Adam's is that of each number, and Muon's that
of the kernel at each node; only the norm is that of all. Of an optimizer of another package that
isn't known, and one loop updates all layers.

An update that is fused differently may differ in the last bit. On CPUs, where the host's memory is
the device's, there are no such loops, and losses are those without offloading bit for bit.
"""

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax.traverse_util import flatten_dict
from jax.tree_util import DictKey
from jaxtyping import Array

from t5x_diffeq.ode.weights import LeafPath
from t5x_diffeq.runtime.plugins import is_plugin
from t5x_diffeq.training.gradient import BatchGradient
from t5x_diffeq.training.host_memory import fetch, store
from t5x_diffeq.training.leaves import merged, part_like, with_part
from t5x_diffeq.training.setup import Setup
from t5x_diffeq.training.state import TrainState

AT_MOST_ONCE = "at_most_once"  # the name of the loops, by which `planner.trip_count` knows them


class Updated(NamedTuple):
    """What an update changes: the parameters that train, the optimizer's state, the averages."""

    params: dict
    opt_state: Any
    averages: dict | None


class Rule(NamedTuple):
    """How parts are updated.

    Attributes:
      optimizer: the optimizer of the parameters that have a gradient.
      found: the gradient, and what comes with it.
      step: optimizer steps done before.
      decay: of the averages.
    """

    optimizer: optax.GradientTransformation
    found: BatchGradient
    step: Array
    decay: float


def learning_part(
    state: TrainState,
    like: dict,
    optimizer: optax.GradientTransformation,
    waiting: Collection[LeafPath],
) -> Updated:
    """What a step changes of a state, or of its shapes.

    Args:
      state: the state.
      like: the gradient, a tree of the parameters that have one.
      optimizer: their optimizer.
      waiting: the paths of those that train, but have none in this step.
    """
    params = part_like(state.params, like)
    if not waiting:
        return Updated(params, state.opt_state, state.averages)
    opt_state = part_like(state.opt_state, jax.eval_shape(optimizer.init, params))
    averages = None if state.averages is None else part_like(state.averages, params)
    return Updated(params, opt_state, averages)


def with_changes(state: TrainState, changed: Updated) -> TrainState:
    """The state with the changed parts in their places."""
    params, opt_state, averages = changed
    return replace(
        state,
        params=merged(state.params, params),
        opt_state=with_part(state.opt_state, opt_state),
        averages=None if averages is None else with_part(state.averages, averages),
    )


def update_unless(
    rejected: Array, before: Updated, places: Updated, rule: Rule, setup: Setup
) -> Updated:
    """What an optimizer step makes of its parts; if it is rejected, these, as `_pass_over` says.

    Args:
      rejected: whether the step is rejected.
      before: the parts.
      places: their shapes, which say what lies in the host's memory.
      rule: how they are updated.
      setup: the setup.
    """
    if updates_by_layer(setup):
        whole = is_plugin(setup.config.optimizer.name)
        return _update_by_layer(rejected, before, places, rule, whole)
    before = fetch(before, places)
    return store(_select(rejected, before, _update(before, rule.found.gradient, rule)), places)


def updates_by_layer(setup: Setup) -> bool:
    """Whether layers are updated one after the other; see the module's docstring."""
    on_cpu = setup.mesh.devices.flat[0].platform == "cpu"
    return setup.config.optimizer.offload and not on_cpu


def _update(before: Updated, gradient: dict, rule: Rule) -> Updated:
    updates, opt_state = rule.optimizer.update(
        gradient,
        before.opt_state,
        before.params,
        norm=rule.found.norm,
        embeddings=rule.found.embeddings,
    )
    params = optax.apply_updates(before.params, updates)
    averages = _average(before.averages, params, rule) if before.averages else None
    return Updated(params, opt_state, averages)


def _average(averages: dict, params: dict, rule: Rule) -> dict:
    """Exponential moving averages, with a shorter memory in a run's first steps."""
    d = jnp.minimum(rule.decay, (1.0 + rule.step) / (10.0 + rule.step))
    return jax.tree.map(lambda a, p: d * a + (1 - d) * p, averages, params)


def _select(rejected: Array, before: Updated, after: Updated) -> Updated:
    return jax.tree.map(lambda new, old: jnp.where(rejected, old, new), after, _pass_over(before))


def _pass_over(before: Updated) -> Updated:
    """What a rejected step leaves: all as it was, except for what counts steps.

    Otherwise the learning rate would lag.
    """

    def counts_steps(node: object) -> bool:
        return isinstance(node, optax.ScaleByScheduleState)

    def keep(node: Any) -> Any:
        return optax.ScaleByScheduleState(node.count + 1) if counts_steps(node) else node

    return jax.tree.map(keep, before, is_leaf=counts_steps)


# ------------------------------------------------------------------------------ layer by layer


def _update_by_layer(
    rejected: Array, before: Updated, places: Updated, rule: Rule, whole: bool
) -> Updated:
    """`update_unless` with a loop for each layer; with `whole`, one for all."""
    layers = _layers(before.params, whole)
    leaves, tree = jax.tree.flatten((before, rule.found.gradient))
    owners = _owners((before, rule.found.gradient), layers)

    def of(owner: str | None, values: list) -> list:
        return [x for x, each in zip(values, owners, strict=False) if each == owner]

    def update(owner: str | None, own: list[Array]) -> list[Array]:
        """The leaves of one layer, or those of none, after an update; zeros stand for all others.

        What is computed of these is needed by nothing, and no compiler keeps it.
        """
        given = iter(own)
        filled = [
            next(given) if each == owner else x if each is None else jnp.zeros(x.shape, x.dtype)
            for x, each in zip(leaves, owners, strict=True)
        ]
        state, gradient = jax.tree.unflatten(tree, filled)
        return of(owner, jax.tree.leaves(_update(state, gradient, rule)))

    def unless_rejected(owner: str) -> list[Array]:
        own, there = of(owner, leaves), of(owner, jax.tree.leaves(places))
        state, gradient = own[: len(there)], own[len(there) :]

        def change(_: Array, state: list[Array]) -> list[Array]:
            return store(update(owner, [*fetch(state, there), *gradient]), there)

        with jax.named_scope(AT_MOST_ONCE):
            return jax.lax.fori_loop(0, jnp.where(rejected, 0, 1), change, state)

    counts = zip(
        update(None, of(None, leaves)), of(None, jax.tree.leaves(_pass_over(before))), strict=True
    )
    after = {owner: iter(unless_rejected(owner)) for owner in dict.fromkeys(layers.values())}
    of_none = iter(jnp.where(rejected, old, new) for new, old in counts)
    state, structure = jax.tree.flatten(before)
    in_order = (of_none if each is None else after[each] for each in owners[: len(state)])
    return jax.tree.unflatten(structure, map(next, in_order))


def _layers(params: dict, whole: bool) -> dict[LeafPath, str]:
    """The layer of each parameter, with its time embedding; with `whole`, one layer for all."""

    def layer(path: LeafPath) -> str:
        names = [*path[:-1], "time_embedding"]
        return "all" if whole else "/".join(names[: names.index("time_embedding")])

    return {path: layer(path) for path in flatten_dict(params)}


def _owners(tree: Any, layers: Mapping[LeafPath, str]) -> list[str | None]:
    """The layer to which each leaf of a state belongs; None for counters and the like.

    Everything that belongs to a parameter has its path at the end of its own.
    """

    def owner(path: tuple) -> str | None:
        keys = tuple(key.key for key in path if isinstance(key, DictKey))
        ends = (keys[start:] for start in range(len(keys)))
        return next((layers[end] for end in ends if end in layers), None)

    return [owner(path) for path, _ in jax.tree_util.tree_leaves_with_path(tree)]
