"""Parts of trees by the paths of their leaves: of parameters, and of what belongs to them."""

from collections.abc import Collection
from typing import TypeVar

import jax
from flax.traverse_util import flatten_dict, unflatten_dict

from t5x_diffeq.ode.weights import LeafPath

_Tree = TypeVar("_Tree")


def without(params: dict, paths: Collection[LeafPath]) -> dict:
    """The parameters that are not at these paths."""
    leaves = flatten_dict(params, keep_empty_nodes=True)
    return unflatten_dict({path: leaf for path, leaf in leaves.items() if path not in paths})


def merged(params: dict, changed: dict) -> dict:
    """The parameters, with others in place of those at the same paths."""
    leaves = flatten_dict(params, keep_empty_nodes=True)
    return unflatten_dict({**leaves, **flatten_dict(changed)})


def part_like(whole: _Tree, like: _Tree) -> _Tree:
    """The leaves of a state that are also, by their paths, in another one; in its structure."""
    leaves = _by_path(whole)
    paths, structure = jax.tree_util.tree_flatten_with_path(like)
    return jax.tree.unflatten(structure, [leaves[path] for path, _ in paths])


def with_part(whole: _Tree, part: _Tree) -> _Tree:
    """The state with the leaves of a part of it in their places."""
    leaves = {**_by_path(whole), **_by_path(part)}
    return jax.tree.unflatten(jax.tree.structure(whole), leaves.values())


def _by_path(tree: object) -> dict:
    return dict(jax.tree_util.tree_leaves_with_path(tree))
