"""What a run of a compiled program costs: bytes to and from memory, and the compiler's estimate.

Unlike XLA's cost analysis, this counts a loop as often as it runs. An instruction reads its
operands from main memory and writes its result there, except for what the compiler keeps in a TPU's
fast memory; of a fusion, only its inputs and outputs count. A slice read from, or written into, a
larger array counts only its own bytes, as in XLA's own count.
"""

import re
from typing import NamedTuple

from t5x_diffeq.planner.collectives import OPCODE
from t5x_diffeq.planner.hlo import (
    FUSIONS,
    Computation,
    Execution,
    Instruction,
    Program,
    Shape,
    elements,
    read_program,
    shapes,
)
from t5x_diffeq.planner.kernels import Kernel, kernel
from t5x_diffeq.planner.trip_count import executions

# They name, group or wait for existing values, or the computations that they call are counted.
_FREE = (
    "parameter",
    "constant",
    "tuple",
    "get-tuple-element",
    "bitcast",
    "while",
    "call",
    "conditional",
    "after-all",
    "partition-id",
    "replica-id",
    "optimization-barrier",
)
_PART_OF_FIRST = ("dynamic-slice", "slice", "gather")
_MOST_CYCLES = (
    2**48
)  # beyond is no estimate: libtpu 0.0.50 gives gathers that it offloads 2**63 - 1


class ProgramCost(NamedTuple):
    """The cost of one run of the program on one device.

    Attributes:
      memory_bytes: bytes read from and written to main memory.
      cycles: the compiler's estimates for its instructions (only on TPU), which leave out custom
        kernels and collectives; None if it gives none.
      unestimated_bytes: those of `memory_bytes` that belong to instructions for which the compiler
        says that it has no estimate.
      kernels: what the instructions do, where the compiler gives no cycles (on a GPU).
    """

    memory_bytes: int
    cycles: int | None
    unestimated_bytes: int = 0
    kernels: tuple[Kernel, ...] = ()


def program_cost(text: str) -> ProgramCost:
    """The cost of a compiled program's text.

    Raises:
      ValueError: if the trip count of a loop can't be determined.
    """
    program = read_program(text)
    memory_bytes, cycles, unestimated_bytes = 0, 0, 0
    moving = []
    for execution in executions(program):
        if not execution.fused:
            bytes_of_run = _instruction_bytes(program, execution)
            moved = execution.times * bytes_of_run
            estimate = int(execution.instruction.attribute(r'"estimated_cycles":"(\d+)"') or 0)
            memory_bytes += moved
            moving += [(execution, bytes_of_run)] if moved else []
            if estimate <= _MOST_CYCLES:
                cycles += execution.times * estimate
            else:
                unestimated_bytes += moved
    kernels = () if cycles else (kernel(program, *each) for each in moving)
    known = tuple(it for it in kernels if it is not None)
    return ProgramCost(memory_bytes, cycles or None, unestimated_bytes, known)


def _instruction_bytes(program: Program, execution: Execution) -> int:
    it, computation = execution.instruction, program.computations[execution.computation]
    if it.opcode in _FREE or it.opcode.endswith(("-done", "-update")):
        return 0
    if '"AllocateBuffer"' in it.attributes:
        return 0  # memory that others will write
    if it.opcode.endswith("-start") and it.opcode not in FUSIONS and not OPCODE.match(it.opcode):
        return _bytes_of_transfer(it)
    return _bytes_read(program, it, computation) + _bytes_written(program, it, computation)


def _bytes_of_transfer(it: Instruction) -> int:
    ends = [shapes(end) for end in elements(it.type)[:2]]
    moved = min(sum(shape.bytes for shape in end) for end in ends)
    return sum(moved for end in ends if all(_is_in_main_memory(shape) for shape in end))


def _is_in_main_memory(shape: Shape) -> bool:
    """Whether an array is in main memory, the memory space without a number."""
    return not re.search(r"S\([1-9]", shape.layout)


def _bytes_in_main_memory(type: str) -> int:
    return sum(shape.bytes for shape in shapes(type) if _is_in_main_memory(shape))


def _bytes_read(program: Program, it: Instruction, computation: Computation) -> int:
    sizes = [_bytes_in_main_memory(computation[name].type) for name in it.operands]
    if it.opcode in _PART_OF_FIRST:
        return min(sizes[0], _bytes_in_main_memory(it.type)) + sum(sizes[1:])
    if it.opcode == "dynamic-update-slice":
        return sum(sizes[1:])
    if it.opcode in FUSIONS:
        inside = it.callees[0]
        return sum(min(s, _bytes_read_inside(program, inside, k)) for k, s in enumerate(sizes) if s)
    return sum(sizes)


def _bytes_read_inside(program: Program, name: str, number: int) -> int:
    computation = program.computations[name]
    parameter = next(
        i for i in computation.values() if i.opcode == "parameter" and i.literal == str(number)
    )
    return _bytes_used(program, computation, parameter)


def _bytes_used(program: Program, computation: Computation, source: Instruction) -> int:
    total = 0
    for it in computation.values():
        for position, name in enumerate(it.operands):
            if it.opcode == "parameter" or name != source.name:
                continue
            if it.opcode == "bitcast":
                total += _bytes_used(program, computation, it)
            elif it.opcode in _PART_OF_FIRST and position == 0:
                total += sum(shape.bytes for shape in shapes(it.type))
            elif it.opcode == "fusion":
                total += _bytes_read_inside(program, it.callees[0], position)
            elif not (it.opcode == "dynamic-update-slice" and position == 0):
                return sum(shape.bytes for shape in shapes(source.type))
    return total


def _bytes_written(program: Program, it: Instruction, computation: Computation) -> int:
    if it.opcode == "dynamic-update-slice":
        return min(
            _bytes_in_main_memory(it.type), _bytes_in_main_memory(computation[it.operands[1]].type)
        )
    if it.opcode not in FUSIONS:
        return _bytes_in_main_memory(it.type)
    type = it.type if it.opcode == "fusion" else elements(it.type)[1]  # operands, result, state
    inside = program.computations[it.callees[0]]
    result = next(i for i in inside.values() if i.root)
    if result.opcode != "tuple":
        return min(_bytes_in_main_memory(type), _bytes_updated(program, inside, result))
    parts = zip(elements(type), (inside[name] for name in result.operands), strict=True)
    return sum(
        min(_bytes_in_main_memory(type), _bytes_updated(program, inside, part))
        for type, part in parts
    )


def _bytes_updated(program: Program, computation: Computation, it: Instruction) -> int:
    """Bytes of a fusion's result that it writes; for an array updated in place, the update."""
    if it.opcode == "bitcast":
        return _bytes_updated(program, computation, computation[it.operands[0]])
    if it.opcode == "dynamic-update-slice":
        it = computation[it.operands[1]]
    return sum(shape.bytes for shape in shapes(it.type))
