"""The train state: its sharded initialisation, and its shapes without creating it."""

from collections.abc import Callable, Collection, Sequence

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array

from t5x_diffeq.checkpoints.stored import TrainState
from t5x_diffeq.config.config import TrainKeys
from t5x_diffeq.model.language_model import LanguageModel
from t5x_diffeq.model.layers.context import length_shards
from t5x_diffeq.model.layers.mesh import mesh_axes, shards_over
from t5x_diffeq.system.errors import InputError
from t5x_diffeq.training.spikes import RecentSteps


def declared_params(model: LanguageModel) -> dict:
    """The parameters' shapes, boxed with their declarations; nothing is computed."""
    rows, length = _least_batch(model)
    if (shards := length_shards()) > 1:  # they may not divide the model's own length
        length = 2 * shards
    tokens = jax.ShapeDtypeStruct((rows, length), jnp.int32)
    return jax.eval_shape(model.init, jax.random.key(0), tokens)["params"]


def _least_batch(model: LanguageModel) -> tuple[int, int]:
    """A row for each part of a batch, as layers may compute on their parts of it."""
    return shards_over(mesh_axes("batch")), model.config.max_length


def trainable_parts(names: Sequence[str], parts: Collection[str]) -> Callable[[str], bool]:
    """`config.train.trainable` as a function from a part's name to whether it trains.

    "embeddings" are those of tokens and positions.

    Args:
      names: the names in the config; if empty, all parts train.
      parts: the names of the model's parts.

    Raises:
      InputError: if the model doesn't have one of them.
    """
    kinds = {part: "embeddings" if part.endswith("_embedding") else part for part in parts}
    for name in names:
        if name not in kinds.values():
            there = ", ".join(sorted({*kinds.values()}))
            raise InputError(f"train.trainable names {name!r}; this model has {there}")
    return lambda part: not names or kinds[part] in names


def init_state(
    model: LanguageModel,
    optimizer: optax.GradientTransformation,
    trains: Callable[[str], bool],
    keys: TrainKeys,
    key: Array,
) -> TrainState:
    """A new state, its parameters boxed (for `partitioning.state_shardings` and `unbox`).

    Args:
      model: the model.
      optimizer: the optimizer of the parts that train.
      trains: whether a part of the parameters, given its name, trains.
      keys: `config.train`.
      key: determines the parameters.
    """
    params = model.init(key, jnp.zeros(_least_batch(model), jnp.int32))["params"]
    training = {name: part for name, part in params.items() if trains(name)}
    return TrainState(
        jnp.zeros((), jnp.int32),
        params,
        optimizer.init(training),
        averages=training if keys.ema_decay else None,
        recent=None if keys.on_spike == "nothing" else RecentSteps.new(keys.spike_window),
    )
