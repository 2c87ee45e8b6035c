"""How W(t) moves over depth, small enough to be drawn while a model trains.

A kernel at all nodes is a path of N points, and its shape follows from the points' inner products.
These, and the products whose eigenvalues are drawn, are computed where the weights are, so that
only small arrays reach the host. All processes must take part.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from flax.traverse_util import flatten_dict
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Float, Int

from t5x_diffeq.analysis.spectra import smaller_product
from t5x_diffeq.model.language_model import LanguageModel, nodes
from t5x_diffeq.model.layers.array_types import Weights
from t5x_diffeq.model.sub_fields import has_method, make_block
from t5x_diffeq.system.console import log

_NODES, _HEADS = 12, 4  # at most so many of each have their eigenvalues drawn
_LARGEST = 128  # width of a matrix whose eigenvalues are computed

Products = dict[str, Float[Array, "..."]]  # [nodes, M, M] or [nodes, heads, M, M], by name


@dataclass(frozen=True)
class WeightPaths:
    """Inner products of kernels at all nodes, and some products of kernels at some nodes."""

    times: Float[np.ndarray, " nodes"]  # the nodes' times, in [0, 1]
    inner: dict[str, Float[np.ndarray, "nodes nodes"]]  # by kernel, <W(t_n), W(t_m)>
    # by kernel, the same after the mean over the nodes is subtracted
    centred: dict[str, Float[np.ndarray, "nodes nodes"]]
    product_times: Float[np.ndarray, " some"]  # the times of `products`
    # matrices with the eigenvalues that `spectra` computes, by name
    products: dict[str, Float[np.ndarray, "..."]]
    heads: dict[str, Int[np.ndarray, " heads"]]  # the indices of the heads in a product with heads


def make_weight_paths(
    model: LanguageModel, mesh: Mesh, times: Float[np.ndarray, " nodes"] | None = None
) -> Callable[[dict], WeightPaths]:
    """The function from parameters to their `WeightPaths`; call it within the mesh's context.

    With `times`, W(t) is read at these times in place of the nodes.
    """
    times = nodes(model.config) if times is None else times
    chosen = evenly(len(times), _NODES)
    compute = jax.jit(
        partial(_compute, model, times, chosen), out_shardings=NamedSharding(mesh, PartitionSpec())
    )

    def weight_paths(params: dict) -> WeightPaths:
        inner, centred, (products, heads) = jax.device_get(compute(params))
        return WeightPaths(times, inner, centred, times[chosen], products, heads)

    return weight_paths


def evenly(count: int, most: int) -> list[int]:
    """At most `most` of the indices below `count`, evenly spaced, the first and last included."""
    return sorted({round(i) for i in np.linspace(0, count - 1, min(count, most))})


def _compute(
    model: LanguageModel, times: Float[np.ndarray, " nodes"], chosen: list[int], params: dict
) -> tuple[dict, dict, tuple]:
    W = nn.apply(LanguageModel.merged_weights, model)({"params": params}, jnp.asarray(times))
    W = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), W)
    kernels = {
        "/".join(path).removesuffix("/kernel"): leaf
        for path, leaf in flatten_dict(W).items()
        if leaf.ndim > 2 and path[-1] != "bias"
    }
    inner = {name: _inner_products(leaf) for name, leaf in kernels.items()}
    # Centred before the product: if W(t) moves little, centring `inner` leaves rounding errors.
    centred = {name: _inner_products(leaf - leaf.mean(0)) for name, leaf in kernels.items()}
    return inner, centred, _products(model, jax.tree.map(lambda leaf: leaf[np.array(chosen)], W))


def _inner_products(W: Float[Array, "nodes ..."]) -> Float[Array, "nodes nodes"]:
    axes = tuple(range(1, W.ndim))
    # A TPU's default precision multiplies bfloat16.
    return jnp.tensordot(W, W, (axes, axes), precision=jax.lax.Precision.HIGHEST)


def _products(model: LanguageModel, W: Weights) -> tuple[Products, dict[str, Array]]:
    """The products that are small enough, and the chosen heads of products that have heads."""
    products: Products = {}
    heads: dict[str, Array] = {}
    if not has_method(model.config, "spectral_factors"):
        return products, heads
    try:
        factors = make_block(model.config).spectral_factors(W)
    except jax.errors.TracerArrayConversionError:  # of a user's block, written for NumPy alone
        log("warning: no spectra while training: the block's spectral_factors needs NumPy's arrays")
        return products, heads
    for name, (A, B) in factors.items():
        if min(A.shape[-2], A.shape[-1]) > _LARGEST:
            continue
        if A.ndim == 4:
            heads[name] = jnp.array(evenly(A.shape[1], _HEADS))
            A, B = A[:, heads[name]], B[:, heads[name]]
        with jax.default_matmul_precision("highest"):
            products[name] = smaller_product(A, B)
    return products, heads


def principal_path(
    centred: Float[np.ndarray, "nodes nodes"],
) -> tuple[Float[np.ndarray, "nodes components"], Float[np.ndarray, " components"]]:
    """The first two principal components of W(t) over the nodes, from its centred inner products.

    Returns:
      each node's coordinates, and the share of the variance along each component.
    """
    values, vectors = np.linalg.eigh(np.asarray(centred, np.float64))
    values = np.maximum(values[::-1][:2], 0)
    total = max(np.trace(np.asarray(centred, np.float64)), np.finfo(float).tiny)
    return vectors[:, ::-1][:, :2] * np.sqrt(values), values / total


def cosines(inner: Float[np.ndarray, "nodes nodes"]) -> Float[np.ndarray, "nodes nodes"]:
    """The cosines between the kernel at any two nodes; 0 where the kernel is zero."""
    norms = np.sqrt(np.maximum(np.diag(np.asarray(inner, np.float64)), 0))
    scale = np.outer(norms, norms)
    return np.divide(inner, scale, out=np.zeros_like(scale), where=scale > 0)
