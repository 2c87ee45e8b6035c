"""Products with weights in 8 bits (`model.quantization`), by the library Qwix.

In the forward pass both factors are rounded to int8 or to fp8 (e4m3): W with a scale for each of
its outputs, activations with one for each token. A scale is the largest magnitude of just those
numbers, over the largest of the 8-bit type; there are no delayed or learned scales, as W(t) is made
anew for each optimizer step. The sums are int32 for int8 and float32 for fp8.

The backward pass takes the gradient of the product as if nothing had been rounded (straight-through
estimator, Bengio et al. 2013), in the dtype of the computation, from the factors before rounding;
so do tangents.
"""

import importlib.util
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from t5x_diffeq.runtime.errors import InputError

_TYPES = {"int8": jnp.int8, "fp8": jnp.float8_e4m3fn}
_chosen: ContextVar[str] = ContextVar("quantization", default="none")


def check_quantization(name: str) -> None:
    """Checks that the library is there, if products are to be quantised.

    Args:
      name: `model.quantization`.

    Raises:
      InputError: if it isn't.
    """
    if name != "none" and importlib.util.find_spec("qwix") is None:
        raise InputError(
            f"model.quantization={name} needs the package qwix; pip install -e '.[quantization]', "
            "or leave it out"
        )


@contextmanager
def quantized(name: str) -> Iterator[None]:
    """While functions are traced here, `product` is quantised: "int8" or "fp8"; or not: "none"."""
    token = _chosen.set(name)
    try:
        yield
    finally:
        _chosen.reset(token)


def product(
    x: Float[Array, "rows ..."], W: Float[Array, "..."], num_inputs: int
) -> Float[Array, "rows ..."]:
    """`x W`, over all axes of x but the first, and the first `num_inputs` of W."""
    name = _chosen.get()
    if name == "none":
        return jnp.tensordot(x, W, num_inputs)
    return _quantized_product(x, W, num_inputs, name)


@partial(jax.custom_jvp, nondiff_argnums=(2, 3))
def _quantized_product(x: Array, W: Array, num_inputs: int, name: str) -> Array:
    import qwix  # an optional dependency

    def quantize(factor: Array, channels: Sequence[int]) -> qwix.QArray:
        # Scales of 16 bits would round what they scale once more.
        return qwix.quantize(factor.astype(jnp.float32), _TYPES[name], channelwise_axes=channels)

    of_x, of_W = tuple(range(1, x.ndim)), tuple(range(num_inputs))
    outputs = tuple(range(num_inputs, W.ndim))
    y = qwix.dot_general(quantize(x, (0,)), quantize(W, outputs), ((of_x, of_W), ((), ())))
    return y.astype(jnp.result_type(x, W))


@_quantized_product.defjvp
def _straight_through(
    num_inputs: int, name: str, factors: tuple[Array, Array], changes: tuple[Array, Array]
) -> tuple[Array, Array]:
    (x, W), (dx, dW) = factors, changes
    dy = jnp.tensordot(dx, W, num_inputs) + jnp.tensordot(x, dW, num_inputs)
    return _quantized_product(x, W, num_inputs, name), dy
