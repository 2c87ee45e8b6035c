"""Parses which devices communicate in a collective from a compiled program's text."""

import re

import numpy as np

from t5x_diffeq.planner.hlo import Instruction

_LISTED = re.compile(r"replica_groups=\{\{([\d,]*)\}")
_TILED = re.compile(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")
_AXES = re.compile(
    r"replica_groups=mesh\[([^\]]*)\]"
    r"(?:, device_ids=\(\[([\d,]+)\](?:T\(([\d,]+)\))?\))? \{([^}]*)\}"
)

Group = tuple[int, ...]


def first_group(it: Instruction) -> Group | None:
    """The first group of an instruction, as indices into the program's order of devices.

    Groups are written as lists `{{0,1},{2,3}}`, as tiles `[2,2]<=[4]` (two groups of two), or as
    axes of a mesh, `mesh['a'=2,'b'=4], device_ids=([4,2]T(1,0)) {'b'}`, of which `'b':(2)2` is a
    part.

    Returns:
      The group, or None if the instruction names none: then all devices communicate.
    """
    if listed := _LISTED.search(it.attributes):
        return _parse_numbers(listed.group(1))
    if tiled := _TILED.search(it.attributes):
        sizes, source, order = tiled.groups()
        return tuple(_arrange(source, order).reshape(_parse_numbers(sizes))[0].tolist())
    if named := _AXES.search(it.attributes):
        return _along_axes(*named.groups())
    return None


def _along_axes(mesh: str, source: str | None, order: str | None, chosen: str) -> Group:
    sizes = {axis: int(size) for axis, size in re.findall(r"'([^']+)'=(\d+)", mesh)}
    indices = _arrange(source or str(np.prod(list(sizes.values()))), order)
    own = {axis: [0] for axis in sizes}
    for axis, before, part in re.findall(r"'([^']+)'(?::\((\d+)\)(\d+))?", chosen):
        stride = sizes[axis] // (int(before) * int(part)) if part else 1
        own[axis] = [n * stride for n in range(int(part or sizes[axis]))]
    chosen_indices = indices.reshape(tuple(sizes.values()))[np.ix_(*own.values())]
    return tuple(chosen_indices.reshape(-1).tolist())


def _arrange(shape: str, order: str | None) -> np.ndarray:
    """0, 1, ... in an array of this shape, transposed if an order of its axes is given."""
    dims = _parse_numbers(shape)
    indices = np.arange(np.prod(dims)).reshape(dims)
    return indices.transpose(_parse_numbers(order)) if order else indices


def _parse_numbers(text: str) -> tuple[int, ...]:
    return tuple(int(n) for n in text.split(",") if n)
