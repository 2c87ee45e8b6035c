"""What a run of a compiled program costs: bytes to and from memory, and the compiler's estimate.

Unlike XLA's cost analysis, this counts a loop as often as it runs. An instruction reads its
operands from main memory and writes its result there, except for what the compiler keeps in a TPU's
fast memory; of a fusion, only its inputs and outputs count. A slice read from, or written into, a
larger array counts only its own bytes, as in XLA's own count.

A GPU's compiler gives no estimate, so there the kernels are counted: their products, bytes and
operations on elements, which overlap within a kernel, but not between kernels (`estimate.py`). A
fusion is a kernel, and so is every other instruction that computes.
"""

import re
from math import prod
from typing import NamedTuple

from t5x_diffeq.planner import hlo
from t5x_diffeq.planner.collectives import OPCODE
from t5x_diffeq.planner.trip_count import executions

# Calls of attention kernels, whose FLOPs the program doesn't say (`StepFlops.attention_kernels`).
_ATTENTION = ("__cudnn$fmha", "__gpu$xla.gpu.triton")
# Elementwise opcodes, by cost. The unit is an operation on one integer. The same operation on a
# float costs 0.5, because only half of an NVIDIA GPU's units compute integers, and a special
# function 4 (CUDA's programming guide, arithmetic instructions).
_SIMPLE = (
    *("add", "subtract", "multiply", "maximum", "minimum", "negate", "abs", "compare", "select"),
    *("and", "or", "xor", "not", "shift-left", "shift-right-logical", "shift-right-arithmetic"),
    *("convert", "clamp", "sign", "floor", "reduce"),
)
_SPECIAL = (
    *("exponential", "exponential-minus-one", "log", "log-plus-one", "tanh", "logistic", "power"),
    *("rsqrt", "sqrt", "divide", "cosine", "sine", "erf"),
)


class GpuKernel(NamedTuple):
    """What one run of a kernel does."""

    product_flops: float  # FLOPs of its matrix products; a multiply-add is two
    operand_bits: int  # the bits of the products' narrowest operand; 0 without a product
    memory_bytes: int  # bytes read from and written to main memory
    lane_operations: float  # operations on single elements; an operation on integers counts as 1
    times: int  # how often the kernel runs


def _kernel(program: hlo.Program, execution: hlo.Execution, memory_bytes: int) -> GpuKernel | None:
    """The kernel of an instruction; None for attention kernels and collectives."""
    op = execution.instruction
    target = op.attribute(r'custom_call_target="([^"]+)"') or ""
    if OPCODE.match(op.opcode) or target.startswith(_ATTENTION):
        return None
    flops, bits, lanes = _work(program, program.computations[execution.computation], op)
    return GpuKernel(flops, bits, memory_bytes, lanes, execution.times)


def product_flops(text: str) -> int:
    """FLOPs of the matrix products, `dot`, in a program's text as JAX lowers it.

    A multiply-add is two. A TPU's compiler turns products into other instructions.
    """
    program = hlo.read_program(text)
    return sum(
        times * _dot_flops(program.computations[name], op)
        for op, name, times, _ in executions(program)
        if op.opcode == "dot"
    )


