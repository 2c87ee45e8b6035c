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

from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax.traverse_util import flatten_dict
from jax.tree_util import DictKey
from jaxtyping import Array

from t5x_diffeq.runtime.plugins import is_plugin
from t5x_diffeq.training.host_memory import fetch, store
from t5x_diffeq.training.setup import Setup
from t5x_diffeq.training.state import TrainState

AT_MOST_ONCE = "at_most_once"  # the name of the loops, by which `planner.trip_count` knows them


class _Part(NamedTuple):
    """What an update changes: the parameters that train, the optimizer's state, the averages."""

    params: dict
    opt_state: Any
    averages: dict | None


class _Rule(NamedTuple):
    """How parts are updated.

    Attributes:
      optimizer: the optimizer of the parameters that train.
      gradient: their gradient.
      facts: what else optimizers are told of it.
      step: optimizer steps done before.
      decay: of the averages.
    """

    optimizer: optax.GradientTransformation
    gradient: dict
    facts: dict[str, Any]
    step: Array
    decay: float


def update_unless(
    rejected: Array, state: TrainState, setup: Setup, gradient: dict, **facts: Any
) -> TrainState:
    """The state with what an optimizer step changes; if it is rejected, as `_pass_over` leaves it.

    Args:
      rejected: whether the step is rejected.
      state: the state.
      setup: the setup.
      gradient: the gradient of the parameters that train.
      **facts: what else optimizers are told of it: its `norm`, and the `embeddings` e(t).
    """

    def part_of(state: TrainState) -> _Part:
        params = {name: part for name, part in state.params.items() if setup.trains(name)}
        return _Part(params, state.opt_state, state.averages)

    before, places = part_of(state), part_of(setup.abstract_state)  # which says what lies where
    decay = setup.config.train.ema_decay
    rule = _Rule(setup.optimizer, gradient, facts, state.step, decay)
    if updates_by_layer(setup):
        owners = _owners(before, whole=is_plugin(setup.config.optimizer.name))
        after = _update_by_layer(rejected, before, places, rule, owners)
    else:
        before = fetch(before, places)
        after = store(_select(rejected, before, _update(before, rule)), places)
    params, opt_state, averages = after
    return replace(state, params={**state.params, **params}, opt_state=opt_state, averages=averages)


def updates_by_layer(setup: Setup) -> bool:
    """Whether layers are updated one after the other; see the module's docstring."""
    on_cpu = setup.mesh.devices.flat[0].platform == "cpu"
    return setup.config.optimizer.offload and not on_cpu


def _update(before: _Part, rule: _Rule) -> _Part:
    updates, opt_state = rule.optimizer.update(
        rule.gradient, before.opt_state, before.params, **rule.facts
    )
    params = optax.apply_updates(before.params, updates)
    averages = _average(before.averages, params, rule) if before.averages else None
    return _Part(params, opt_state, averages)


def _average(averages: dict, params: dict, rule: _Rule) -> dict:
    """Exponential moving averages, with a shorter memory in a run's first steps."""
    d = jnp.minimum(rule.decay, (1.0 + rule.step) / (10.0 + rule.step))
    return jax.tree.map(lambda a, p: d * a + (1 - d) * p, averages, params)


def _select(rejected: Array, before: _Part, after: _Part) -> _Part:
    return jax.tree.map(lambda new, old: jnp.where(rejected, old, new), after, _pass_over(before))


def _pass_over(before: _Part) -> _Part:
    """What a rejected step leaves: all as it was, except for what counts steps.

    Otherwise the learning rate would lag.
    """

    def counts_steps(node: object) -> bool:
        return isinstance(node, optax.ScaleByScheduleState)

    def keep(node: Any) -> Any:
        return optax.ScaleByScheduleState(node.count + 1) if counts_steps(node) else node

    return jax.tree.map(keep, before, is_leaf=counts_steps)


# ------------------------------------------------------------------------------ layer by layer

_NONE = "none"  # the owner of counters and the like


def _update_by_layer(
    rejected: Array, before: _Part, places: _Part, rule: _Rule, owners: _Part
) -> _Part:
    """`update_unless` with a loop for each layer that `_owners` names."""

    def only(owner: str, parts: _Part) -> _Part:
        """The leaves that belong to one layer, or to none; None stands for all others."""
        return jax.tree.map(lambda each, x: x if each == owner else None, owners, parts)

    def update(owner: str, own: _Part) -> _Part:
        """These leaves after an update in which zeros stand for other layers' leaves.

        What is computed of the zeros is needed by nothing, and no compiler keeps it.
        """

        def fill(each: str, mine: Any, x: Array) -> Array:
            if each == owner:
                return mine
            return x if each == _NONE else jnp.zeros(x.shape, x.dtype)

        return only(owner, _update(jax.tree.map(fill, owners, own, before), rule))

    def unless_rejected(owner: str) -> _Part:
        there = only(owner, places)

        def change(_: Array, part_of_owner: _Part) -> _Part:
            return store(update(owner, fetch(part_of_owner, there)), there)

        with jax.named_scope(AT_MOST_ONCE):
            return jax.lax.fori_loop(0, jnp.where(rejected, 0, 1), change, only(owner, before))

    counts = only(_NONE, before)
    layers = dict.fromkeys(jax.tree.leaves(owners.params))
    after = [_select(rejected, counts, update(_NONE, counts)), *map(unless_rejected, layers)]
    return jax.tree.map(lambda _, *each: next(x for x in each if x is not None), owners, *after)


def _owners(state: _Part, whole: bool) -> _Part:
    """The layer, with its time embedding, to which each leaf belongs; with `whole`, one for all.

    What belongs to a parameter has its path at the end of its own.
    """
    params = flatten_dict(state.params)

    def owner(path: tuple, _: object) -> str:
        keys = tuple(key.key for key in path if isinstance(key, DictKey))
        of_param = next((keys[n:] for n in range(len(keys)) if keys[n:] in params), None)
        if of_param is None:
            return _NONE
        names = [*of_param[:-1], "time_embedding"]
        return "all" if whole else "/".join(names[: names.index("time_embedding")])

    return jax.tree_util.tree_map_with_path(owner, state)
