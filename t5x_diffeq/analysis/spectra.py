"""Eigenvalues of attention's and the MLP's products over depth (paper, section 5.1, appendix E).

    QK   W_Q W_K^T   which tokens attend to which: x_i^T W_Q W_K^T x_j is a score before 1 / sqrt(G)
    OV   W_V W_O     what is moved: positive eigenvalues copy, negative ones repel
    MLP  W_up W_down

States are rows, y W. Biases, the scales of the preceding norms, and a gated MLP's gate are left
out. With rotary positions, QK is the interaction of tokens at the same position. The eigenvalues
are complex in general, and are kept complex.

QK and OV are `[D, D]` of rank G, the width of a head. A B and B A have the same nonzero
eigenvalues, so those of the `[G, G]` product in the other order are all of them.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Complex, Float

from t5x_diffeq.array_types import Weights
from t5x_diffeq.models.config import ModelConfig
from t5x_diffeq.models.language_model import make_source
from t5x_diffeq.runtime.errors import InputError

PRODUCTS = {"qk": "W_Q W_K^T", "ov": "W_V W_O", "mlp": "W_up W_down"}


@dataclass(frozen=True)
class Spectra:
    """Eigenvalues by decreasing magnitude, at N times or layers.

    Attributes:
      qk: those of W_Q W_K^T, for each query head (which may share its key head).
      ov: those of W_V W_O, for each query head.
      mlp: those of W_up W_down, the min(D, F) largest.
    """

    qk: Complex[np.ndarray, "times H G"]
    ov: Complex[np.ndarray, "times H G"]
    mlp: Complex[np.ndarray, "times M"]


def spectra(weights: Weights) -> Spectra:
    """The spectra of stacked weights, in float64 on the host.

    Args:
      weights: tree of GPT's or Llama's block with leaves `[N, ...]`, from `LanguageModel.weights`
        or `weights_at`. Weights and eigenvalues are dimensionless.

    Raises:
      InputError: if a weight is not finite.
    """
    W = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), weights)
    if not all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(W)):
        raise InputError("some weights are not finite; take an earlier checkpoint")
    query, key, value = _split_heads(W["attention"])
    output = W["attention"]["output"]["kernel"]
    return Spectra(
        qk=eigenvalues(np.einsum("ndhg,ndhe->nhge", key, query)),
        ov=eigenvalues(np.einsum("nhgd,ndhe->nhge", output, value)),
        mlp=eigenvalues(_smaller_product(W["mlp"]["up"]["kernel"], W["mlp"]["down"]["kernel"])),
    )


def weights_at(config: ModelConfig, params: dict, times: Float[Array, " times"]) -> Weights:
    """W(t) at any times in [0, 1]: a block's tree with leaves `[N, ...]`.

    The weights of a model trained on one grid are meaningful only at that grid's nodes.

    Args:
      config: config of the model, with time-dependent or shared weights.
      params: parameters of the model.
      times: times in units of the whole depth.

    Raises:
      InputError: if the weights are per-layer and their grid doesn't have these times.
    """
    source = make_source(config, parent=None)
    apply = jax.jit(lambda params, times: source.apply({"params": params}, times))
    return apply(params["source"], jnp.asarray(times, jnp.float32))


def _split_heads(attention: dict) -> tuple[Float[np.ndarray, "times D H G"], ...]:
    """W_Q, W_K and W_V by query head, from one fused linear (GPT) or three (Llama)."""
    if "qkv" in attention:
        kernel = attention["qkv"]["kernel"]
        return kernel[:, :, 0], kernel[:, :, 1], kernel[:, :, 2]
    kernels = [attention[name]["kernel"] for name in ("query", "key", "value")]
    count = kernels[0].shape[2]
    return tuple(np.repeat(kernel, count // kernel.shape[2], axis=2) for kernel in kernels)


def _smaller_product(
    A: Float[np.ndarray, "times D F"], B: Float[np.ndarray, "times F D"]
) -> Float[np.ndarray, "times M M"]:
    return A @ B if A.shape[1] <= A.shape[2] else B @ A


def eigenvalues(A: Float[np.ndarray, "... M M"]) -> Complex[np.ndarray, "... M"]:
    """The eigenvalues of each matrix by decreasing magnitude, of a pair the upper one first.

    Rounded magnitudes are compared, so that complex conjugate pairs stay together.
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
        "rank_correlation": _rank_correlation(means),
        "radius_ratio": float(radii[-third:].mean() / radii[:third].mean()) if first else 1.0,
    }


def _rank_correlation(x: Float[np.ndarray, " times"]) -> float:
    """Spearman's rank correlation of a sequence with its index; 0 if constant or too short."""
    if len(x) < 2 or np.ptp(x) == 0:
        return 0.0
    from scipy.stats import spearmanr  # here because that takes a second

    return float(spearmanr(x, np.arange(len(x))).statistic)
