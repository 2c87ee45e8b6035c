"""The collectives of a compiled program: how many run, and how many bytes they move per device.

The convention: an all-gather moves the bytes of its result, a reduce-scatter those of its operand,
an all-reduce its size, once (a ring sends about twice that), an all-to-all and a collective-permute
their operand. Sizes are those of one device's program, without padding; loops count as often as
they run (`trip_count.executions`), and an asynchronous collective once, at its start.
"""

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from math import prod
from typing import NamedTuple

from t5x_diffeq.training.program import (
    Computation,
    Execution,
    Instruction,
    Program,
    Shape,
    elements,
    read_program,
    shapes,
)
from t5x_diffeq.training.trip_count import executions

KINDS = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute")
OPCODE = re.compile(rf"(?:ragged-)?({'|'.join(KINDS)})(-start)?$")


@dataclass(frozen=True)
class Collective:
    """A collective instruction.

    Attributes:
      kind: one of `KINDS`.
      shapes: what it moves; several where the compiler has combined several into one.
      executions: how often it runs in one run of the program.
      devices: how many exchange with each other; None for all, or where it isn't a group.
      op_name: of the operation that it was made for, as the program's source names it; of
        combined ones at most the first's.
      name: of the instruction.
      asynchronous: whether other instructions can run meanwhile.
    """

    kind: str
    shapes: tuple[Shape, ...]
    executions: int
    devices: int | None
    op_name: str
    name: str
    asynchronous: bool

    @property
    def bytes(self) -> int:
        """Bytes that each device moves, all executions together."""
        return self.executions * sum(shape.bytes for shape in self.shapes)


class Traffic(NamedTuple):
    """Collectives of one kind: how many run, and the bytes that each device moves."""

    executions: int
    bytes: int


def collectives(text: str) -> list[Collective]:
    """The collectives of a compiled program's text, those among fewer than two devices left out.

    Raises:
      ValueError: for a loop whose number of iterations can't be told.
    """
    program = read_program(text)
    found = (
        collective(execution, program)
        for execution in executions(program)
        if OPCODE.match(execution.instruction.opcode)
    )
    return [c for c in found if c is not None and c.devices != 1]


def traffic(found: Iterable[Collective]) -> dict[str, Traffic]:
    """Executions and bytes of each of `KINDS`, zeros included."""
    found = list(found)
    return {
        kind: Traffic(
            sum(c.executions for c in found if c.kind == kind),
            sum(c.bytes for c in found if c.kind == kind),
        )
        for kind in KINDS
    }


def select(
    found: Iterable[Collective], predicate: Callable[[Collective, Shape], bool]
) -> list[Collective]:
    """The part of the collectives for which `predicate(collective, shape)` holds.

    Of a combined collective, the shapes for which it does.
    """
    parts = (replace(c, shapes=tuple(s for s in c.shapes if predicate(c, s))) for c in found)
    return [c for c in parts if c.shapes]


def time_embedding_sum(num_nodes: int, width: int) -> Callable[[Collective, Shape], bool]:
    """A predicate for the sums over shards that the gradient of e(t) takes (`ode/contraction.py`).

    Args:
      num_nodes: N, times at which the weights are made.
      width: T, of the time embeddings.
    """

    def holds(collective: Collective, shape: Shape) -> bool:
        dims = tuple(dim for dim in shape.dims if dim != 1)
        sums = (tuple(dim for dim in (num_nodes, width) if dim != 1), (num_nodes * width,))
        return collective.kind in ("all-reduce", "reduce-scatter") and dims in sums

    return holds


def collective(execution: Execution, program: Program) -> Collective | None:
    """The collective of an instruction; None where it only continues one that has begun."""
    it, computation = execution.instruction, program.computations[execution.computation]
    kind, start = OPCODE.match(it.opcode).groups()
    if continues(it, execution, computation):
        return None
    if kind == "all-reduce" and execution.computation.startswith("all-reduce-scatter"):
        kind = "reduce-scatter"  # a TPU's fusion of an all-reduce with the slice that is kept
    if kind == "all-gather":
        moved = shapes(elements(it.type)[1] if start else it.type)
    else:
        moved = [s for name in it.operands for s in shapes(computation[name].type)]
    return Collective(
        kind,
        tuple(moved),
        execution.times,
        group_size(it),
        it.attribute(r'op_name="([^"]*)"') or "",
        it.name,
        bool(start) or in_chain(it, execution) or started(program, execution.computation),
    )


def started(program: Program, name: str) -> bool:
    """Whether a computation is run by the start of an asynchronous operation."""
    return any(
        name in it.called
        for computation in program.computations.values()
        for it in computation.values()
        if it.opcode.endswith("-start")
    )


def in_chain(it: Instruction, execution: Execution) -> bool:
    """Whether a TPU's compiler has spread the collective over a chain of fusions.

    Each fusion of the chain also computes something, and repeats the instruction.
    """
    return execution.fused and "async_collective_fusion_config" in it.attributes


def continues(it: Instruction, execution: Execution, computation: Computation) -> bool:
    """Whether the instruction is a further piece of a chain, counted at its first, the start."""
    starts = any('"AsyncCollectiveStart"' in other.attributes for other in computation.values())
    return in_chain(it, execution) and not starts


def group_size(it: Instruction) -> int | None:
    """How many devices exchange with each other, if the instruction says.

    Groups are written as lists `{{0,1},{2,3}}`, as tiles `[2,2]<=[4]` (two groups of two), or as
    axes of a mesh, `mesh['a'=2,'b'=4], device_ids=(...) {'b'}`, of which `'b':(2)2` is a part.
    """
    if listed := it.attribute(r"replica_groups=\{\{([\d,]*)\}"):
        return len(listed.split(","))
    if tiled := it.attribute(r"replica_groups=\[([\d,]+)\]<="):
        return int(tiled.split(",")[-1])
    axes = r"replica_groups=mesh\[([^\]]*)\](?:, device_ids=\(\S*\))? \{([^}]*)\}"
    if not (named := re.search(axes, it.attributes)):
        return None
    sizes = dict(re.findall(r"'([^']+)'=(\d+)", named.group(1)))
    parts = re.findall(r"'([^']+)'(?::\(\d+\)(\d+))?", named.group(2))
    return prod(int(part or sizes[axis]) for axis, part in parts)
