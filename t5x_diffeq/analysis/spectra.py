"""Eigenvalues of attention's and the MLP's products over depth (paper, section 5.1, appendix E).

    QK   W_Q W_K^T   which tokens attend to which: x_i^T W_Q W_K^T x_j is a score before 1 / sqrt(G)
    OV   W_V W_O     what is moved: positive eigenvalues copy, negative ones repel
    MLP  W_up W_down

States are rows, y W. Biases, the scales of the preceding norms, and a gated MLP's gate are left
out. With rotary positions, QK is the interaction of tokens at the same position. The eigenvalues
are complex in general, and are kept complex.

Another block names its own products (`Block.spectral_factors`).

QK and OV are `[D, D]` of rank G, the width of a head. A B and B A have the same nonzero
eigenvalues, so the `[G, G]` product in the other order has all of them.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Complex, Float

from t5x_diffeq.model.block import Block, Matrices
from t5x_diffeq.model.config import ModelConfig
from t5x_diffeq.model.language_model import make_source
from t5x_diffeq.model.layers.array_types import Weights
from t5x_diffeq.model.ode.solvers import grid
from t5x_diffeq.model.sub_fields import need_methods
from t5x_diffeq.system.errors import InputError

_TITLES = {"qk": "W_Q W_K^T", "ov": "W_V W_O", "mlp": "W_up W_down"}
# By the name of the product: eigenvalues by decreasing magnitude, at N times or layers. Attention's
# products have an axis of heads (query heads, of which several may share a key head).
Spectra = dict[str, Complex[np.ndarray, "..."]]  # [times, M] or [times, heads, M]


def title_of(product: str) -> str:
    """How a product is written: `W_Q W_K^T` for qk; another block's product by its name there."""
    return _TITLES.get(product, product)


def by_head(by_kind: Spectra) -> Spectra:
    """The spectra that have an axis of heads."""
    return {kind: values for kind, values in by_kind.items() if values.ndim == 3}


def spectra(block: Block, weights: Weights) -> Spectra:
    """The spectra of stacked weights, in float64 on the host.

    Args:
      weights: the block's tree with leaves `[N, ...]`, from `LanguageModel.weights` or
        `weights_at`. Weights and eigenvalues are dimensionless.

    Raises:
      InputError: if a weight is not finite, or the block names no products.
    """
    W = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), weights)
    if not all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(W)):
        raise InputError("some weights are not finite; take an earlier checkpoint")
    need_methods(block.config, ("spectral_factors",))
    factors = block.spectral_factors(W).items()
    return {kind: eigenvalues(smaller_product(A, B)) for kind, (A, B) in factors}


def weights_at(config: ModelConfig, params: dict, times: Float[Array, " times"]) -> Weights:
    """W(t) at any times in [0, 1]: a block's tree with leaves `[N, ...]`.

    The weights of a model trained on one grid are meaningful only at that grid's nodes.

    Args:
      times: times in units of the whole depth.

    Raises:
      InputError: if the weights are per-layer and their grid doesn't have these times.
    """
    source = make_source(config, parent=None)
    apply = jax.jit(lambda params, times: source.apply({"params": params}, times))
    return apply(params["source"], jnp.asarray(times, jnp.float32))


def smaller_product(
    A: Float[Matrices, "times *many D F"], B: Float[Matrices, "times *many F D"]
) -> Float[Matrices, "times *many M M"]:
    """A B or B A, whichever is smaller: their nonzero eigenvalues are the same."""
    return A @ B if A.shape[-2] <= A.shape[-1] else B @ A


def eigenvalues(A: Float[np.ndarray, "... M M"]) -> Complex[np.ndarray, "... M"]:
    """The eigenvalues of each matrix, by decreasing magnitude.

    Of a complex conjugate pair, the one with the positive imaginary part comes first. Rounded
    magnitudes are compared, so that pairs stay together.
    """
    values = np.linalg.eigvals(A).astype(np.complex128)
    size = np.abs(values)
    scale = np.maximum(size.max(-1, keepdims=True), np.finfo(float).tiny)
    order = np.lexsort((-values.imag, -np.round(size / scale, 12)), axis=-1)
    return np.take_along_axis(values, order, axis=-1)


def magnitude(values: Complex[np.ndarray, "*rest M"]) -> Float[np.ndarray, "*rest"]:
    """The mean of |lambda|."""
    return np.abs(values).mean(-1)


def positive_fraction(values: Complex[np.ndarray, "*rest M"]) -> Float[np.ndarray, "*rest"]:
    """The fraction of the eigenvalues whose real part is positive."""
    return (values.real > 0).mean(-1)


def copying_score(values: Complex[np.ndarray, "*rest M"]) -> Float[np.ndarray, "*rest"]:
    """sum lambda / sum |lambda|, from -1 to 1: 1 if all are positive (Elhage et al. 2021)."""
    total = np.abs(values).sum(-1)
    return values.sum(-1).real / np.where(total > 0, total, 1)


def growth(values: Complex[np.ndarray, "times *rest"]) -> dict[str, float]:
    """How magnitudes change over depth, to compare with the paper's claim that they grow.

    Returns:
      `first`, `last`: mean |lambda| over the first and the last third of the depth (at least one
        time); `ratio`: of the two; `rank_correlation`: Spearman's, of mean |lambda| with depth;
        `radius_ratio`: the same ratio for the largest |lambda|.
    """
    flat = np.abs(values).reshape(len(values), -1)
    third = max(len(flat) // 3, 1)
    means, radii = flat.mean(-1), flat.max(-1)
    first, last = means[:third].mean(), means[-third:].mean()
    return {
        "first": float(first),
        "last": float(last),
        "ratio": float(last / first) if first else 1.0,
        "rank_correlation": rank_correlation(means, np.arange(float(len(means)))),
        "radius_ratio": float(radii[-third:].mean() / radii[:third].mean()) if first else 1.0,
    }


def rank_correlation(x: Float[np.ndarray, " n"], y: Float[np.ndarray, " n"]) -> float:
    """Spearman's rank correlation; 0 if one is constant or they are too short."""
    if len(x) < 2 or np.ptp(x) == 0 or np.ptp(y) == 0:
        return 0.0
    from scipy.stats import spearmanr  # here because that takes a second

    return float(spearmanr(x, y).statistic)


def roughness(config: ModelConfig, params: dict) -> float:
    """How far W(t) is from straight lines between neighbouring nodes, halfway between them.

    It is measured in half the distance between the nodes, root mean square over all weights: 0 if
    W(t) is straight or constant, sqrt(3) if each time has weights of its own.
    """
    nodes = np.unique(grid(config.scheme, config.num_steps))
    times = np.sort(np.concatenate((nodes, (nodes[1:] + nodes[:-1]) / 2)))
    off, apart = 0.0, 0.0
    for leaf in jax.tree.leaves(weights_at(config, params, jnp.asarray(times, jnp.float32))):
        W = np.asarray(leaf, np.float64)
        off += np.square(W[1::2] - (W[2::2] + W[:-1:2]) / 2).sum()
        apart += np.square((W[2::2] - W[:-1:2]) / 2).sum()
    return float(np.sqrt(off / apart)) if apart else 0.0
