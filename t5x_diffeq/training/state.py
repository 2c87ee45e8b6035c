"""The train state: made sharded, and described without being made."""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import struct
from jaxtyping import Array

from t5x_diffeq.models.language_model import LanguageModel


@struct.dataclass
class TrainState:
    """All that training changes; also its shapes or shardings, in the same tree.

    Attributes:
      step: optimizer steps done, an int32 scalar.
      params: the model's parameters, float32.
      opt_state: the optimizer's state.
    """

    step: Any
    params: Any
    opt_state: Any


def declared_params(model: LanguageModel) -> dict:
    """The parameters' shapes in their boxes of declarations; nothing is computed."""
    tokens = jnp.zeros((1, model.config.max_length), jnp.int32)
    return jax.eval_shape(model.init, jax.random.key(0), tokens)["params"]


def init_state(
    model: LanguageModel, optimizer: optax.GradientTransformation, key: Array
) -> TrainState:
    """A new state, its parameters boxed (for `partitioning.state_shardings` and `unbox`)."""
    tokens = jnp.zeros((1, model.config.max_length), jnp.int32)
    params = model.init(key, tokens)["params"]
    return TrainState(jnp.zeros((), jnp.int32), params, optimizer.init(params))
