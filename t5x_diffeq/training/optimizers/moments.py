"""Adam whose moments take fewer bytes: `optimizer.moments`.

Adam keeps two numbers for each parameter: the mean m of its gradients and the mean v of their
squares. In time-dependent weights nearly all parameters are the P of kernels, T times as many
numbers as the kernels themselves. Bytes for each number of P, at the size of Llama-1B (T = 96):

    moments            m                          v                             bytes
    float32            float32                    float32                       8
    bfloat16           bfloat16                   bfloat16                      4
    int8               8 bits, and a scale for    8 bits, and a scale for       2.08
                       each block                 each block

The first is optax's. `bfloat16` holds for all parameters, `int8` for kernels with a leading axis of
T or of solver steps; all others then keep float32.

**Stochastic rounding.** With beta2 = 0.999, v changes by a thousandth of itself in a step, less
than the distance of neighbouring bfloat16 numbers, so rounding to nearest would never change it.
Here x is rounded to one of its two neighbours at random, with probabilities that make x the mean.
The random bits are a function of the step's number, so a resumed run draws the same ones.

**Blocks.** A block is the T (or N) numbers of one entry of the kernel, along an axis that the mesh
doesn't split. So a device needs nothing from others, and blocks don't depend on the mesh. With the
largest absolute value s of the block, the bits c stand for

    a mean m = s (c / L) |c / L|,  c = -L ... L        L = 127
    a mean of squares v = s 2^(K (c - F) / F),  c = 0 ... F        F = 255, K = 24

Both codes are fine for small numbers, as those of Dettmers et al. (2022, 8-bit optimizers via
block-wise quantization) are: neighbours of m differ by s / 127^2 near 0, those of v by 7%. No v is
rounded to zero, which would make the step of its parameter huge; below 2^-K s it is too large.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax.traverse_util import flatten_dict, unflatten_dict
from jaxtyping import Array, Float, UInt32

from t5x_diffeq.model.layers.parameter import Parameter, flatten_parameters
from t5x_diffeq.model.ode.weight_source import LeafPath

LARGEST = 127  # L
FINEST = 255  # F
OCTAVES = 24  # K


class Step(NamedTuple):
    """What an optimizer step uses besides the gradient of a parameter."""

    beta1: float  # decay of the mean of gradients
    beta2: float  # decay of the mean of their squares
    epsilon: float  # Adam's
    number: Array  # the step's, from 1

    def direction(self, mean: Float[Array, "*s"], square: Float[Array, "*s"]) -> Float[Array, "*s"]:
        """Adam's, from both moments without their bias towards 0 (Kingma and Ba 2015)."""
        mean = mean / (1 - self.beta1**self.number)
        square = square / (1 - self.beta2**self.number)
        return mean / (jnp.sqrt(square) + self.epsilon)

    def moments(
        self, g: Float[Array, "*s"], mean: Float[Array, "*s"], square: Float[Array, "*s"]
    ) -> tuple[Float[Array, "*s"], Float[Array, "*s"]]:
        """Both moments with the step's gradient."""
        mean = self.beta1 * mean + (1 - self.beta1) * g
        return mean, self.beta2 * square + (1 - self.beta2) * jnp.square(g)


def random_bits(seed: UInt32[Array, ""], shape: tuple[int, ...]) -> UInt32[Array, "..."]:
    """Random bits as a function of the seed and the place in the array.

    It is a hash of 32 bits (Wellons 2018, lowbias32), applied twice, so it is computed in the loop
    that updates the parameter, on each device's own shard. On CPUs `jax.random.bits` keeps bits and
    counters in arrays of the parameter's size, and takes seconds to compile for each parameter.
    """
    place = jnp.zeros(shape, jnp.uint32)
    for axis, size in enumerate(shape):
        place = place * jnp.uint32(size) + jax.lax.broadcasted_iota(jnp.uint32, shape, axis)
    return _hash(_hash(place) ^ seed)


def _hash(x: UInt32[Array, "*s"]) -> UInt32[Array, "*s"]:
    x = (x ^ (x >> 16)) * jnp.uint32(0x7FEB352D)
    x = (x ^ (x >> 15)) * jnp.uint32(0x846CA68B)
    return x ^ (x >> 16)


def like(leaf: Parameter | Array, value: Array, names: tuple[str | None, ...]) -> Any:
    """The value; in a box with these logical axes, if the parameter is in one."""
    return leaf.replace(value=value, names=names) if isinstance(leaf, Parameter) else value


