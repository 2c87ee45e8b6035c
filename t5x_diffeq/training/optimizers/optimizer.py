"""AdamW or Muon, with gradient clipping, weight decay and factors on the learning rate.

The defaults are the paper's (appendix C). AdamW is by Loshchilov and Hutter (2019).

`optimizer.name` can name a function of another package instead. It is called with
`config.optimizer` and the declarations of the parameters (a tree of `layers.parameter.Parameter`)
and returns an optax transformation from clipped gradients to directions. Step multipliers, weight
decay and the schedule follow it, as they follow Adam. If its `update` takes extra arguments
(`optax.GradientTransformationExtraArgs`), it gets `norm`, the norm of the gradient before clipping,
and `embeddings`, the e(t) at the nodes of the step by the name of the generated layer.
"""

from collections.abc import Callable, Collection
from math import isfinite
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax.traverse_util import flatten_dict, unflatten_dict
from jaxtyping import Array

from t5x_diffeq.config.config import OptimizerKeys
from t5x_diffeq.config.keys.values import MOMENTS
from t5x_diffeq.config.plugins import call_plugin, check_returns, is_plugin, load_plugin
from t5x_diffeq.model.layers.parameter import ROLES, map_parameters
from t5x_diffeq.system.errors import InputError, describe_foreign
from t5x_diffeq.training.optimizers.moments import scale_by_bfloat16_moments
from t5x_diffeq.training.optimizers.muon import kernels_of_block, scale_by_muon
from t5x_diffeq.training.optimizers.schedule import Schedule

# The roles that weight decay applies to, for each value of `optimizer.decay`.
DECAYED = {
    "embeddings": {"embedding"},
    "kernels": {"embedding", "kernel", "adapter"},
    "all": set(ROLES),
}


# By optimizer, the factors of roles that `optimizer.role_multipliers` doesn't name. With Muon, Adam
# would train e(t), and so move all W(t_n) in addition to Muon's steps, which makes the loss higher
# (docs/lab/lead.md).
_FACTORS: dict[str, dict[str, float]] = {"muon": {"time_embedding": 0.0}}


def make_optimizer(
    optimizer: OptimizerKeys, declared: dict
) -> optax.GradientTransformationExtraArgs:
    """Clip by the given norm -> directions -> decoupled decay -> each role's factor -> schedule.

    Its `update` takes the `norm` of the gradient and the `schedule`, besides what plug-ins get. The
    directions come from what `optimizer.name` names, and are multiplied by the parameters' step
    multipliers. The factor of a role scales the decay, too, as the learning rate of a parameter
    group does in PyTorch. The boxes of the declared parameters say which of them decay, and their
    multipliers.

    Raises:
      InputError: if `optimizer.name`, `optimizer.moments` or `optimizer.role_multipliers` is
        invalid.
    """
    kind = _PLUGIN if is_plugin(optimizer.name) else OPTIMIZERS[optimizer.name]
    if optimizer.moments not in kind.moments:
        raise InputError(
            f"optimizer.moments={optimizer.moments} is for Adam; with optimizer.name="
            f"{optimizer.name} it can only be {', '.join(kind.moments)}"
        )
    steps = map_parameters(lambda leaf: leaf.step_multiplier, declared)
    directions, multipliers = kind.make(optimizer, declared, steps)
    decays = map_parameters(lambda leaf: leaf.role in DECAYED[optimizer.decay], declared)
    factors = {
        **_FACTORS.get(optimizer.name, {}),
        **_role_factors(optimizer.role_multipliers),
    }
    by_role = map_parameters(lambda leaf: factors.get(leaf.role, 1.0), declared)
    # Moments are of clipped gradients. Decay comes after the step multipliers, which don't scale
    # it, and before the learning rate and the roles' factors, which do.
    return optax.chain(
        _clip(optimizer.max_grad_norm),
        directions,
        optax.stateless(lambda u, params: jax.tree.map(lambda m, u: m * u, multipliers, u)),
        optax.add_decayed_weights(optimizer.weight_decay, decays),
        _scale_by_rates(by_role),
    )


