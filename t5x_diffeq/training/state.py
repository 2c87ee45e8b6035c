"""The train state: its sharded initialisation, and its shapes without creating it."""

from collections.abc import Callable, Collection, Sequence
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import struct
from jaxtyping import Array

from t5x_diffeq.layers.mesh import mesh_axes
from t5x_diffeq.models.language_model import LanguageModel
from t5x_diffeq.runtime.errors import InputError


@struct.dataclass
class TrainState:
    """Everything that training changes; also a tree of its shapes or shardings.

    Attributes:
      step: optimizer steps done, an int32 scalar.
      params: the model's parameters, float32.
      opt_state: the optimizer's state for the parts that train.
    """

    step: Any
    params: Any
    opt_state: Any


def declared_params(model: LanguageModel) -> dict:
    """The parameters' shapes, boxed with their declarations; nothing is computed."""
    tokens = jax.ShapeDtypeStruct((1, model.config.max_length), jnp.int32)
    return jax.eval_shape(model.init, jax.random.key(0), tokens)["params"]


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
    key: Array,
) -> TrainState:
    """A new state, its parameters boxed (for `partitioning.state_shardings` and `unbox`).

    Args:
      model: the model.
      optimizer: the optimizer of the parts that train.
      trains: whether a part of the parameters, given its name, trains.
      key: determines the parameters.
    """
    # A row for each part of a batch, as layers may compute on their parts of it.
    sizes = jax.sharding.get_abstract_mesh().shape
    rows = prod(sizes[axis] for axis in mesh_axes("batch"))
    tokens = jnp.zeros((rows, model.config.max_length), jnp.int32)
    params = model.init(key, tokens)["params"]
    training = {name: part for name, part in params.items() if trains(name)}
    return TrainState(jnp.zeros((), jnp.int32), params, optimizer.init(training))
