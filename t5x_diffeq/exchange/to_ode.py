"""Turns a per-layer model into a neural ODE that computes, or approximates, the same on its grid.

The classical residual block is a step of Lie-Trotter with dt = 1. With dt = 1/N it is the same if
what writes to the residual stream, the last linears of attention and MLP with their biases, is N
times as large. The layers are then values of W(t) at t_n = n/N:

    kernel(t) = W0 + P e(t)      bias(t) = P e(t)      scale(t) = 1 + P e(t)

P and W0 are least-squares solutions in float64, and e(t) is a table of its values at the nodes. If
T is at least N, any table of orthogonal rows will do, and the layers are met exactly. If it is
less, only the span of e matters. For a kernel the best is that of the T largest left singular
vectors of `[N, kernel]`, centred over layers: this is the truncated SVD (Eckart and Young 1936). A
leaf without W0 is not centred. Leaves that share an e(t) share its span, that of the largest
eigenvectors of the sum of their Gram matrices. Errors are Frobenius norms; where all leaves share
one e(t), each counts by its relative error.
"""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import replace

import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict
from jaxtyping import Float
from scipy.fft import dct

from t5x_diffeq.exchange.layouts import LeafPath, declared_leaves
from t5x_diffeq.models.config import ModelConfig
from t5x_diffeq.ode.weights import OFFSET
from t5x_diffeq.runtime.config import ModelKeys

Matrix = Float[np.ndarray, "_ _"]
_LEAST_SHARE = 0.1  # of the constant in the direction that e leaves out; see `_with_constants`


def ode_keys(layers: ModelKeys, width: int | None) -> ModelKeys:
    """`config.model` of the ODE.

    Args:
      layers: `config.model` of the per-layer model.
      width: T; None for the number of layers.
    """
    return replace(
        layers,
        weights="time_dependent",
        step_size="1/N",
        time_embed_dim=layers.num_steps if width is None else width,
        attention_time_embed_dim=None,
        time_basis=f"table:{layers.num_steps}",
        init="invariant",
    )


def to_ode(config: ModelConfig, params: dict) -> tuple[dict, dict[str, float]]:
    """Parameters of the ODE from those of the per-layer model, and the relative errors.

    Args:
      config: config of the ODE.
      params: parameters of the per-layer model; its stacked weights are removed, leaf by leaf.

    Returns:
      The parameters; and the relative error by the name of a linear or norm, and of all kernels.
    """
    layers, declared = flatten_dict(params["source"]["weights"]), declared_leaves(config)
    del params["source"]
    common = config.time_embedding == "common"
    groups: defaultdict[LeafPath, list[LeafPath]] = defaultdict(list)
    for path in layers:
        groups[() if common else (".".join(path[:-1]),)].append(path)

    def wanted(path: LeafPath) -> tuple[Matrix, bool]:
        """What P and W0 have to make, `[N, entries]` in float64; and whether there is a W0."""
        leaf, flat = declared[path], layers[path].reshape(config.num_steps, -1)
        scale = config.num_steps if leaf.writes_residual else 1
        return flat.astype(np.float64) * scale - OFFSET[leaf.role], leaf.role == "kernel"

    source: dict[LeafPath, np.ndarray] = {}
    squares: defaultdict[str, np.ndarray] = defaultdict(lambda: np.zeros(2))  # error and leaf
    for name, paths in groups.items():
        table = _table(map(wanted, paths), config.num_steps, config.time_embed_dim, common)
        source[*name, "time_embedding", "coefficients"] = table
        for path in paths:
            leaf, has_base = wanted(path)
            shape, key = layers.pop(path).shape[1:], (".".join(path[:-1]), path[-1])
            P, base = _fit(leaf, table.astype(np.float64), has_base)
            source[key] = P.reshape(-1, *shape).astype(np.float32)
            if has_base:
                source[key[0], f"{key[1]}_base"] = base.reshape(shape).astype(np.float32)
            error = np.square(leaf - base - table @ P).sum()
            error_and_leaf = error, np.square(leaf + OFFSET[declared[path].role]).sum()
            for kind in ("all kernels", path[-2]) if has_base else (" ".join(path[-2:]),):
                squares[kind] += error_and_leaf
    errors = {kind: (error / (of_leaf or 1)) ** 0.5 for kind, (error, of_leaf) in squares.items()}
    return {**params, "source": unflatten_dict(source)}, errors


def _fit(
    leaf: Matrix, table: Float[np.ndarray, "N T"], has_base: bool
) -> tuple[Float[np.ndarray, "T _"], Float[np.ndarray, " _"]]:
    """P and W0 of least squares; W0 is zero where there is none."""
    middle, means = (x.mean(0) if has_base else np.zeros(x.shape[1]) for x in (leaf, table))
    P = np.linalg.pinv(table - means) @ (leaf - middle)
    return P, middle - means @ P


# ------------------------------------------------------------------------------- e at the nodes


def _table(
    leaves: Iterable[tuple[Matrix, bool]], num_nodes: int, width: int, by_relative_error: bool
) -> Float[np.ndarray, "N T"]:
    """e at the nodes: T columns of about unit mean square, float32.

    Args:
      leaves: those that share e, as `[N, entries]`, and whether they have a W0.
      num_nodes: N.
      width: T.
      by_relative_error: whether each leaf counts by its relative error.
    """
    if width >= num_nodes:
        return (np.sqrt(width) * dct(np.eye(width), norm="ortho")[:num_nodes]).astype(np.float32)
    with_base, without_base = np.zeros((2, num_nodes, num_nodes))
    for leaf, has_base in leaves:
        gram = leaf @ leaf.T
        if by_relative_error:
            gram /= np.trace(_centre(gram) if has_base else gram) or 1
        if has_base:
            with_base += gram
        else:
            without_base += gram
    if not with_base.any():
        span = _eigenvectors(without_base)[:, ::-1][:, :width]
    else:
        centred = _centre(with_base + without_base)
        # The constant comes last, also where other eigenvalues are zero.
        centred -= (1 + np.trace(centred)) / num_nodes
        span = _with_constants(_eigenvectors(centred)[:, ::-1][:, :width], without_base)
    return (np.sqrt(num_nodes) * span).astype(np.float32)


def _centre(gram: Matrix) -> Matrix:
    """The Gram matrix of the centred leaf."""
    return gram - gram.mean(0) - gram.mean(1)[:, None] + gram.mean()


def _eigenvectors(gram: Matrix) -> Matrix:
    """As columns, that of the smallest eigenvalue first."""
    return np.linalg.eigh(gram)[1]


def _with_constants(span: Float[np.ndarray, "N T"], gram: Matrix) -> Float[np.ndarray, "N T"]:
    """T vectors in the span of these and the constant, chosen for the leaves without W0.

    Constants in e don't change a kernel, which has W0. The one direction that is left out is where
    the other leaves are smallest. It has a part along the constant, so that the kept ones still
    span all for the kernels.

    Args:
      span: T orthonormal vectors, orthogonal to the constant.
      gram: the sum of the Gram matrices of the leaves without W0.
    """
    num_nodes = len(span)
    whole = np.column_stack((np.full(num_nodes, num_nodes**-0.5), span))
    left_out = _eigenvectors(whole.T @ gram @ whole)[:, 0]
    if abs(left_out[0]) < _LEAST_SHARE:
        rest = left_out[1:] * np.copysign(1, left_out[0]) / np.linalg.norm(left_out[1:])
        left_out = np.append(_LEAST_SHARE, (1 - _LEAST_SHARE**2) ** 0.5 * rest)
    return whole @ np.linalg.svd(left_out[None])[2][1:].T
