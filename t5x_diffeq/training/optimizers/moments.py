"""Adam with moments in bfloat16: `optimizer.moments`.

Adam keeps two numbers for each parameter: the mean m of its gradients and the mean v of their
squares. In time-dependent weights nearly all parameters are the P of kernels, T times as many
numbers as the kernels themselves. In bfloat16, m and v take 4 bytes for each of them instead of 8.

With beta2 = 0.999, v changes by a thousandth of itself in a step, less than the distance of
neighbouring bfloat16 numbers, so rounding to nearest would never change it. Rounding is therefore
stochastic: a number becomes one of its two neighbours, with probabilities that preserve the mean.
The random bits are a function of the step's number, so a resumed run draws the same bits.
"""

import jax
import jax.numpy as jnp
import optax
from flax.traverse_util import flatten_dict, unflatten_dict
from jaxtyping import Array, Float, UInt32


def scale_by_bfloat16_moments(
    beta1: float, beta2: float, epsilon: float
) -> optax.GradientTransformation:
    """The transformation of gradients into Adam's directions (Kingma and Ba 2015)."""

    def init(params: dict) -> optax.ScaleByAdamState:
        zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.bfloat16), params)
        return optax.ScaleByAdamState(jnp.zeros((), jnp.int32), zeros, zeros)

    def update(
        gradient: dict, state: optax.ScaleByAdamState, params: dict | None = None
    ) -> tuple[dict, optax.ScaleByAdamState]:
        del params
        count = optax.safe_increment(state.count)
        means, squares = flatten_dict(state.mu), flatten_dict(state.nu)
        directions = {}
        gradients = flatten_dict(gradient)
        # `impl` is named, because a resumed run must draw the same bits whatever JAX's default is.
        key = jax.random.fold_in(jax.random.key(0, impl="threefry2x32"), count)
        seeds = jax.random.bits(key, (len(gradients),), jnp.uint32)
        for seed, (path, g) in zip(seeds, gradients.items(), strict=True):
            mean = beta1 * means[path].astype(g.dtype) + (1 - beta1) * g
            square = beta2 * squares[path].astype(g.dtype) + (1 - beta2) * jnp.square(g)
            # Both moments begin at 0; here they are corrected for this bias.
            unbiased = mean / (1 - beta1**count), square / (1 - beta2**count)
            directions[path] = unbiased[0] / (jnp.sqrt(unbiased[1]) + epsilon)
            # Rounding takes the lower 16 bits, so 32 bits are enough for both moments.
            bits = random_bits(seed, g.shape)
            means[path] = round_to_bfloat16(mean, bits)
            squares[path] = round_to_bfloat16(square, bits >> 16)
        mean, square = unflatten_dict(means), unflatten_dict(squares)
        return unflatten_dict(directions), optax.ScaleByAdamState(count, mean, square)

    return optax.GradientTransformation(init, update)


def random_bits(seed: UInt32[Array, ""], shape: tuple[int, ...]) -> UInt32[Array, "..."]:
    """Random bits as a function of the seed and the place in the array.

    They are a hash of 32 bits (Wellons 2018, lowbias32), applied twice. XLA can compute such a hash
    in the loop that updates the parameter, on each device's own shard. On CPUs `jax.random.bits`
    keeps bits and counters in arrays of the parameter's size, and takes seconds to compile for each
    parameter.
    """
    place = jnp.zeros(shape, jnp.uint32)
    for axis, size in enumerate(shape):
        place = place * jnp.uint32(size) + jax.lax.broadcasted_iota(jnp.uint32, shape, axis)
    return _hash(_hash(place) ^ seed)


def _hash(x: UInt32[Array, "*s"]) -> UInt32[Array, "*s"]:
    x = (x ^ (x >> 16)) * jnp.uint32(0x7FEB352D)
    x = (x ^ (x >> 15)) * jnp.uint32(0x846CA68B)
    return x ^ (x >> 16)


def round_to_bfloat16(x: Float[Array, "*s"], bits: UInt32[Array, "*s"]) -> Float[Array, "*s"]:
    """x rounded stochastically, with the lowest 16 of the random bits.

    The bfloat16 numbers are the float32 numbers whose lowest 16 bits are 0. Neighbours differ by
    one in the upper 16 bits, also across powers of two. So the lower 16 bits of x say how far it is
    from the neighbour below.
    """
    raised = jax.lax.bitcast_convert_type(x, jnp.uint32) + (bits & 0xFFFF)
    cut = jax.lax.bitcast_convert_type(raised & jnp.uint32(0xFFFF0000), jnp.float32)
    return jnp.where(jnp.isfinite(x), cut, x).astype(jnp.bfloat16)