@dataclass(frozen=True)
class Whole:
    """Both moments have the parameter's shape; in bfloat16, they are rounded stochastically.

    `init` takes a parameter, which may be in a box, as the moments are then. `update` takes random
    bits of the gradient's shape, and returns the direction and the new moments.
    """

    names: tuple[str | None, ...]
    dtype: str = "float32"

    def init(self, leaf: Parameter | Array) -> tuple[Any, Any]:  # noqa: D102
        shape = (leaf.value if isinstance(leaf, Parameter) else leaf).shape
        zeros = like(leaf, jnp.zeros(shape, self.dtype), self.names)
        return zeros, zeros

    def update(  # noqa: D102
        self, step: Step, g: Array, mean: Array, square: Array, bits: UInt32[Array, "..."]
    ) -> tuple[Array, Array, Array]:
        mean, square = step.moments(g, mean.astype(g.dtype), square.astype(g.dtype))
        direction = step.direction(mean, square)
        if self.dtype == "float32":
            return direction, mean, square
        return direction, round_to_bfloat16(mean, bits), round_to_bfloat16(square, bits >> 16)


def round_to_bfloat16(x: Float[Array, "*s"], bits: UInt32[Array, "*s"]) -> Float[Array, "*s"]:
    """x rounded stochastically, with the lowest 16 of the random bits.

    The bfloat16 numbers are the float32 numbers whose lowest 16 bits are 0. Their neighbours differ
    by one in the upper 16, also between powers of two, so the lower 16 say how near each is.
    """
    raised = jax.lax.bitcast_convert_type(x, jnp.uint32) + (bits & 0xFFFF)
    cut = jax.lax.bitcast_convert_type(raised & jnp.uint32(0xFFFF0000), jnp.float32)
    return jnp.where(jnp.isfinite(x), cut, x).astype(jnp.bfloat16)


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


@dataclass(frozen=True)
class Coded:
    """Both moments are coded, in blocks along the first axis of the parameter; else as `Whole`."""

    names: tuple[str | None, ...]

    def init(self, leaf: Parameter | Array) -> tuple[Any, Any]:  # noqa: D102
        shape = (leaf.value if isinstance(leaf, Parameter) else leaf).shape

        def zeros(dtype: str) -> Blocks:
            scales = like(leaf, jnp.zeros(shape[1:], "float32"), self.names[1:])
            return Blocks(like(leaf, jnp.zeros(shape, dtype), self.names), scales)

        return zeros("int8"), zeros("uint8")

    def update(  # noqa: D102
        self, step: Step, g: Array, mean: Blocks, square: Blocks, bits: UInt32[Array, "..."]
    ) -> tuple[Array, Blocks, Blocks]:
        m, v = step.moments(g, decode_mean(mean), decode_square(square))
        return step.direction(m, v), encode_mean(m, bits), encode_square(v, bits >> 16)


MomentStore = Whole | Coded


def scale_by_moments(
    stores: Mapping[LeafPath, MomentStore], beta1: float, beta2: float, epsilon: float
) -> optax.GradientTransformation:
    """From gradients to Adam's directions; `stores` has one for each parameter, by its path."""

    def init(params: dict) -> optax.ScaleByAdamState:
        leaves = flatten_parameters(params)
        made = {path: stores[path].init(leaf) for path, leaf in leaves.items()}
        mean, square = (unflatten_dict({p: both[n] for p, both in made.items()}) for n in (0, 1))
        return optax.ScaleByAdamState(jnp.zeros((), jnp.int32), mean, square)

    def update(
        gradient: dict, state: optax.ScaleByAdamState, params: dict | None = None
    ) -> tuple[dict, optax.ScaleByAdamState]:
        del params
        count = optax.safe_increment(state.count)
        step = Step(beta1, beta2, epsilon, count)
        means, squares = (
            flatten_dict(tree, is_leaf=lambda path, _: path in stores)
            for tree in (state.mu, state.nu)
        )
        updated = {}
        gradients = flatten_dict(gradient)
        key = jax.random.fold_in(jax.random.key(0, impl="threefry2x32"), count)
        seeds = jax.random.bits(key, (len(gradients),), jnp.uint32)
        for seed, (path, g) in zip(seeds, gradients.items(), strict=True):
            bits = random_bits(seed, g.shape)
            updated[path] = stores[path].update(step, g, means[path], squares[path], bits)
        directions, mean, square = (
            unflatten_dict({path: parts[n] for path, parts in updated.items()}) for n in range(3)
        )
        return directions, optax.ScaleByAdamState(count, mean, square)

    return optax.GradientTransformation(init, update)
