"""How far W(t) moves in the first optimizer steps, as a function of T.

A coordinate check in the sense of muP (Yang et al. 2022): the width of the time embedding, T,
should affect neither the initial scale of W(t) nor how far an optimizer step moves it, so that one
learning rate works for every T.
"""

from collections.abc import Sequence
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax.traverse_util import flatten_dict

from t5x_diffeq.layers.parameter import is_parameter
from t5x_diffeq.models.config import ModelConfig
from t5x_diffeq.models.language_model import LanguageModel
from t5x_diffeq.models.sub_fields import block_of_shapes
from t5x_diffeq.ode.weights import block_parameters
from t5x_diffeq.training.gradient import batch_losses
from t5x_diffeq.training.optimizer import scale_each
from t5x_diffeq.training.partitioning import unbox
from t5x_diffeq.training.state import declared_params

_WIDTHS = (8, 20, 48, 96, 144)


def coordinate_check(
    config: ModelConfig, widths: Sequence[int] = _WIDTHS, steps: int = 10
) -> list[dict[str, float]]:
    """One row per T: `T`, `start` (rms of W(t)), `after_1` and `after_<steps>` (mean |change|).

    Args:
      config: the model; its `time_embed_dim` is replaced.
      widths: the values of T to try.
      steps: steps of Adam at learning rate 1e-3, without decay or clipping, on random tokens.
    """
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, config.vocab_size, (8, config.max_length + 1)).astype(np.int32)
    batch = {"inputs": jnp.asarray(tokens[:, :-1]), "targets": jnp.asarray(tokens[:, 1:])}
    return [
        {"T": T, **_measure_movement(replace(config, time_embed_dim=T), batch, steps)}
        for T in widths
    ]


def _measure_movement(
    config: ModelConfig, batch: dict[str, jax.Array], steps: int
) -> dict[str, float]:
    """The scale of one model's kernels, and how far they move."""
    model = LanguageModel(config)
    block = block_of_shapes(config)
    of_block = block_parameters(block, block.input_shapes())
    declared = declared_params(model)
    multipliers = jax.tree.map(lambda p: p.step_multiplier, declared, is_leaf=is_parameter)
    optimizer = optax.chain(
        optax.scale_by_adam(0.9, 0.95), scale_each(multipliers), optax.scale_by_learning_rate(1e-3)
    )

    @jax.jit
    def step(params: dict, opt_state: optax.OptState) -> tuple[dict, optax.OptState]:
        def loss(params: dict) -> jax.Array:
            return batch_losses(model, params, batch, chunk=2048)[0].mean()

        gradient = jax.grad(loss)(params)
        norm = optax.global_norm(gradient)
        updates, opt_state = optimizer.update(gradient, opt_state, params, norm=norm)
        return optax.apply_updates(params, updates), opt_state

    @jax.jit
    def kernels(params: dict) -> jax.Array:
        weights = model.apply({"params": params}, method="weights")
        leaves = flatten_dict(weights).items()
        roles = {path: leaf.role for path, leaf in of_block.items()}
        return jnp.concatenate([w.ravel() for path, w in leaves if roles[path] == "kernel"])

    params = jax.jit(lambda key: unbox(model.init(key, batch["inputs"])["params"]))(
        jax.random.key(0)
    )
    start, opt_state = kernels(params), optimizer.init(params)
    found = {"start": float(jnp.sqrt(jnp.square(start).mean()))}
    for n in range(1, steps + 1):
        params, opt_state = step(params, opt_state)
        if n in (1, steps):
            found[f"after_{n}"] = float(jnp.abs(kernels(params) - start).mean())
    return found
