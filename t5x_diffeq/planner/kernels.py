"""The kernels of a GPU's program, and what each of them does: products, bytes, and the rest.

A fusion is a kernel, and so is every other instruction that computes. What a kernel costs is
estimated from the largest of the three (`estimate.py`), as these overlap within a kernel, but not
between kernels.
"""

from math import prod
from typing import NamedTuple

from t5x_diffeq.planner.collectives import OPCODE
from t5x_diffeq.planner.hlo import (
    FUSIONS,
    Computation,
    Execution,
    Instruction,
    Program,
    Shape,
    read_program,
    shapes,
)
from t5x_diffeq.planner.trip_count import executions

# Attention's, whose FLOPs no instruction says (`StepFlops.attention_kernels`).
_ATTENTION = ("__cudnn$fmha", "__gpu$xla.gpu.triton")
# How many lanes' turns an element takes: an integer's operation 1, as only half of an NVIDIA GPU's
# units do these, and a special function 4 (CUDA's programming guide, arithmetic instructions).
_SIMPLE = (
    *("add", "subtract", "multiply", "maximum", "minimum", "negate", "abs", "compare", "select"),
    *("and", "or", "xor", "not", "shift-left", "shift-right-logical", "shift-right-arithmetic"),
    *("convert", "clamp", "sign", "floor", "reduce"),
)
_SPECIAL = (
    *("exponential", "exponential-minus-one", "log", "log-plus-one", "tanh", "logistic", "power"),
    *("rsqrt", "sqrt", "divide", "cosine", "sine", "erf"),
)


class Kernel(NamedTuple):
    """What one run of a kernel does.

    Attributes:
      product_flops: FLOPs of its matrix products; a multiply-add is two.
      operand_bits: of the products' operands, at least; 0 without a product.
      memory_bytes: bytes read from and written to main memory.
      lane_operations: operations on single elements, in those of integers.
      times: how often the kernel runs.
    """

    product_flops: float
    operand_bits: int
    memory_bytes: int
    lane_operations: float
    times: int


def kernel(program: Program, execution: Execution, memory_bytes: int) -> Kernel | None:
    """The kernel that an instruction is; None for attention's, and for collectives.

    Args:
      program: a GPU's program.
      execution: the instruction, and how often it runs.
      memory_bytes: what one run of it moves.
    """
    it = execution.instruction
    target = it.attribute(r'custom_call_target="([^"]+)"') or ""
    if OPCODE.match(it.opcode) or target.startswith(_ATTENTION):
        return None
    flops, bits, lanes = _work(program, program.computations[execution.computation], it)
    return Kernel(flops, bits, memory_bytes, lanes, execution.times)


def product_flops(text: str) -> int:
    """FLOPs of the matrix products, `dot`, in a program's text as JAX lowers it.

    A multiply-add is two. A TPU's compiler turns products into other instructions.

    Raises:
      ValueError: if the trip count of a loop can't be determined.
    """
    program = read_program(text)
    return sum(
        times * _dot_flops(program.computations[name], it)
        for it, name, times, _ in executions(program)
        if it.opcode == "dot"
    )


def _work(program: Program, computation: Computation, it: Instruction) -> tuple[int, int, float]:
    """FLOPs of products, the bits of their operands, and operations on elements."""
    if it.opcode in FUSIONS:
        inside = program.computations[it.callees[0]]
        each = [_work(program, inside, part) for part in inside.values()]
        widths = [bits for _, bits, _ in each if bits]
        return sum(f for f, _, _ in each), min(widths, default=0), sum(lanes for *_, lanes in each)
    if it.opcode == "dot" or "$matmul" in it.attributes:
        bits = min(8 * shape.bytes // prod(shape.dims) for shape in _operands(computation, it)[:2])
        return _dot_flops(computation, it), bits, 0
    if it.opcode in _SIMPLE or it.opcode in _SPECIAL:
        (of, *_) = _operands(computation, it) if it.opcode == "reduce" else shapes(it.type)
        floats = of.dtype.startswith(("f", "bf"))
        turns = 4 if it.opcode in _SPECIAL else 0.5 if floats else 1
        return 0, 0, turns * prod(of.dims)
    return 0, 0, 0


def _operands(computation: Computation, it: Instruction) -> list[Shape]:
    return [shapes(computation[name].type)[0] for name in it.operands]


def _dot_flops(computation: Computation, it: Instruction) -> int:
    left = _operands(computation, it)[0]
    summed = it.attribute(r"lhs_contracting_dims=\{([\d,]*)\}")
    if summed is None:  # cuBLAS's call
        summed = it.required_attribute(r'"lhs_contracting_dimensions":\[([^\]]*)\]')
    sizes = (left.dims[int(dim.strip('"'))] for dim in summed.split(",") if dim)
    return 2 * prod(shapes(it.type)[0].dims) * prod(sizes)