def _scale_by_rates(factors: dict) -> optax.GradientTransformationExtraArgs:
    """Scales each parameter's direction by minus the learning rate and its own factor.

    It is one link of the chain, not two, so the state's structure doesn't depend on the factors.
    Its state, the count of steps, has the type of `optax.scale_by_schedule`'s state. That
    transformation can't take a schedule that is an input of the program.
    """

    def init(params: dict) -> optax.ScaleByScheduleState:
        return optax.ScaleByScheduleState(jnp.zeros((), jnp.int32))

    def update(
        updates: dict,
        state: optax.ScaleByScheduleState,
        params: dict,
        *,
        schedule: Schedule,
        **_: object,
    ) -> tuple[dict, optax.ScaleByScheduleState]:
        rate = -schedule(state.count)

        def scale(u: Array, factor: float) -> Array:
            scaled = rate.astype(u.dtype) * u
            return scaled if factor == 1 else factor * scaled

        count = optax.safe_increment(state.count)
        return jax.tree.map(scale, updates, factors), optax.ScaleByScheduleState(count)

    return optax.GradientTransformationExtraArgs(init, update)


def _role_factors(pairs: tuple[Any, ...]) -> dict[str, float]:
    """`optimizer.role_multipliers` as factors by role; InputError if an entry is invalid."""
    factors: dict[str, float] = {}
    for pair in pairs:
        if fault := _fault_of_pair(pair, factors):
            raise InputError(f"optimizer.role_multipliers has {pair!r}; {fault}")
        role, factor = pair
        factors[role] = factor
    return factors


def _fault_of_pair(pair: Any, earlier: Collection[str]) -> str | None:
    """What is wrong with an entry of `optimizer.role_multipliers`; None if nothing is."""
    if not (isinstance(pair, tuple) and len(pair) == 2 and pair[0] in ROLES):
        return f"an entry is a role and a factor, and roles are {', '.join(ROLES)}"
    role, factor = pair
    number = isinstance(factor, int | float) and not isinstance(factor, bool)
    if not (number and isfinite(factor) and factor >= 0):
        return "a factor is a number of at least 0"
    return "name a role once" if role in earlier else None


Directions = tuple[optax.GradientTransformation, dict]  # and the multipliers of the directions


def _muon_and_adam(optimizer: OptimizerKeys, declared: dict, multipliers: dict) -> Directions:
    """Muon for the block's kernels, whose steps have their size already, and Adam for the rest."""
    kernels = kernels_of_block(declared)
    muon = scale_by_muon(kernels, optimizer.momentum)
    paths = {path for kernel in kernels for path in (kernel.path, kernel.offset)}
    leaves = flatten_dict(multipliers)
    step_multipliers = unflatten_dict(
        {path: 1.0 if path in paths else x for path, x in leaves.items()}
    )
    names = unflatten_dict({path: "muon" if path in paths else "adam" for path in leaves})
    parts = {"muon": muon, "adam": _adam(optimizer, declared)}
    return optax.partition(parts, names), step_multipliers


class _Kind(NamedTuple):
    """What an `optimizer.name` stands for."""

    # the function from the keys, the declared parameters and the multipliers of their steps to the
    # directions, and to the multipliers that the steps in these directions need
    make: Callable[[OptimizerKeys, dict, dict], Directions]
    moments: tuple[str, ...] = ("float32",)  # the values of `optimizer.moments` that it obeys


OPTIMIZERS = {
    "adam": _Kind(lambda keys, declared, steps: (_adam(keys, declared), steps), MOMENTS),
    "muon": _Kind(_muon_and_adam),
}


def _adam(optimizer: OptimizerKeys, declared: dict) -> optax.GradientTransformation:
    """Adam's directions, with the moments that `optimizer.moments` names."""
    betas = optimizer.beta1, optimizer.beta2, optimizer.epsilon
    if optimizer.moments == "float32":
        return optax.scale_by_adam(*betas)
    return scale_by_bfloat16_moments(*betas)