def _work(
    program: hlo.Program, computation: hlo.Computation, op: hlo.Instruction
) -> tuple[int, int, float]:
    """FLOPs of products, the bits of their operands, and operations on elements."""
    if op.opcode in hlo.FUSIONS:
        inside = program.computations[op.callees[0]]
        each = [_work(program, inside, part) for part in inside.values()]
        widths = [bits for _, bits, _ in each if bits]
        return sum(f for f, _, _ in each), min(widths, default=0), sum(lanes for *_, lanes in each)
    if op.opcode == "dot" or "$matmul" in op.attributes:
        bits = min(8 * shape.bytes // prod(shape.dims) for shape in _operands(computation, op)[:2])
        return _dot_flops(computation, op), bits, 0
    if op.opcode in _SIMPLE or op.opcode in _SPECIAL:
        (operand, *_) = _operands(computation, op) if op.opcode == "reduce" else hlo.shapes(op.type)
        floats = operand.dtype.startswith(("f", "bf"))
        turns = 4 if op.opcode in _SPECIAL else 0.5 if floats else 1
        return 0, 0, turns * prod(operand.dims)
    return 0, 0, 0


def _operands(computation: hlo.Computation, op: hlo.Instruction) -> list[hlo.Shape]:
    return [hlo.shapes(computation[name].type)[0] for name in op.operands]


def _dot_flops(computation: hlo.Computation, op: hlo.Instruction) -> int:
    left = _operands(computation, op)[0]
    summed = op.attribute(r"lhs_contracting_dims=\{([\d,]*)\}")
    if summed is None:  # cuBLAS's call
        summed = op.required_attribute(r'"lhs_contracting_dimensions":\[([^\]]*)\]')
    sizes = (left.dims[int(dim.strip('"'))] for dim in summed.split(",") if dim)
    return 2 * prod(hlo.shapes(op.type)[0].dims) * prod(sizes)


# Instructions without bytes of their own: they name, group or wait for existing values, or call
# computations, whose instructions are counted.
_FREE = (
    *("parameter", "constant", "tuple", "get-tuple-element", "bitcast", "while", "call"),
    *("conditional", "after-all", "partition-id", "replica-id", "optimization-barrier"),
)
_PART_OF_FIRST = ("dynamic-slice", "slice", "gather")
_MOST_CYCLES = 2**48  # beyond is no estimate: libtpu 0.0.50 gives offloaded gathers 2**63 - 1


class ProgramCost(NamedTuple):
    """The cost of one run of the program on one device."""

    memory_bytes: int  # bytes read from and written to main memory
    # The compiler's estimates (of a TPU's alone), without custom kernels and collectives.
    cycles: int | None
    unestimated_bytes: int = 0  # `memory_bytes` of instructions that the compiler can't estimate
    kernels: tuple[GpuKernel, ...] = ()  # the kernels, if the compiler gives no cycles (on a GPU)


def program_cost(text: str) -> ProgramCost:
    """The cost of a compiled program's text."""
    program = hlo.read_program(text)
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
    kernels = () if cycles else (_kernel(program, *each) for each in moving)
    known = tuple(kernel for kernel in kernels if kernel is not None)
    return ProgramCost(memory_bytes, cycles or None, unestimated_bytes, known)


def _instruction_bytes(program: hlo.Program, execution: hlo.Execution) -> int:
    op, computation = execution.instruction, program.computations[execution.computation]
    if op.opcode in _FREE or op.opcode.endswith(("-done", "-update")):
        return 0
    if '"AllocateBuffer"' in op.attributes:
        return 0  # memory that others will write
    if (
        op.opcode.endswith("-start")
        and op.opcode not in hlo.FUSIONS
        and not OPCODE.match(op.opcode)
    ):
        return _bytes_of_transfer(op)
    return _bytes_read(program, op, computation) + _bytes_written(program, op, computation)


def _bytes_of_transfer(op: hlo.Instruction) -> int:
    ends = [hlo.shapes(end) for end in hlo.elements(op.type)[:2]]
    moved = min(sum(shape.bytes for shape in end) for end in ends)
    return sum(moved for end in ends if all(_is_in_main_memory(shape) for shape in end))


def _is_in_main_memory(shape: hlo.Shape) -> bool:  # the memory space without a number
    return not re.search(r"S\([1-9]", shape.layout)


def _bytes_in_main_memory(type: str) -> int:
    return sum(shape.bytes for shape in hlo.shapes(type) if _is_in_main_memory(shape))


def _bytes_read(program: hlo.Program, op: hlo.Instruction, computation: hlo.Computation) -> int:
    sizes = [_bytes_in_main_memory(computation[name].type) for name in op.operands]
    if op.opcode in _PART_OF_FIRST:
        return min(sizes[0], _bytes_in_main_memory(op.type)) + sum(sizes[1:])
    if op.opcode == "dynamic-update-slice":
        return sum(sizes[1:])
    if op.opcode in hlo.FUSIONS:
        inside = op.callees[0]
        return sum(min(s, _bytes_read_inside(program, inside, k)) for k, s in enumerate(sizes) if s)
    return sum(sizes)


def _bytes_read_inside(program: hlo.Program, name: str, number: int) -> int:
    computation = program.computations[name]
    parameter = next(
        i for i in computation.values() if i.opcode == "parameter" and i.literal == str(number)
    )
    return _bytes_used(program, computation, parameter)


def _bytes_used(program: hlo.Program, computation: hlo.Computation, source: hlo.Instruction) -> int:
    total = 0
    for op in computation.values():
        for position, name in enumerate(op.operands):
            if op.opcode == "parameter" or name != source.name:
                continue
            if op.opcode == "bitcast":
                total += _bytes_used(program, computation, op)
            elif op.opcode in _PART_OF_FIRST and position == 0:
                total += sum(shape.bytes for shape in hlo.shapes(op.type))
            elif op.opcode == "fusion":
                total += _bytes_read_inside(program, op.callees[0], position)
            elif not (op.opcode == "dynamic-update-slice" and position == 0):
                return sum(shape.bytes for shape in hlo.shapes(source.type))
    return total


def _bytes_written(program: hlo.Program, op: hlo.Instruction, computation: hlo.Computation) -> int:
    if op.opcode == "dynamic-update-slice":
        return min(
            _bytes_in_main_memory(op.type), _bytes_in_main_memory(computation[op.operands[1]].type)
        )
    if op.opcode not in hlo.FUSIONS:
        return _bytes_in_main_memory(op.type)
    type = op.type if op.opcode == "fusion" else hlo.elements(op.type)[1]  # operands, result, state
    inside = program.computations[op.callees[0]]
    result = hlo.root(inside)
    if result.opcode != "tuple":
        return min(_bytes_in_main_memory(type), _bytes_updated(program, inside, result))
    parts = zip(hlo.elements(type), (inside[name] for name in result.operands), strict=True)
    return sum(
        min(_bytes_in_main_memory(type), _bytes_updated(program, inside, part))
        for type, part in parts
    )


def _bytes_updated(program: hlo.Program, computation: hlo.Computation, op: hlo.Instruction) -> int:
    """Bytes of a fusion's result that it writes; for an array updated in place, the update."""
    if op.opcode == "bitcast":
        return _bytes_updated(program, computation, computation[op.operands[0]])
    if op.opcode == "dynamic-update-slice":
        op = computation[op.operands[1]]
    return sum(shape.bytes for shape in hlo.shapes(op.type))
