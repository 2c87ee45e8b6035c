"""Computes W0 + P e(t) for all times, and its gradient; each device has its own shard.

The P of a kernel is T times as large as the kernel. With its gradient and Adam's moments it is most
of what an optimizer step touches besides the activations. So both passes are written by hand, and
neither moves P between devices.
"""

from functools import partial
from math import gcd

import jax
import jax.numpy as jnp
from jax.experimental.layout import Layout, with_layout_constraint
from jax.sharding import PartitionSpec
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from t5x_diffeq.model.layers.mesh import axes_of, on_shards, spec_of

Axes = tuple[str | None, ...]
E = Float[Array, "nodes T"]
Projection = Float[Array, "T ..."]
_Kernel = Float[Array, "..."]
Kernels = Float[Array, "nodes ..."]
Flat = Float[Array, "nodes size"]
_LANES = 128  # width of a TPU's vector registers


@partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def contract(
    e: E, P: Projection, axes: Axes, dtype: DTypeLike, W0: _Kernel | None = None
) -> Kernels:
    """W0 + P e(t) for all times: a matrix product on each device's own shard of P.

    The sum is rounded to `dtype` once: rounding is the same for all tokens, so its effect on the
    gradient doesn't average out over them.

    P is neither cast nor reshaped first, because a copy would stay in memory until the backward
    pass. Flattening the kernel's axes makes a copy, too, on a TPU, whose arrays are tiled.

    P is sharded like the kernel that it makes, so the forward pass communicates nothing, and the
    backward pass only the [nodes, T] sums for e(t). Both run under `shard_map`, because the
    backward pass flattens the kernel, and automatic sharding would gather a kernel that is sharded
    over two axes to flatten it.

    Args:
      axes: logical axes of the kernel that P makes.
      W0: the kernel that is added, float32; None: nothing is added.
    """

    def product(e: E, P: Projection, W0: _Kernel | None) -> Kernels:
        change = jnp.tensordot(e, P, 1)
        return (change if W0 is None else W0 + change).astype(dtype)

    replicated, stacked_spec = PartitionSpec(), _stacked_spec(axes)
    kernel_spec = PartitionSpec(*spec_of(axes))
    return on_shards(product, (replicated, stacked_spec, kernel_spec), stacked_spec)(e, P, W0)


def _contract_forward(
    e: E, P: Projection, axes: Axes, dtype: DTypeLike, W0: _Kernel | None
) -> tuple[Kernels, tuple[E, Projection, _Kernel | None]]:
    return contract(e, P, axes, dtype, W0), (e, P, W0)


def _contract_backward(
    axes: Axes, dtype: DTypeLike, inputs: tuple[E, Projection, _Kernel | None], dW: Kernels
) -> tuple[E, Projection, _Kernel | None]:
    """dP = e^T dW, de = dW P^T summed over the shards, and dW0, the sum of dW; all in float32."""
    replicated, stacked_spec = PartitionSpec(), _stacked_spec(axes)
    kernel_spec = PartitionSpec(*spec_of(axes))
    mesh_axes = [axis for entry in stacked_spec for axis in axes_of(entry)]

    def products(e: E, P: Projection, dW: Kernels) -> tuple[E, Projection, _Kernel]:
        flat = dW.reshape(dW.shape[0], -1)
        dP = jnp.matmul(e.astype(dtype).T, flat, preferred_element_type=jnp.float32)
        dP = _lay_out_as_at_rest(dP.reshape(e.shape[1], *dW.shape[1:]))
        de = _contract_long_axis(flat, P.reshape(P.shape[0], -1))
        de = jax.lax.psum(de, mesh_axes) if mesh_axes else de
        return de, dP, dW.sum(0, dtype=jnp.float32)

    e, P, W0 = inputs
    in_specs = (replicated, stacked_spec, stacked_spec)
    sharded_products = on_shards(products, in_specs, (replicated, stacked_spec, kernel_spec))
    de, dP, dW0 = sharded_products(e, P, dW)
    return de, dP, None if W0 is None else dW0


def _contract_long_axis(dW: Flat, P: Float[Array, "T size"]) -> E:
    """dW P^T in float32, where both factors are far longer than wide.

    On CPU this product is four times slower on whole factors than on slices that fit the cache.
    """

    def product(dW: Flat, P: Float[Array, "T size"]) -> E:
        return jnp.einsum("ns,ts->nt", dW, P, preferred_element_type=jnp.float32)

    def by_slices(dW: Flat, P: Float[Array, "T size"]) -> E:
        slices = gcd(dW.shape[1], 64)
        size = dW.shape[1] // slices

        def slice_product(n: Array) -> E:
            return product(*(jax.lax.dynamic_slice_in_dim(x, n * size, size, 1) for x in (dW, P)))

        return jax.lax.map(slice_product, jnp.arange(slices)).sum(0)

    return jax.lax.platform_dependent(dW, P, cpu=by_slices, default=product)


def _lay_out_as_at_rest(dP: Projection) -> Projection:
    """dP in the layout that P has at rest.

    Otherwise the TPU compiler updates P and both moments in the layout of the product and copies
    all three back: 5 ms of an optimizer step for Llama-1B on 64 v5p chips. P at rest is laid out in
    the order of its axes, unless its last axis doesn't fill a TPU's lanes evenly; then the compiler
    chooses the layout, and nothing is constrained here.
    """
    if dP.shape[-1] % _LANES:
        return dP

    def unconstrained(dP: Projection) -> Projection:
        return dP

    def constrained(dP: Projection) -> Projection:
        return with_layout_constraint(dP, Layout(tuple(range(dP.ndim))))

    return jax.lax.platform_dependent(dP, tpu=constrained, default=unconstrained)


contract.defvjp(_contract_forward, _contract_backward)


def projection_square(e: E, dW: Kernels) -> Float[Array, ""]:
    """|dP|^2 for dP = e^T dW, as <e e^T, dW dW^T>: from `[nodes, nodes]` matrices, without dP."""
    # e is rounded as in the product that makes dP, so that both have the same norm.
    e = e.astype(dW.dtype).astype(jnp.float32)
    kernel = tuple(range(1, dW.ndim))
    products = ((kernel, kernel), ((), ()))
    gram = jax.lax.dot_general(dW, dW, products, preferred_element_type=jnp.float32)
    return jnp.sum((e @ e.T) * gram)


def _stacked_spec(axes: Axes) -> PartitionSpec:
    """The spec of `[nodes or T, *kernel]`: the first axis unsharded, the others as the kernel's."""
    return PartitionSpec(None, *spec_of(axes))
