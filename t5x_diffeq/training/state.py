"""The train state: its sharded initialisation, and its shapes without creating it."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import struct
from jaxtyping import Array

from t5x_diffeq.layers.context import length_shards
from t5x_diffeq.layers.mesh import mesh_axes, shards_over
from t5x_diffeq.models.language_model import LanguageModel
from t5x_diffeq.runtime.config import TrainKeys
from t5x_diffeq.runtime.errors import InputError
from t5x_diffeq.training.spikes import RecentSteps


@struct.dataclass
class TrainState:
    """Everything that training changes; also a tree of its shapes or shardings.

    Attributes:
      step: optimizer steps done, an int32 scalar.
      params: the model's parameters, float32.
      opt_state: the optimizer's state for the parts that train.
      averages: the exponential moving averages of the parts that train; None: there are none.
      recent: the last steps, with which a step is compared to find spikes; None: spikes aren't
        detected.
    """

    step: Any
    params: Any
    opt_state: Any
    averages: Any = None
    recent: Any = None

    def with_spikes(self, count: Array) -> "TrainState":
        """The state of a run that has had `count` spikes."""
        if self.recent is None:
            return self
        spikes = jax.device_put(np.asarray(count, np.int32), self.recent.spikes.sharding)
        return replace(self, recent=replace(self.recent, spikes=spikes))

    def averaged_params(self) -> Any:
        """The parameters, with the averages of those that train."""
        return {**self.params, **self.averages}


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
