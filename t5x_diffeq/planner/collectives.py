"""The collectives of a compiled program: how many run, and how many bytes they move per device.

The convention: an all-gather moves the bytes of its result; an all-reduce its size, once (a ring
sends about twice that); a reduce-scatter, an all-to-all, a collective-permute and an exchange
between the hosts of several TPU slices move the bytes of their operand. Sizes are as in one
device's program, without hardware padding. A collective in a loop counts as often as it runs
(`trip_count.executions`), and an asynchronous collective once, at its start.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from t5x_diffeq.planner import hlo
from t5x_diffeq.planner.trip_count import executions

_LISTED = re.compile(r"replica_groups=\{\{([\d,]*)\}")
_TILED = re.compile(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")
_AXES = re.compile(
    r"replica_groups=mesh\[([^\]]*)\]"
    r"(?:, device_ids=\(\[([\d,]+)\](?:T\(([\d,]+)\))?\))? \{([^}]*)\}"
)

DeviceGroup = tuple[int, ...]


def _first_group(op: hlo.Instruction) -> DeviceGroup | None:
    """The first group of an instruction, as indices into the program's order of devices.

    Groups are written as lists `{{0,1},{2,3}}`, as tiles `[2,2]<=[4]` (two groups of two), or as
    axes of a mesh, `mesh['a'=2,'b'=4], device_ids=([4,2]T(1,0)) {'b'}`, of which `'b':(2)2` is a
    part. None: the instruction names no group, and all devices communicate.
    """
    if listed := _LISTED.search(op.attributes):
        return _parse_numbers(listed.group(1))
    if tiled := _TILED.search(op.attributes):
        sizes, source, order = tiled.groups()
        return tuple(_arrange(source, order).reshape(_parse_numbers(sizes))[0].tolist())
    if named := _AXES.search(op.attributes):
        return _along_axes(*named.groups())
    return None


def _along_axes(mesh: str, source: str | None, order: str | None, chosen: str) -> DeviceGroup:
    sizes = {axis: int(size) for axis, size in re.findall(r"'([^']+)'=(\d+)", mesh)}
    indices = _arrange(source or str(np.prod(list(sizes.values()))), order)
    indices_by_axis = {axis: [0] for axis in sizes}
    for axis, before, part in re.findall(r"'([^']+)'(?::\((\d+)\)(\d+))?", chosen):
        stride = sizes[axis] // (int(before) * int(part)) if part else 1
        indices_by_axis[axis] = [n * stride for n in range(int(part or sizes[axis]))]
    chosen_indices = indices.reshape(tuple(sizes.values()))[np.ix_(*indices_by_axis.values())]
    return tuple(chosen_indices.reshape(-1).tolist())


def _arrange(shape: str, order: str | None) -> np.ndarray:
    """0, 1, ... in an array of this shape, transposed if an order of its axes is given."""
    dims = _parse_numbers(shape)
    indices = np.arange(np.prod(dims)).reshape(dims)
    return indices.transpose(_parse_numbers(order)) if order else indices


def _parse_numbers(text: str) -> tuple[int, ...]:
    return tuple(int(n) for n in text.split(",") if n)


BETWEEN_SLICES = "between slices"  # the hosts' part of a collective across TPU slices
_OPCODES = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute")
KINDS = (*_OPCODES, BETWEEN_SLICES)
_UNCHANGED = (
    *("bitcast", "convert", "copy", "copy-start", "copy-done", "fusion-done"),
    *("reshape", "transpose"),
)
OPCODE = re.compile(rf"(?:ragged-)?({'|'.join(_OPCODES)})(-start)?$")


@dataclass(frozen=True)
class Collective:
    """A collective instruction."""

    kind: str  # one of `KINDS`
    shapes: tuple[hlo.Shape, ...]  # the arrays that it moves; several in combined collectives
    executions: int  # how often it runs in one run of the program
    # The first group, as indices into the program's devices; None: all devices, or no groups.
    group: DeviceGroup | None
    asynchronous: bool  # whether other instructions can run meanwhile
    # Bytes of zeros that one execution moves: an all-reduce in place of an all-gather, for which
    # each device has put its part into a buffer of zeros.
    padding: int = 0

    @property
    def devices(self) -> int | None:
        """The number of devices in a group; None: all devices, or no groups."""
        return None if self.group is None else len(self.group)

    @property
    def bytes(self) -> int:
        """Bytes that each device moves in all executions together."""
        return self.executions * sum(shape.bytes for shape in self.shapes)


class Traffic(NamedTuple):
    """The collectives of one kind on one device."""

    executions: int  # how many run
    bytes: int  # the bytes that they move
    synchronous: int = 0  # how many of them block all other instructions
    padded: int = 0  # how many are all-reduces of zero-padded buffers, in place of all-gathers
    padding: int = 0  # bytes of these zeros, included in `bytes`


def collectives(text: str) -> list[Collective]:
    """The collectives in a compiled program's text, except those among fewer than two devices."""
    program = hlo.read_program(text)
    read = (_read_collective(execution, program) for execution in executions(program))
    return [each for each in read if each is not None and each.devices != 1]


