"""Rotary position embedding (Su et al. 2021), half-rotation form."""

import jax.numpy as jnp
from jaxtyping import Array, Float

from t5x_diffeq.array_types import Positions

BASE = 10_000.0


def rotate(x: Float[Array, "B L H G"], positions: Positions) -> Float[Array, "B L H G"]:
    """Rotates the pairs (x[i], x[i + G/2]) of each head by `position * BASE^(-2i/G)` radians."""
    half = x.shape[-1] // 2
    frequencies = BASE ** (-jnp.arange(half, dtype=jnp.float32) / half)
    angles = positions[..., None, None].astype(jnp.float32) * frequencies
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    turned = jnp.concatenate((first * cos - second * sin, second * cos + first * sin), axis=-1)
    return turned.astype(x.dtype)
