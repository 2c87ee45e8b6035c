"""Results with labelled axes: states over time, and weights over time."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from flax.traverse_util import flatten_dict
from jaxtyping import Float, Shaped

from t5x_diffeq.model.layers.array_types import Weights

_MOST = 6  # times or tokens that are printed


class Trajectory(np.ndarray):
    """The states y(t) of a text's tokens: an array `[states, tokens, width]`.

    Slices of it, and results computed from it, are plain arrays without these attributes.

    Attributes:
      t: the times: 0, 1/N, ..., 1.
      tokens: the text of each token.
    """

    t: Float[np.ndarray, " states"] | None = None
    tokens: tuple[str, ...] = ()

    @classmethod
    def of(
        cls,
        states: Shaped[np.ndarray, "states L D"],
        t: Float[np.ndarray, " states"],
        tokens: Sequence[str],
    ) -> "Trajectory":
        """The states with the times and the texts of the tokens that they belong to."""
        labelled = states.view(cls)
        labelled.t, labelled.tokens = t, tuple(tokens)
        return labelled

    def __getitem__(self, index: Any) -> Any:
        return np.asarray(self)[index]

    def __repr__(self) -> str:
        if self.t is None:
            return repr(np.asarray(self))
        states, length, width = self.shape
        return (
            f"y(t): [t {states}, token {length}, width {width}], {self.dtype}\n"
            f"  t      {_shorten([f'{time:.3g}' for time in self.t])}\n"
            f"  token  {_shorten([repr(token) for token in self.tokens])}"
        )

    __str__ = __repr__


class WeightsOverTime(dict):
    """The weights W(t) as a tree of arrays, whose leading axis is time unless t is one number.

    JAX takes it as a tree, and a tree made of it (`jax.tree.map`) is a plain dict.

    Args:
      tree: the arrays.
      t: the times, or one.
      names: the logical axes of each leaf but the first, by its path.
    """

    def __init__(
        self,
        tree: Weights,
        t: float | Float[np.ndarray, " times"],
        names: Mapping[tuple[str, ...], Sequence[str | None]],
    ):
        super().__init__(tree)
        self.t, self._names = t, names

    @property
    def axes(self) -> dict[str, tuple[str | None, ...]]:
        """The name of each axis of each leaf, by the leaf's path; None: it has no name."""
        first = ("t",) if np.ndim(self.t) else ()
        return {
            "/".join(path): (
                *first,
                *self._names.get(path, (None,) * (leaf.ndim - len(first))),
            )
            for path, leaf in flatten_dict(dict(self)).items()
        }

    def __repr__(self) -> str:
        times = [f"{time:.3g}" for time in np.atleast_1d(self.t)]
        leaves, axes = flatten_dict(dict(self), sep="/"), self.axes
        wide = max(map(len, leaves))
        lines = [
            f"  {path:<{wide}}  [{_describe(axes[path], leaf.shape)}], {leaf.dtype}"
            for path, leaf in leaves.items()
        ]
        return "\n".join([f"W(t) at t = {_shorten(times)}", *lines])


jax.tree_util.register_pytree_with_keys(
    WeightsOverTime,
    lambda W: ([(jax.tree_util.DictKey(key), W[key]) for key in sorted(W)], tuple(sorted(W))),
    lambda keys, children: dict(zip(keys, children, strict=True)),  # type: ignore
)


def _describe(names: Sequence[str | None], shape: Sequence[int]) -> str:
    """`t 3, embed 128, 16`."""
    pairs = zip(names, shape, strict=True)
    return ", ".join(f"{name} {size}" if name else f"{size}" for name, size in pairs)


def _shorten(words: Sequence[str]) -> str:
    """The words, or the first of them and the last."""
    if len(words) <= _MOST:
        return ", ".join(words)
    return ", ".join([*words[: _MOST - 2], "...", words[-1]])
