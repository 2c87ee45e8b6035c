"""The product P e(t) for all times, and its derivative: each device on its own shard.

P of a kernel is T times the kernel; with its gradient and moments it is most of what a step touches
beside the activations. So both directions are written out, and neither moves it.
"""

from functools import partial
from math import gcd

import jax
import jax.numpy as jnp
from jax.experimental.layout import Layout, with_layout_constraint
from jax.sharding import PartitionSpec
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from t5x_diffeq.layers.mesh import axes_of, on_shards, spec_of

Axes = tuple[str | None, ...]
LANES = 128  # of a TPU's vector registers


@partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def contract(
    e: Float[Array, "N T"], P: Float[Array, "T ..."], axes: Axes, dtype: DTypeLike
) -> Float[Array, "N ..."]:
    """P e(t) for all times: a matrix product on each device's own shard of P.

    P goes into it as it is: a copy in 16 bits would stand until the backward pass needs it, and on
    a TPU so would a copy with its kernel's axes flattened, for they are tiled.

    P is sharded like the kernel that it makes, so nothing is communicated; backward, only the
    [N, T] sums for e(t) are. Under `shard_map`, because the backward pass flattens the kernel, and
    flattening one that is sharded on two axes would gather it.

    Args:
      e: time embeddings, float32.
      P: the projection.
      axes: logical axes of the kernel that P makes.
      dtype: of the result.
    """

    def product(e: Float[Array, "N T"], P: Float[Array, "T ..."]) -> Float[Array, "N ..."]:
        return jnp.tensordot(e, P, 1).astype(dtype)

    whole, shard = PartitionSpec(), kernel_spec(axes)
    return on_shards(product, (whole, shard), shard)(e, P)


def contract_forward(
    e: Float[Array, "N T"], P: Float[Array, "T ..."], axes: Axes, dtype: DTypeLike
) -> tuple[Float[Array, "N ..."], tuple[Array, Array]]:
    """`contract`, and what its backward pass needs."""
    return contract(e, P, axes, dtype), (e, P)


def contract_backward(
    axes: Axes, dtype: DTypeLike, inputs: tuple[Array, Array], dW: Float[Array, "N ..."]
) -> tuple[Float[Array, "N T"], Float[Array, "T ..."]]:
    """dP = e^T dW, and de = dW P^T summed over the shards; both in float32."""
    spec = kernel_spec(axes)
    mesh_axes = [axis for entry in spec for axis in axes_of(entry)]

    def products(
        e: Float[Array, "N T"], P: Float[Array, "T ..."], dW: Float[Array, "N ..."]
    ) -> tuple[Float[Array, "N T"], Float[Array, "T ..."]]:
        flat = dW.reshape(dW.shape[0], -1)
        dP = jnp.matmul(e.T.astype(dtype), flat, preferred_element_type=jnp.float32)
        de = long_contraction(flat, P.reshape(P.shape[0], -1))
        dP = as_at_rest(dP.reshape(P.shape))
        return jax.lax.psum(de, mesh_axes) if mesh_axes else de, dP

    whole = PartitionSpec()
    return on_shards(products, (whole, spec, spec), (whole, spec))(*inputs, dW)


def long_contraction(dW: Float[Array, "N size"], P: Float[Array, "T size"]) -> Float[Array, "N T"]:
    """dW P^T in float32: both factors are far longer than wide.

    The CPU's matrix product is four times slower on these than on their slices that fit its cache.
    """

    def product(dW: Float[Array, "N size"], P: Float[Array, "T size"]) -> Float[Array, "N T"]:
        return jnp.einsum("ns,ts->nt", dW, P, preferred_element_type=jnp.float32)

    def by_slices(dW: Float[Array, "N size"], P: Float[Array, "T size"]) -> Float[Array, "N T"]:
        slices = gcd(dW.shape[1], 64)
        size = dW.shape[1] // slices

        def of_slice(n: Array) -> Float[Array, "N T"]:
            return product(*(jax.lax.dynamic_slice_in_dim(x, n * size, size, 1) for x in (dW, P)))

        return jax.lax.map(of_slice, jnp.arange(slices)).sum(0)

    return jax.lax.platform_dependent(dW, P, cpu=by_slices, default=product)


def as_at_rest(dP: Float[Array, "T ..."]) -> Float[Array, "T ..."]:
    """dP in the layout that P has at rest.

    Else the TPU's compiler updates P and both moments in the layout of the product, and copies all
    three back: for Llama-1B on 64 chips of v5p, 5 ms of a step. P lies in order of its axes, unless
    the last is narrower than a TPU's lanes; then the choice stays the compiler's.
    """
    if dP.shape[-1] % LANES:
        return dP

    def as_it_is(dP: Float[Array, "T ..."]) -> Float[Array, "T ..."]:
        return dP

    def constrained(dP: Float[Array, "T ..."]) -> Float[Array, "T ..."]:
        return with_layout_constraint(dP, Layout(tuple(range(dP.ndim))))

    return jax.lax.platform_dependent(dP, tpu=constrained, default=as_it_is)


contract.defvjp(contract_forward, contract_backward)


def projection_square(e: Float[Array, "N T"], dW: Float[Array, "N ..."]) -> Float[Array, ""]:
    """|dP|^2 for dP = e^T dW, that is <e e^T, dW dW^T>: from two `[N, N]` matrices, without dP."""
    e = e.astype(dW.dtype).astype(jnp.float32)
    kernel = tuple(range(1, dW.ndim))
    gram = jax.lax.dot_general(
        dW, dW, ((kernel, kernel), ((), ())), preferred_element_type=jnp.float32
    )
    return jnp.sum((e @ e.T) * gram)


def kernel_spec(axes: Axes) -> PartitionSpec:
    """How a stack `[N or T, *kernel]` is laid out: whole on its first axis, then as the kernel."""
    return PartitionSpec(None, *spec_of(axes))
