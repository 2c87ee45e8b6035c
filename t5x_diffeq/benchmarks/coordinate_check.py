"""How far W(t) and y(1) move in the first optimizer steps, as functions of T or of N.

A coordinate check in the sense of muP (Yang et al. 2022): the width of the time embedding, T,
should affect neither the initial scale of W(t) nor how far an optimizer step moves it, and the
number of solver steps, N, not how far that moves y(1) (Dey et al. 2025). Then one learning rate
works for every T, and for every N.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from flax.traverse_util import flatten_dict

from t5x_diffeq.layers.parameter import map_parameters
from t5x_diffeq.models.config import ModelConfig
from t5x_diffeq.models.language_model import LanguageModel
from t5x_diffeq.models.sub_fields import block_of_shapes
from t5x_diffeq.ode.weights import block_parameters
from t5x_diffeq.optimizers.optimizer import scale_each
from t5x_diffeq.training.objective import batch_losses
from t5x_diffeq.training.partitioning import unbox
from t5x_diffeq.training.state import declared_params

# What can be tried: the key of `config.model` and the values, by the name of a table's column.
VALUES: dict[str, tuple[str, tuple[int, ...]]] = {
    "T": ("time_embed_dim", (8, 20, 48, 96, 144)),
    "N": ("num_steps", (4, 8, 16, 32)),
}


def coordinate_check(
    config: ModelConfig, of: str = "T", values: Sequence[int] = (), steps: int = 10
) -> list[dict[str, float]]:
    """A row for each T, or each N.

    It has `start` (rms of W(t)), `after_1` and `after_<steps>` (mean |change| of W(t)), and
    `y_after_1` and `y_after_<steps>` (rms change of the normalised y(1) by that of W(t) alone).

    Args:
      config: the model; its `time_embed_dim` or `num_steps` is replaced.
      of: "T" or "N".
      values: the numbers to try; (): those of `VALUES`.
      steps: steps of Adam at learning rate 1e-3, without decay or clipping, on random tokens.
    """
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, config.vocab_size, (8, config.max_length + 1)).astype(np.int32)
    batch = {"inputs": jnp.asarray(tokens[:, :-1]), "targets": jnp.asarray(tokens[:, 1:])}
    key, usual = VALUES[of]
    rows = []
    for value in values or usual:
        change: dict[str, Any] = {key: value}
        rows.append({of: value, **_measure_movement(replace(config, **change), batch, steps)})
    return rows


def _measure_movement(
    config: ModelConfig, batch: dict[str, jax.Array], steps: int
) -> dict[str, float]:
    """The scale of one model's kernels, and how far they and y(1) move."""
    model = LanguageModel(config)
    block = block_of_shapes(config)
    of_block = block_parameters(block, block.input_shapes())
    declared = declared_params(model)
    multipliers = map_parameters(lambda p: p.step_multiplier, declared)
    optimizer = optax.chain(
        optax.scale_by_adam(0.9, 0.95), scale_each(multipliers), optax.scale_by_learning_rate(1e-3)
    )

    @jax.jit
    def step(params: dict, opt_state: optax.OptState) -> tuple[dict, optax.OptState]:
        def loss(params: dict) -> jax.Array:
            return batch_losses(model, params, batch, chunk=2048).mean()

        gradient = jax.grad(loss)(params)
        norm = optax.global_norm(gradient)
        updates, opt_state = optimizer.update(gradient, opt_state, params, norm=norm)
        return optax.apply_updates(params, updates), opt_state

    @jax.jit
    def kernels_and_end(params: dict, first: dict) -> tuple[jax.Array, jax.Array]:
        """All kernels at all nodes, and y(1) with them and all other parameters as at first."""
        weights = model.apply({"params": params}, method="weights")
        leaves = flatten_dict(weights).items()
        roles = {path: leaf.role for path, leaf in of_block.items()}
        kernels = jnp.concatenate([w.ravel() for path, w in leaves if roles[path] == "kernel"])
        hidden = nn.apply(LanguageModel.hidden, model)
        return kernels, hidden({"params": first}, batch["inputs"], weights)

    first = jax.jit(lambda key: unbox(model.init(key, batch["inputs"])["params"]))(
        jax.random.key(0)
    )
    params, opt_state = first, optimizer.init(first)
    start, y_start = kernels_and_end(first, first)
    sizes = {"start": float(jnp.sqrt(jnp.square(start).mean()))}
    for n in range(1, steps + 1):
        params, opt_state = step(params, opt_state)
        if n in (1, steps):
            now, y = kernels_and_end(params, first)
            sizes[f"after_{n}"] = float(jnp.abs(now - start).mean())
            sizes[f"y_after_{n}"] = float(jnp.sqrt(jnp.square(y - y_start).mean()))
    return sizes