def traffic(moved: Iterable[Collective]) -> dict[str, Traffic]:
    """Executions and bytes of each of `KINDS`, including kinds with none."""
    by_kind = {kind: Traffic(0, 0) for kind in KINDS}
    for collective in moved:
        more = Traffic(
            collective.executions,
            collective.bytes,
            0 if collective.asynchronous else collective.executions,
            collective.executions if collective.padding else 0,
            collective.executions * collective.padding,
        )
        by_kind[collective.kind] = Traffic(
            *map(sum, zip(by_kind[collective.kind], more, strict=True))
        )
    return by_kind


def _read_collective(execution: hlo.Execution, program: hlo.Program) -> Collective | None:
    """The collective of an instruction; None for no collective, or a later piece of a chain."""
    op, computation = execution.instruction, program.computations[execution.computation]
    if op.opcode == "send" and "xla_megascale_runtime" in op.attributes:  # between slices
        sent = tuple(hlo.shapes(computation[op.operands[0]].type))
        return Collective(BETWEEN_SLICES, sent, execution.times, None, True)
    match = OPCODE.match(op.opcode)
    if match is None or _is_continuation(op, execution, computation):
        return None
    kind, start = match.groups()
    if kind == "all-reduce" and execution.computation.startswith("all-reduce-scatter"):
        kind = "reduce-scatter"  # on TPU, a fusion of an all-reduce with the slice that is kept
    if kind == "all-gather":
        moved = hlo.shapes(hlo.elements(op.type)[1] if start else op.type)
    else:
        moved = [s for name in op.operands for s in hlo.shapes(computation[name].type)]
    zeros = (_zero_bytes(program, computation, name) for name in op.operands)
    return Collective(
        kind,
        tuple(moved),
        execution.times,
        _first_group(op),
        _runs_beside_others(op, execution, program),
        sum(zeros) if kind == "all-reduce" else 0,
    )


def _zero_bytes(program: hlo.Program, computation: hlo.Computation, name: str) -> int:
    """Bytes of an operand outside the part that was written into it; 0 if all was computed."""
    op = computation[name]
    if op.opcode in _UNCHANGED:
        return _zero_bytes(program, computation, op.operands[0])
    if op.opcode in hlo.FUSIONS:
        inside = program.computations[op.callees[0]]
        return _zero_bytes(program, inside, hlo.root(inside).name)
    if op.opcode != "dynamic-update-slice":
        return 0
    types = op.type, computation[op.operands[1]].type
    buffer, update = (hlo.shapes(type)[0].bytes for type in types)
    return buffer - update


def _runs_beside_others(
    op: hlo.Instruction, execution: hlo.Execution, program: hlo.Program
) -> bool:
    """Whether other instructions can run before it is done.

    In a GPU's program every collective has a start and an end; an attribute says which ones wait.
    """
    if op.opcode.endswith("-start"):
        return '"is_sync":true' not in op.attributes
    if _is_in_chain(op, execution):
        return True
    instructions = (op for part in program.computations.values() for op in part.values())
    starts = (op for op in instructions if op.opcode.endswith("-start"))
    return any(execution.computation in start.callees for start in starts)


def _is_in_chain(op: hlo.Instruction, execution: hlo.Execution) -> bool:
    """Whether a TPU's compiler has spread the collective over a chain of fusions.

    Each fusion of the chain also computes something, and repeats the instruction.
    """
    return execution.fused and "async_collective_fusion_config" in op.attributes


def _is_continuation(
    op: hlo.Instruction, execution: hlo.Execution, computation: hlo.Computation
) -> bool:
    """Whether the instruction is a later piece of a chain, which is counted at its start."""
    starts = any('"AsyncCollectiveStart"' in other.attributes for other in computation.values())
    return _is_in_chain(op, execution) and not starts
