"""Numbers of 8 or 4 bits, in blocks with a scale each; Adam's two means are kept so (`moments`).

A block lies along the first axis of an array. With the largest absolute value s of the block, the
bits c stand for

    a mean m = s (c / L) |c / L|,  c = -L ... L        L = 127 or 7
    a mean of squares v = s 2^(K (c - F) / F),  c = 0 ... F        F = 255 or 15, K = 24 or 10

Both codes are fine for small numbers, as those of Dettmers et al. (2022, 8-bit optimizers via
block-wise quantization) are: with 8 bits, neighbours of m differ by s / 127^2 near 0, those of v by
7%; with 4 bits by s / 49 and 59%. No v is rounded to zero, which would make the step of its
parameter huge; below 2^-K s it is too large. All rounding is stochastic, so its errors don't add up
over steps.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Int8, UInt8, UInt32


class Blocks(NamedTuple):
    """Coded numbers, in blocks along their first axis, and the scale of each block."""

    codes: Any
    scales: Any


@dataclass(frozen=True)
class BlockCode:
    """A code of some bits.

    Attributes:
      bits: 8; or 4, of which two stand in a byte: one of the first half of a block, one of the
        second.
      octaves: K, the powers of two that the codes of a mean of squares span.
    """

    bits: int
    octaves: int

    @property
    def largest(self) -> int:
        """L, the largest code of a mean."""
        return 2 ** (self.bits - 1) - 1

    @property
    def finest(self) -> int:
        """F, the largest code of a mean of squares."""
        return 2**self.bits - 1

    def bytes_of(self, block: int) -> int:
        """The bytes of a block of so many numbers, without its scale."""
        return -(-block * self.bits // 8)

    def encode_mean(self, x: Float[Array, "block *s"], bits: UInt32[Array, "block *s"]) -> Blocks:
        """x as codes with a sign, rounded stochastically with the lowest 16 of the random bits."""
        scales, x = _scales(x)
        y = jnp.abs(x) * self.largest**2
        below = jnp.clip(jnp.floor(jnp.sqrt(y)), 0, self.largest - 1)
        up = _uniform(bits) < (y - below**2) / (2 * below + 1)
        codes = (jnp.sign(x) * (below + up)).astype(jnp.int8)
        return Blocks(codes if self.bits == 8 else _pack(codes), scales)

    def decode_mean(self, blocks: Blocks, block: int) -> Float[Array, "block *s"]:
        """The numbers that `encode_mean` has rounded, so many in a block."""
        # The sign is the highest of the 4 bits.
        codes = blocks.codes if self.bits == 8 else (_unpack(blocks.codes, block) ^ 8) - 8
        c = codes.astype(jnp.float32) / self.largest
        return blocks.scales * c * jnp.abs(c)

    def encode_square(self, x: Float[Array, "block *s"], bits: UInt32[Array, "block *s"]) -> Blocks:
        """x >= 0 as codes, rounded stochastically with the lowest 16 of the random bits."""
        scales, x = _scales(x)
        level = self.finest * (1 + jnp.log2(jnp.maximum(x, 1e-30)) / self.octaves)
        below = jnp.clip(jnp.floor(level), 0, self.finest - 1)
        low, high = self._unit_square(below), self._unit_square(below + 1)
        codes = (below + (_uniform(bits) < (x - low) / (high - low))).astype(jnp.uint8)
        return Blocks(codes if self.bits == 8 else _pack(codes), scales)

    def decode_square(self, blocks: Blocks, block: int) -> Float[Array, "block *s"]:
        """The numbers that `encode_square` has rounded, so many in a block."""
        codes = blocks.codes if self.bits == 8 else _unpack(blocks.codes, block)
        return blocks.scales * self._unit_square(codes.astype(jnp.float32))

    def _unit_square(self, code: Float[Array, "*s"]) -> Float[Array, "*s"]:
        return jnp.exp2((code / self.finest - 1) * self.octaves)


EIGHT_BITS = BlockCode(bits=8, octaves=24)
FOUR_BITS = BlockCode(bits=4, octaves=10)


def _uniform(bits: UInt32[Array, "*s"]) -> Float[Array, "*s"]:
    """A number in [0, 1) from the lowest 16 bits."""
    return (bits & 0xFFFF).astype(jnp.float32) / 2**16


def _scales(x: Float[Array, "block *s"]) -> tuple[Float[Array, "*s"], Float[Array, "block *s"]]:
    """The largest absolute value of each block, and x in units of it."""
    scales = jnp.abs(x).max(0)
    return scales, x / jnp.where(scales > 0, scales, 1)


def _pack(codes: UInt8[Array, "block *s"] | Int8[Array, "block *s"]) -> UInt8[Array, "bytes *s"]:
    """The lowest 4 bits of each code, two of them in a byte."""
    nibbles = codes.astype(jnp.uint8) & 0xF
    half = (len(codes) + 1) // 2
    padding = [(0, 2 * half - len(codes)), *[(0, 0)] * (codes.ndim - 1)]
    return nibbles[:half] | (jnp.pad(nibbles[half:], padding) << 4)


def _unpack(packed: UInt8[Array, "bytes *s"], block: int) -> Int8[Array, "block *s"]:
    """The 4 bits of each of `block` codes, 0 to 15."""
    return jnp.concatenate((packed & 0xF, packed >> 4))[:block].astype(jnp.int8)
