"""AdamW with the gradient clipping, schedule and weight decay of the paper (appendix C).

`optimizer.name` can name a function of another package instead of Adam. It is called with
`config.optimizer` and the declarations of the parameters (a tree of `layers.parameter.Parameter`)
and returns an optax transformation from clipped gradients to directions. Step multipliers, weight
decay and the schedule follow it, as they follow Adam.
"""

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array

from t5x_diffeq.layers.parameter import ROLES, is_parameter
from t5x_diffeq.runtime.config import OptimizerKeys
from t5x_diffeq.runtime.errors import InputError
from t5x_diffeq.runtime.plugins import is_plugin, load_plugin

# The roles that weight decay applies to, for each value of `optimizer.decay`.
DECAYED = {
    "embeddings": {"embedding"},
    "kernels": {"embedding", "kernel", "adapter"},
    "all": set(ROLES),
}


def learning_rate_schedule(optimizer: OptimizerKeys, total_steps: int) -> optax.Schedule:
    """Linear warm-up to the peak, then a cosine to `min_lr_ratio` of it at the last step."""
    warmup = round(optimizer.warmup_fraction * total_steps)
    peak = optimizer.learning_rate
    return optax.warmup_cosine_decay_schedule(
        init_value=peak / (warmup + 1),
        peak_value=peak,
        warmup_steps=warmup,
        decay_steps=max(total_steps, warmup + 1),
        end_value=peak * optimizer.min_lr_ratio,
    )


def make_optimizer(
    optimizer: OptimizerKeys, declared: dict, schedule: optax.Schedule
) -> optax.GradientTransformation:
    """Clip by the given norm -> Adam -> each parameter's multiplier -> decoupled decay -> schedule.

    Or, in Adam's place, what `optimizer.name` names.

    Args:
      optimizer: `config.optimizer`.
      declared: the parameters in their boxes, which say what decays and how it is scaled.
      schedule: the learning rate schedule.
    """

    def of_declared(read):
        return jax.tree.map(read, declared, is_leaf=is_parameter)

    decays = of_declared(lambda leaf: leaf.role in DECAYED[optimizer.decay])
    multipliers = of_declared(lambda leaf: leaf.step_multiplier)
    return optax.chain(
        _clip(optimizer.max_grad_norm),
        _scale_by_moments(optimizer, declared),
        scale_each(multipliers),
        optax.add_decayed_weights(optimizer.weight_decay, decays),
        optax.scale_by_learning_rate(schedule),
    )


def _scale_by_moments(optimizer: OptimizerKeys, declared: dict) -> optax.GradientTransformation:
    """Adam, or the transformation that `optimizer.name` names."""
    if not is_plugin(optimizer.name):
        return optax.scale_by_adam(
            optimizer.beta1, optimizer.beta2, optimizer.epsilon, mu_dtype=optimizer.moment_dtype
        )
    made = load_plugin("optimizer.name", optimizer.name)(optimizer, declared)
    if not isinstance(made, optax.GradientTransformation):
        raise InputError(
            f"optimizer.name={optimizer.name} returns a {type(made).__name__}; it must return an "
            "optax.GradientTransformation"
        )
    return made


def _clip(max_norm: float) -> optax.GradientTransformationExtraArgs:
    """Scales a gradient down to `max_norm`; takes its `norm`, which the step has computed."""

    def update(
        updates: dict, state: optax.EmptyState, params: dict, *, norm: Array, **_: object
    ) -> tuple[dict, optax.EmptyState]:
        factor = jnp.minimum(1.0, max_norm / jnp.maximum(norm, 1e-30))
        return jax.tree.map(lambda u: factor * u, updates), state

    return optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), update)


def scale_each(multipliers: dict) -> optax.GradientTransformation:
    """Scales each parameter's update by its own constant."""
    return optax.stateless(
        lambda updates, params: jax.tree.map(lambda m, u: m * u, multipliers, updates)
    )
