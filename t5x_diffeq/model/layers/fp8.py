"""Products of activations and weights with fp8 operands, at twice the rate of bfloat16 operands.

The operands are e4m3, and the gradient that arrives is e5m2 (Micikevicius et al. 2022). Each is
scaled so that its largest entry is the largest number of its dtype. The scale is computed from the
array itself and not from earlier steps (delayed scaling). So there is no state, and W(t) can differ
from one solver step to the next. GPUs sum in float32 (CPUs may sum in bfloat16); results are
rounded to bfloat16.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.typing import DTypeLike
from jaxtyping import Array, Float, UInt8

_OPERAND, _GRADIENT = jnp.float8_e4m3fn, jnp.float8_e5m2


class _Scaled(NamedTuple):
    """An array as `scale * values`. The values are stored as bytes.

    Arrays that a policy of `jax.checkpoint` keeps pass through `reduce_precision`, which knows no
    dtype without infinities: it would turn the largest entries of e4m3 into NaN.
    """

    bits: UInt8[Array, "..."]
    scale: Float[Array, ""]

    def values(self, dtype: DTypeLike) -> Array:
        return jax.lax.bitcast_convert_type(self.bits, dtype)


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def fp8_tensordot(x: Array, kernel: Array, axes: int) -> Array:
    """`jnp.tensordot(x, kernel, axes)` of bfloat16 arrays, from operands that are rounded to fp8.

    The backward pass multiplies the same operands with the rounded gradient. A remat policy can
    keep the rounded x for the backward pass by the name "fp8" (`integrate.CHECKPOINT_NAMES`).

    Args:
      x: `[tokens, *inputs]`.
      kernel: `[*inputs, *outputs]`.
      axes: the number of inputs' dimensions.

    Returns:
      `[tokens, *outputs]`, in bfloat16.
    """
    return _forward(x, kernel, axes)[0]


def _forward(x: Array, kernel: Array, axes: int) -> tuple[Array, tuple[_Scaled, _Scaled]]:
    left = _Scaled(*(checkpoint_name(part, "fp8") for part in _quantise(x, _OPERAND)))
    right = _quantise(kernel, _OPERAND)
    contracted = tuple(range(1, 1 + axes)), tuple(range(axes))
    product = _product(left, right, contracted, (_OPERAND, _OPERAND))
    return product, (left, right)


def _backward(axes: int, kept: tuple[_Scaled, _Scaled], d: Array) -> tuple[Array, Array]:
    x, kernel = kept
    gradient = _quantise(d, _GRADIENT)
    outputs = tuple(range(1, d.ndim)), tuple(range(axes, kernel.bits.ndim))
    dx = _product(gradient, kernel, outputs, (_GRADIENT, _OPERAND))
    dkernel = _product(x, gradient, ((0,), (0,)), (_OPERAND, _GRADIENT))
    return dx, dkernel


fp8_tensordot.defvjp(_forward, _backward)


def _quantise(x: Array, dtype: DTypeLike) -> _Scaled:
    """x as fp8. A NaN or infinity in x stays visible: the scale becomes NaN or infinite, too."""
    largest = float(jnp.finfo(dtype).max)
    tiniest = float(jnp.finfo(jnp.float32).tiny)  # zeros stay zeros
    scale = jnp.maximum(jnp.max(jnp.abs(x)).astype(jnp.float32), tiniest * largest) / largest
    scaled = jnp.clip(x.astype(jnp.float32) / scale, -largest, largest)
    return _Scaled(jax.lax.bitcast_convert_type(scaled.astype(dtype), jnp.uint8), scale)


def _product(
    x: _Scaled,
    y: _Scaled,
    contracted: tuple[tuple[int, ...], tuple[int, ...]],
    dtypes: tuple[DTypeLike, DTypeLike],
) -> Array:
    # The fp8 arrays themselves are multiplied, because XLA drops a conversion to fp8 that is
    # followed by a conversion back. XLA's cuBLAS call needs a result in bfloat16.
    left, right = (each.values(dtype) for each, dtype in zip((x, y), dtypes, strict=True))
    sums = jax.lax.dot_general(
        left, right, (contracted, ((), ())), preferred_element_type=jnp.bfloat16
    )
    return (sums * (x.scale * y.scale)).astype(jnp.bfloat16)
