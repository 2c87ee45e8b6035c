"""Muon with e(t) frozen after some steps, or with the norms of W(t_n) held: plug-in optimizers.

They have the schedule of configs/ladder.py at width 32, which has 720 optimizer steps.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax.traverse_util import flatten_dict, unflatten_dict
from jaxtyping import Array

from t5x_diffeq.config.config import OptimizerKeys
from t5x_diffeq.model.layers.parameter import map_parameters
from t5x_diffeq.training.optimizers.muon import (
    Kernel,
    kernels_of_block,
    orthogonal,
    pseudo_inverse,
    scale_by_muon,
)
from t5x_diffeq.training.optimizers.schedule import learning_rate_schedule

_STEPS = 720
_contract = partial(jnp.tensordot, axes=1, precision="highest")


def frozen_after_warm_up(
    optimizer: OptimizerKeys, declared: dict
) -> optax.GradientTransformationExtraArgs:
    """Muon; e(t) is trained only in the first 36 optimizer steps."""
    return optax.chain(_muon(optimizer, declared), _moves_until(36, declared))


def frozen_after_a_quarter(
    optimizer: OptimizerKeys, declared: dict
) -> optax.GradientTransformationExtraArgs:
    """Muon; e(t) is trained only in the first 180 optimizer steps."""
    return optax.chain(_muon(optimizer, declared), _moves_until(180, declared))


def with_norms_held(
    optimizer: OptimizerKeys, declared: dict
) -> optax.GradientTransformationExtraArgs:
    """Muon, and each W(t_n) keeps its Frobenius norm: W <- |W| (W - r R) / |W - r R|."""
    held = _hold_norms(kernels_of_block(declared), optimizer)
    return _beside_adam(held, optimizer, declared)


def _muon(optimizer: OptimizerKeys, declared: dict) -> optax.GradientTransformationExtraArgs:
    kernels = kernels_of_block(declared)
    return _beside_adam(scale_by_muon(kernels, optimizer.momentum), optimizer, declared)


def _beside_adam(
    kernel_optimizer: optax.GradientTransformation, optimizer: OptimizerKeys, declared: dict
) -> optax.GradientTransformationExtraArgs:
    """The transformation for the block's kernels, Adam for the rest.

    The package multiplies a plug-in's directions by each parameter's step multiplier. The kernels'
    directions have their final size already, so here they are divided by the multiplier.
    """
    paths = {path for k in kernels_of_block(declared) for path in (k.path, k.offset)}
    multipliers = flatten_dict(map_parameters(lambda leaf: leaf.step_multiplier, declared))
    sizes = unflatten_dict({p: 1 / x if p in paths else 1.0 for p, x in multipliers.items()})
    names = unflatten_dict({p: "kernels" if p in paths else "rest" for p in multipliers})
    adam = optax.scale_by_adam(optimizer.beta1, optimizer.beta2, optimizer.epsilon)
    return optax.chain(
        optax.partition({"kernels": kernel_optimizer, "rest": adam}, names),
        optax.stateless(lambda updates, _: jax.tree.map(jnp.multiply, updates, sizes)),
    )


def _moves_until(steps: int, declared: dict) -> optax.GradientTransformation:
    """Zero for the time embeddings' parameters from this optimizer step on."""
    is_time_embedding = map_parameters(lambda leaf: leaf.role == "time_embedding", declared)

    def update(updates: dict, count: Array, params: Any = None) -> tuple[dict, Array]:
        moves = (count < steps).astype(jnp.float32)
        return jax.tree.map(
            lambda u, is_e: moves * u if is_e else u, updates, is_time_embedding
        ), count + 1

    return optax.GradientTransformation(lambda params: jnp.zeros((), jnp.int32), update)


class _HeldState(NamedTuple):
    steps: Array  # the optimizer steps so far
    momentum: dict


def _hold_norms(
    kernels: list[Kernel], optimizer: OptimizerKeys
) -> optax.GradientTransformationExtraArgs:
    """Directions after which each W(t_n) has the norm that it had before."""
    schedule = learning_rate_schedule(optimizer, _STEPS)

    def update(
        gradient: dict, state: _HeldState, params: dict, *, embeddings: Any = None, **_: object
    ) -> tuple[dict, _HeldState]:
        beta, rate = optimizer.momentum, schedule(state.steps)
        momentum = optax.tree.update_moment(gradient, state.momentum, beta, 1)
        ahead = flatten_dict(optax.tree.update_moment(gradient, momentum, beta, 1))
        theta = flatten_dict(params)
        for kernel in kernels:
            path, offset = kernel.path, kernel.offset
            if offset is None:
                W, F = (x if kernel.stacked else x[None] for x in (theta[path], ahead[path]))
            else:
                e = embeddings[path[1]]
                inverse = pseudo_inverse(e)[0]
                W = _contract(e, theta[path]) + theta[offset]
                both = jnp.concatenate((ahead[path], ahead[offset][None]))
                F = _contract(inverse.T, both)
            moved = W - rate * orthogonal(kernel, F)
            axes = tuple(range(1, W.ndim))
            before, after = (jnp.sqrt(jnp.square(x).sum(axes, keepdims=True)) for x in (W, moved))
            D = (W - moved * before / jnp.maximum(after, 1e-30)) / jnp.maximum(rate, 1e-12)
            if offset is None:
                ahead[path] = D if kernel.stacked else D[0]
            else:
                ahead[path], ahead[offset] = _contract(inverse[:-1], D), _contract(inverse[-1], D)
        return unflatten_dict(ahead), _HeldState(state.steps + 1, momentum)

    def init(params: dict) -> _HeldState:
        return _HeldState(jnp.zeros((), jnp.int32), optax.tree.zeros_like(params))

    return optax.GradientTransformationExtraArgs(init, update)
