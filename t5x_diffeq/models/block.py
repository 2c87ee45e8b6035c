"""The block: the two sub-fields f (attention) and g (MLP) of a transformer's vector field."""

from collections.abc import Callable
from functools import partial
from math import sqrt
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from jaxtyping import Array

from t5x_diffeq.array_types import Cache, Places, State, Weights
from t5x_diffeq.layers.attention import CACHE, Attention
from t5x_diffeq.layers.attention_kernels import LANES
from t5x_diffeq.layers.mlp import MLP
from t5x_diffeq.layers.norm import Norm
from t5x_diffeq.models.adapters import block_variables
from t5x_diffeq.models.config import ModelConfig
from t5x_diffeq.ode.integrate import SubFieldWithMemory
from t5x_diffeq.ode.solvers import SCHEMES, SubField, VectorField


class Block(nn.Module):
    """f(y) = attention(norm(y)), g(y) = mlp(norm'(y)); GPT's or Llama's layers inside.

    With `config.mlp_input="attention_norm"`, g(y) = mlp(norm'(norm(y))), as in the official Llama.
    With `config.norm_position="after"`, f(y) = norm(attention(y)), g(y) = norm'(mlp(y)).
    The block knows nothing of time, step size or residual stream: those belong to the scheme. The
    state and both results have `config.state_dtype`; in between, `config.dtype` is used.
    """

    config: ModelConfig

    def setup(self):  # noqa: D102
        c = self.config
        gpt, norms_last = c.architecture == "gpt", c.norm_position == "after"
        norm = partial(
            Norm,
            centred=gpt,
            use_shift=gpt or c.norm_shift,
            epsilon=c.norm_eps,
            writes_residual=norms_last,
            dtype=c.compute_dtype,
        )
        # N residual additions with step size 1 make the stream grow; those with 1/N do not.
        output_std = 0.02 / sqrt(2 * c.num_steps) if c.step_size == "1" else 0.02
        layer: dict[str, Any] = {
            "use_bias": gpt,
            "writes_residual": not norms_last,
            "output_std": output_std,
            "dtype": c.compute_dtype,
        }
        self.attention_norm = norm()
        self.attention = Attention(
            c.embed_dim,
            c.head_width,
            c.num_heads,
            c.kv_heads,
            fused=gpt,
            qkv_bias=gpt or c.qkv_bias,
            qk_norm=c.qk_norm,
            norm_eps=c.norm_eps,
            rotary=not gpt,
            rotary_base=c.rotary_base,
            rotary_scaling=c.rotary_scaling,
            kernel=c.attention,
            **layer,
        )
        self.mlp_norm = norm()
        self.mlp = MLP(c.embed_dim, c.mlp_dim, c.mlp_activation, gated=not gpt, **layer)
        self.attention_dropout = nn.Dropout(c.dropout_rate)
        self.mlp_dropout = nn.Dropout(c.dropout_rate)

    def f(self, y: State, places: Places, deterministic: bool = True) -> State:
        """The attention sub-field."""
        if self.config.norm_position == "after":
            x = y.astype(self.config.compute_dtype)
            output = self.attention_norm(self.attention(x, places))
        else:
            output = self.attention(self.attention_norm(y), places)
        dropped = self.attention_dropout(output, deterministic=deterministic)
        return dropped.astype(self.config.state_dtype)

    def g(self, y: State, deterministic: bool = True) -> State:
        """The MLP sub-field."""
        if self.config.norm_position == "after":
            output = self.mlp_norm(self.mlp(y.astype(self.config.compute_dtype)))
        else:
            x = self.attention_norm(y) if self.config.mlp_input == "attention_norm" else y
            output = self.mlp(self.mlp_norm(x))
        dropped = self.mlp_dropout(output, deterministic=deterministic)
        # Without a barrier, the TPU compiler fuses the conversions to and from the state's dtype,
        # and the next norm's sums, into the MLP's products, which then take up to twice as long.
        return jax.lax.optimization_barrier(dropped).astype(self.config.state_dtype)

    def __call__(self, y: State, places: Places) -> State:
        """f + g."""
        return self.f(y, places) + self.g(y)

    def input_shapes(self) -> tuple[jax.ShapeDtypeStruct, Places]:
        """Small inputs for making its parameters, of a length that every kernel accepts."""
        c = self.config
        length = min(c.max_length, LANES)
        state = jax.ShapeDtypeStruct((1, length, c.embed_dim), jnp.dtype(c.state_dtype))
        positions = jax.ShapeDtypeStruct((1, length), jnp.int32)
        return state, Places(positions)  # type: ignore[arg-type]  # a shape stands for its array


def empty_cache(config: ModelConfig, batch_size: int, length: int) -> Cache:
    """A cache for `batch_size` sequences of `length` tokens, with a slot per evaluation of f."""
    evaluations_of_f, _ = SCHEMES[config.scheme].evaluations
    slots = config.num_steps * evaluations_of_f
    heads = (config.kv_heads, config.head_width)
    shape = (slots, batch_size, length, *heads)
    return {name: jnp.zeros(shape, config.compute_dtype) for name in ("keys", "values")}


def cached_sub_fields(config: ModelConfig, places: Places) -> tuple[SubFieldWithMemory, SubField]:
    """The block's f and g for new tokens, given a cache of the tokens before them.

    f takes the cache and a slot of it besides weights and state. Besides its value, it returns the
    cache with the new tokens' keys and values in this slot.

    Args:
      config: the model's config.
      places: positions and documents of the new tokens.
    """
    block = Block(config, parent=None)

    def f(W: Weights, y: State, cache: Cache, slot: int) -> tuple[State, Cache]:
        variables = {**block_variables(W), CACHE: {"attention": {**cache, "slot": slot}}}
        output, changed = nn.apply(Block.f, block, mutable=[CACHE])(variables, y, places)
        return output, {name: changed[CACHE]["attention"][name] for name in cache}

    def g(W: Weights, y: State) -> State:
        return nn.apply(Block.g, block)(block_variables(W), y)

    return f, g


def vector_field(
    config: ModelConfig, places: Places, deterministic: bool
) -> Callable[[Array | None], VectorField]:
    """The block as a vector field, given a step's dropout key.

    Args:
      config: the model's config.
      places: positions and documents of the tokens.
      deterministic: whether to leave dropout out, whatever the key.
    """
    block = Block(config, parent=None)
    f, g = nn.apply(Block.f, block), nn.apply(Block.g, block)

    def with_key(key: Array | None) -> VectorField:
        rngs = None if key is None else {"dropout": key}

        def call(method: Callable[..., State], W: Weights, y: State, *args: Places) -> State:
            y = nn.with_logical_constraint(y, ("batch", "length", None))
            return method(block_variables(W), y, *args, deterministic=deterministic, rngs=rngs)

        return VectorField(f=lambda W, y: call(f, W, y, places), g=lambda W, y: call(g, W, y))

    return with_key
