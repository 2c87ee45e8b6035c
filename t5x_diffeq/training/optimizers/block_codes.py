"""Numbers of 8 bits, in blocks with a scale each; Adam's two means are kept so (`moments`).

A block lies along the first axis of an array. With the largest absolute value s of the block, the
bits c stand for

    a mean m = s (c / L) |c / L|,  c = -L ... L        L = 127
    a mean of squares v = s 2^(K (c - F) / F),  c = 0 ... F        F = 255, K = 24

Both codes are fine for small numbers, as those of Dettmers et al. (2022, 8-bit optimizers via
block-wise quantization) are: neighbours of m differ by s / 127^2 near 0, those of v by 7%. No v is
rounded to zero, which would make the step of its parameter huge; below 2^-K s it is too large. All
rounding is stochastic, so its errors don't add up over steps.
"""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, UInt32

LARGEST = 127  # L
FINEST = 255  # F
OCTAVES = 24  # K


class Blocks(NamedTuple):
    """Coded numbers, in blocks along their first axis, and the scale of each block."""

    codes: Any
    scales: Any


def encode_mean(x: Float[Array, "block *s"], bits: UInt32[Array, "block *s"]) -> Blocks:
    """x as codes with a sign, rounded stochastically with the lowest 16 of the random bits."""
    scales, x = _scales(x)
    y = jnp.abs(x) * LARGEST**2
    below = jnp.clip(jnp.floor(jnp.sqrt(y)), 0, LARGEST - 1)
    up = _uniform(bits) < (y - below**2) / (2 * below + 1)
    return Blocks((jnp.sign(x) * (below + up)).astype(jnp.int8), scales)


def decode_mean(blocks: Blocks) -> Float[Array, "block *s"]:
    """The numbers that `encode_mean` has rounded."""
    c = blocks.codes.astype(jnp.float32) / LARGEST
    return blocks.scales * c * jnp.abs(c)


def encode_square(x: Float[Array, "block *s"], bits: UInt32[Array, "block *s"]) -> Blocks:
    """x >= 0 as codes, rounded stochastically with the lowest 16 of the random bits."""
    scales, x = _scales(x)
    level = FINEST * (1 + jnp.log2(jnp.maximum(x, 1e-30)) / OCTAVES)
    below = jnp.clip(jnp.floor(level), 0, FINEST - 1)
    low, high = _unit_square(below), _unit_square(below + 1)
    codes = (below + (_uniform(bits) < (x - low) / (high - low))).astype(jnp.uint8)
    return Blocks(codes, scales)


def decode_square(blocks: Blocks) -> Float[Array, "block *s"]:
    """The numbers that `encode_square` has rounded."""
    return blocks.scales * _unit_square(blocks.codes.astype(jnp.float32))


def _unit_square(code: Float[Array, "*s"]) -> Float[Array, "*s"]:
    return jnp.exp2((code / FINEST - 1) * OCTAVES)


def _uniform(bits: UInt32[Array, "*s"]) -> Float[Array, "*s"]:
    """A number in [0, 1) from the lowest 16 bits."""
    return (bits & 0xFFFF).astype(jnp.float32) / 2**16


def _scales(x: Float[Array, "block *s"]) -> tuple[Float[Array, "*s"], Float[Array, "block *s"]]:
    """The largest absolute value of each block, and x in units of it."""
    scales = jnp.abs(x).max(0)
    return scales, x / jnp.where(scales > 0, scales, 1)
