"""The best approximation of N layers by an ODE whose time embedding has T < N entries.

    kernel(t_n) = W0 + P e(t_n)      bias(t_n) = P e(t_n)      scale(t_n) = 1 + P e(t_n)

Only the span of e at the nodes matters, because P and W0 are least-squares solutions. For a kernel,
the best span is that of the T largest left singular vectors of `[N, kernel]`, centred over layers:
this is the truncated SVD (Eckart and Young 1936). A leaf without W0 is not centred. Leaves that
share an e(t) share its span: it is that of the T largest eigenvectors of the sum of their Gram
matrices. In a linear with a bias, constants added to the entries of e don't change the kernel,
which has W0, so they are chosen for the bias.

Errors are Frobenius norms; no entry of a leaf counts more than another. Within one linear or norm,
leaves count by their own size; where all leaves share one e(t), each counts by its relative error.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict
from jaxtyping import Float

from t5x_diffeq.exchange.layouts import LeafPath, declared_leaves
from t5x_diffeq.exchange.time_basis import smooth_time_embedding
from t5x_diffeq.models.config import ModelConfig
from t5x_diffeq.ode.weights import OFFSET

Matrix = Float[np.ndarray, "_ _"]
_COLUMNS = 2**20  # entries per layer of a leaf that are in float64 at once
_LEAST_SHARE = 0.1  # of the constant in the direction that e leaves out; see `_with_constants`
_EMBEDDING = "time_embedding"  # its name in each generated layer, or beside all of them


@dataclass
class LeafFit:
    """How well a leaf of all layers is approximated; squares of Frobenius norms.

    Attributes:
      whole: of the leaf itself.
      reached: of the error.
      least: of the error of the best approximation of rank T of this leaf alone.
    """

    whole: float
    reached: float
    least: float


@dataclass(frozen=True)
class _Leaf:
    """What the fit needs of a leaf of all layers, `wanted = scale * values - offset`.

    Attributes:
      values: `[N, ...]`.
      scale: the factor on the values.
      offset: the value of the leaf where P and W0 contribute nothing.
      has_base: whether there is a W0.
    """

    values: Float[np.ndarray, "N ..."]
    scale: float
    offset: float
    has_base: bool

    def blocks(self) -> Iterable[Matrix]:
        """`wanted` as `[N, columns]` in float64, some columns at a time."""
        flat = self.values.reshape(len(self.values), -1)
        for start in range(0, flat.shape[1], _COLUMNS):
            yield flat[:, start : start + _COLUMNS].astype(np.float64) * self.scale - self.offset

    def gram(self) -> Matrix:
        """`wanted wanted^T`, which is `[N, N]`."""
        return sum((block @ block.T for block in self.blocks()), start=np.zeros(()))


def fit_layers(config: ModelConfig, params: dict) -> tuple[dict, dict[LeafPath, LeafFit]]:
    """Parameters of the ODE from those of the per-layer model, and how well each leaf is fitted.

    Args:
      config: config of the ODE, with T less than the number of layers.
      params: parameters of the per-layer model; its stacked weights are removed, leaf by leaf.
    """
    layers = flatten_dict(params["source"]["weights"])
    del params["source"]
    leaves = {path: _leaf_of(config, path, values) for path, values in layers.items()}
    grams = {path: leaf.gram() for path, leaf in leaves.items()}
    shared = config.time_embedding == "common"
    groups: defaultdict[tuple[str, ...], list[LeafPath]] = defaultdict(list)
    for path in leaves:
        groups[() if shared else (".".join(path[:-1]),)].append(path)
    source: dict[tuple[str, ...], np.ndarray] = {}
    fits: dict[LeafPath, LeafFit] = {}
    for name, paths in groups.items():
        of_group = [(grams[path], leaves[path].has_base) for path in paths]
        span = _best_span(of_group, config.time_embed_dim, by_relative_error=shared)
        embedding, at_nodes = smooth_time_embedding(span, config.num_frequencies, config.time_scale)
        source |= {(*name, _EMBEDDING, key): value for key, value in embedding.items()}
        for path in paths:
            leaf, layer = leaves.pop(path), ".".join(path[:-1])
            layers.pop(path)
            fits[path] = _measure(grams[path], leaf, at_nodes)
            source[layer, path[-1]], base = _solve(leaf, at_nodes)
            if base is not None:
                source[layer, f"{path[-1]}_base"] = base
    return {**params, "source": unflatten_dict(source)}, fits


def _leaf_of(config: ModelConfig, path: LeafPath, values: Float[np.ndarray, "N ..."]) -> _Leaf:
    declared = declared_leaves(config)[path]
    scale = config.num_steps if declared.writes_residual else 1
    return _Leaf(values, scale, OFFSET[declared.role], declared.role == "kernel")


# ------------------------------------------------------------------------------- the span of e


def _best_span(
    group: list[tuple[Matrix, bool]], width: int, by_relative_error: bool
) -> Float[np.ndarray, "N T"]:
    """Values of e at the nodes: T columns of unit mean square, about independent.

    Args:
      group: the Gram matrix of each leaf that shares e, and whether it has a W0.
      width: T.
      by_relative_error: whether each leaf counts by its relative error.
    """
    num_nodes = len(group[0][0])
    total, without_base = np.zeros((2, num_nodes, num_nodes))
    centred = any(has_base for _, has_base in group)
    for gram, has_base in group:
        power = np.trace(_centre(gram) if has_base else gram)
        weighted = gram / (power or 1) if by_relative_error else gram
        total += _centre(weighted) if centred else weighted
        without_base += 0 if has_base else weighted
    if centred:  # the constant last, also where other eigenvalues are zero
        total -= (1 + np.trace(total)) / num_nodes
    span = _largest(total, width)
    if centred and without_base.any():
        span = _with_constants(span, without_base)
    return np.sqrt(num_nodes) * span


def _centre(gram: Matrix) -> Matrix:
    """The Gram matrix of the centred leaf."""
    return gram - gram.mean(0) - gram.mean(1)[:, None] + gram.mean()


def _largest(gram: Matrix, count: int) -> Matrix:
    """The eigenvectors of the largest eigenvalues, as columns."""
    return np.linalg.eigh(gram)[1][:, ::-1][:, :count]


def _with_constants(span: Float[np.ndarray, "N T"], gram: Matrix) -> Float[np.ndarray, "N T"]:
    """T vectors in the span of these and the constant, chosen for the leaves without W0.

    T of the T + 1 directions are kept. The one left out is where those leaves are smallest. With
    the constant, the kept ones must still span all, for the kernels: so the direction left out has
    a part along the constant, of at least `_LEAST_SHARE` of its length. The bound also keeps the
    constants in e small (10 times the part that varies).

    Args:
      span: T orthonormal vectors, orthogonal to the constant.
      gram: the sum of the Gram matrices of the leaves without W0.
    """
    num_nodes = len(span)
    whole = np.column_stack((np.full(num_nodes, num_nodes**-0.5), span))
    of_leaves = whole.T @ gram @ whole

    def left_out(reward: float) -> Float[np.ndarray, " _"]:
        """The direction where the leaves, less a reward for the constant, are smallest."""
        rewarded = of_leaves.copy()
        rewarded[0, 0] -= reward
        return np.linalg.eigh(rewarded)[1][:, 0]

    out = left_out(0)
    if abs(out[0]) < _LEAST_SHARE:
        low, high = 0.0, 2 * float(np.trace(of_leaves))
        for _ in range(60):
            middle = (low + high) / 2
            enough = abs(left_out(middle)[0]) >= _LEAST_SHARE
            low, high = (low, middle) if enough else (middle, high)
        out = left_out(low)  # where eigenvalues cross, its share jumps from below the bound
        rest = out[1:] * np.copysign(1, out[0]) / np.linalg.norm(out[1:])
        out = np.append(_LEAST_SHARE, (1 - _LEAST_SHARE**2) ** 0.5 * rest)
    return whole @ np.linalg.svd(out[None])[2][1:].T


# ------------------------------------------------------------------------------- P, W0 and errors


def _solve(
    leaf: _Leaf, at_nodes: Float[np.ndarray, "N T"]
) -> tuple[Float[np.ndarray, "T ..."], Float[np.ndarray, "..."] | None]:
    """P and W0 of least squares, float32; no W0 for a leaf that has none."""
    shape, width = leaf.values.shape[1:], at_nodes.shape[1]
    P = np.empty((width, leaf.values[0].size), np.float32)
    base = np.empty(leaf.values[0].size, np.float32) if leaf.has_base else None
    means = at_nodes.mean(0) if leaf.has_base else np.zeros(width)
    inverse, start = np.linalg.pinv(at_nodes - means), 0
    for block in leaf.blocks():
        columns = slice(start, start := start + block.shape[1])
        rest = block - block.mean(0) if leaf.has_base else block
        solved = inverse @ rest
        P[:, columns] = solved
        if base is not None:
            base[columns] = block.mean(0) - means @ solved
    return P.reshape(width, *shape), None if base is None else base.reshape(shape)


def _measure(gram: Matrix, leaf: _Leaf, at_nodes: Float[np.ndarray, "N T"]) -> LeafFit:
    """The errors of `_solve`, which follow from the Gram matrix."""
    own = _centre(gram) if leaf.has_base else gram
    basis = at_nodes - at_nodes.mean(0) if leaf.has_base else at_nodes
    left = np.eye(len(gram)) - basis @ np.linalg.pinv(basis)
    reached = np.trace(left @ own @ left)
    least = np.linalg.eigvalsh(own)[::-1][at_nodes.shape[1] :].clip(0).sum()
    whole = sum(np.square(block + leaf.offset).sum() for block in leaf.blocks())
    return LeafFit(float(whole), max(0.0, float(reached)), float(least))


def errors_by_kind(fits: Mapping[LeafPath, LeafFit]) -> dict[str, tuple[float, float]]:
    """Relative errors, reached and least, by the name of a linear or norm, and of all `kernels`.

    A relative error is the root of the error's squares over that of the leaves' own.
    """
    kinds: defaultdict[str, list[LeafFit]] = defaultdict(list)
    for path, fit in fits.items():
        kinds[path[-2] if path[-1] == "kernel" else f"{path[-2]} {path[-1]}"].append(fit)
        if path[-1] == "kernel":
            kinds["all kernels"].append(fit)
    return {
        kind: tuple(
            (sum(getattr(fit, of) for fit in each) / (sum(f.whole for f in each) or 1)) ** 0.5
            for of in ("reached", "least")
        )
        for kind, each in sorted(kinds.items(), key=lambda item: item[0] == "all kernels")
    }
