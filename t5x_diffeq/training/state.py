"""The train state: made sharded, and described without being made."""

from collections.abc import Callable, Collection, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import struct
from jaxtyping import Array

from t5x_diffeq.models.language_model import LanguageModel
from t5x_diffeq.runtime.errors import InputError


@struct.dataclass
class TrainState:
    """All that training changes; also its shapes or shardings, in the same tree.

    Attributes:
      step: optimizer steps done, an int32 scalar.
      params: the model's parameters, float32.
      opt_state: the optimizer's state, of the parts that train.
    """

    step: Any
    params: Any
    opt_state: Any


def declared_params(model: LanguageModel) -> dict:
    """The parameters' shapes in their boxes of declarations; nothing is computed."""
    tokens = jax.ShapeDtypeStruct((1, model.config.max_length), jnp.int32)
    return jax.eval_shape(model.init, jax.random.key(0), tokens)["params"]


def trainable_parts(names: Sequence[str], parts: Collection[str]) -> Callable[[str], bool]:
    """`config.train.trainable` as a function of a part's name: whether it trains.

    "embeddings" are those of tokens and positions.

    Args:
      names: of the config; none: all train.
      parts: the names of the model's parts.

    Raises:
      InputError: naming one that the model doesn't have.
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
      optimizer: of the parts that train.
      trains: whether a part of the parameters, by its name, does.
      key: decides the parameters.
    """
    tokens = jnp.zeros((1, model.config.max_length), jnp.int32)
    params = model.init(key, tokens)["params"]
    training = {name: part for name, part in params.items() if trains(name)}
    return TrainState(jnp.zeros((), jnp.int32), params, optimizer.init(training))