def _plugin(optimizer: OptimizerKeys, declared: dict, multipliers: dict) -> Directions:
    """The transformation of another package that `optimizer.name` names."""
    make = load_plugin("optimizer.name", optimizer.name)
    check_returns("optimizer.name", optimizer.name, make, optax.GradientTransformation)
    transformation = call_plugin("optimizer.name", optimizer.name, make, optimizer, declared)
    if not isinstance(transformation, optax.GradientTransformation):
        raise InputError(
            f"optimizer.name={optimizer.name} returns a {type(transformation).__name__}; it must "
            "return an optax.GradientTransformation"
        )
    with_arguments = _with_documented_arguments(transformation)
    _check_updates(optimizer.name, with_arguments, declared)
    if _goes_uphill(with_arguments, declared):
        raise InputError(
            f"optimizer.name={optimizer.name} returns updates against the gradient, and the "
            "learning rate and its minus sign are applied afterwards; return directions, such as "
            "optax.scale_by_adam() in place of optax.adam(...)"
        )
    return with_arguments, multipliers


def _check_updates(
    name: str, transformation: optax.GradientTransformationExtraArgs, declared: dict
) -> None:
    """Raises an InputError unless the updates have the shapes of the gradient."""
    gradient = map_parameters(
        lambda leaf: jax.ShapeDtypeStruct(leaf.value.shape, jnp.float32), declared
    )

    def first(gradient: dict) -> dict:
        state = transformation.init(gradient)
        updates, _ = transformation.update(gradient, state, gradient, norm=jnp.ones(()))
        return updates

    try:
        updates = jax.eval_shape(first, gradient)
    except Exception as error:  # another package's code may raise anything
        raise InputError(
            f"optimizer.name={name} makes no updates: {describe_foreign(error)}"
        ) from error
    if jax.tree.map(jnp.shape, updates) != jax.tree.map(jnp.shape, gradient):
        raise InputError(
            f"optimizer.name={name} returns updates of other shapes than the gradient's, or "
            "another tree; return a direction for each parameter"
        )


def _goes_uphill(transformation: optax.GradientTransformationExtraArgs, declared: dict) -> bool:
    """Whether the first direction points against the gradient, so that a step would go uphill.

    It is tried on small arrays of the parameters' ranks. If that fails, the answer is no.
    """

    def ones(leaf: Any) -> Array:
        return jnp.ones([min(n, 2) for n in leaf.value.shape])

    gradient = map_parameters(ones, declared)
    try:
        state = transformation.init(gradient)
        norm = optax.global_norm(gradient)
        updates, _ = transformation.update(gradient, state, gradient, norm=norm)
        return bool(sum(u.sum() for u in jax.tree.leaves(updates)) < 0)
    except Exception:  # another package's code may raise anything
        return False


def _with_documented_arguments(
    transformation: optax.GradientTransformation,
) -> optax.GradientTransformationExtraArgs:
    """A plug-in's transformation, which gets no other arguments than the documented ones."""
    with_extra = optax.with_extra_args_support(transformation)

    def update(
        updates: dict,
        state: Any,
        params: dict,
        *,
        norm: Array,
        embeddings: dict | None = None,
        **_: object,
    ) -> tuple[dict, Any]:
        return with_extra.update(updates, state, params, norm=norm, embeddings=embeddings)

    return optax.GradientTransformationExtraArgs(with_extra.init, update)


_PLUGIN = _Kind(_plugin)


def _clip(max_norm: float) -> optax.GradientTransformationExtraArgs:
    """Scales a gradient down to `max_norm`; takes its `norm`, which the step has computed."""

    def update(
        updates: dict, state: optax.EmptyState, params: dict, *, norm: Array, **_: object
    ) -> tuple[dict, optax.EmptyState]:
        factor = jnp.minimum(1.0, max_norm / jnp.maximum(norm, 1e-30))
        return jax.tree.map(lambda u: factor * u, updates), state

    return optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), update)
