"""Parses the text of a compiled program: its computations, and how often each instruction runs.

XLA's own cost analysis counts the body of a loop once, however often it runs. Here a loop counts as
often as it runs, nested loops by the product; computations that are called, fused, started
asynchronously or chosen by a conditional are followed. Every branch of a conditional is counted,
which gives an upper bound. The text comes from `jax.stages.Compiled.as_text()`, for any platform.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import NamedTuple

_HEADER = re.compile(r"(ENTRY )?%?([\w.\-]+) .*\{$")
_END = re.compile(r"\}(, execution_thread=.*)?$")
_INSTRUCTION = re.compile(r"\s+(ROOT )?%?([\w.\-]+) = (.*)", re.DOTALL)
_SHAPE = re.compile(r"([a-z]\w*)\[([\d,<=]*)\](\{[^}]*\})?")
_CALLED = re.compile(
    r"(?:calls|to_apply|body|true_computation|false_computation)=%?([\w.\-]+)"
    r"|(?:branch_computations|called_computations)=\{([^}]*)\}"
)
FUSIONS = ("fusion", "fusion-start")  # the second runs beside what follows (GPU)
# Their `to_apply` is a scalar function, applied to every element, and is not followed.
_APPLIES = (
    *("reduce", "scatter", "sort", "map", "select-and-scatter", "all-reduce", "reduce-scatter"),
)


class Shape(NamedTuple):
    """An array's element type, dimensions and layout, as in `bf16[8,128]{1,0:T(8,128)S(1)}`."""

    dtype: str
    dims: tuple[int, ...]
    layout: str = ""

    @property
    def bytes(self) -> int:
        """Size in bytes without padding; 0 for types such as tokens."""
        bits = 8 if self.dtype == "pred" else int((re.search(r"\d+", self.dtype) or [0])[0])
        return bits * prod(self.dims) // 8

    def __str__(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.dims))}]"


@dataclass(frozen=True)
class Instruction:
    """An instruction, `name = type opcode(operands), attributes`."""

    name: str  # its name without `%`
    type: str  # the type of the result, as written
    opcode: str  # the opcode, such as "fusion"
    literal: str  # the text between the parentheses: operands, or a constant's value
    attributes: str  # the text after the parentheses
    root: bool = False  # whether its result is its computation's result

    @cached_property
    def operands(self) -> tuple[str, ...]:
        """Names of the operands, which may be written with their types."""
        return tuple(part.split()[-1].lstrip("%") for part in elements(f"({self.literal})"))

    @cached_property
    def callees(self) -> tuple[str, ...]:
        """Names of the computations that the instruction runs."""
        if self.opcode in _APPLIES or self.opcode.endswith(("-done", "-update")):
            return ()
        groups = (one or several for one, several in _CALLED.findall(self.attributes))
        return tuple(name.strip().lstrip("%") for names in groups for name in names.split(","))

    def attribute(self, pattern: str) -> str | None:
        """The first group of the pattern in the attributes."""
        match = re.search(pattern, self.attributes)
        return match and match.group(1)

    def required_attribute(self, pattern: str) -> str:
        """`attribute`, for an attribute that every instruction of this opcode has."""
        value = self.attribute(pattern)
        assert value is not None, f"{self.name} has no {pattern}"
        return value


Computation = dict[str, Instruction]


class Program(NamedTuple):
    """Computations by name, and the name of the entry computation."""

    computations: dict[str, Computation]
    entry: str


class Execution(NamedTuple):
    """An instruction, the computation that contains it, and how often it runs.

    `fused` is whether that computation is the body of a fusion, whose intermediate results are
    never in memory.
    """

    instruction: Instruction
    computation: str
    times: int
    fused: bool


def root(computation: Computation) -> Instruction:
    """The instruction whose result is the computation's result."""
    return next(op for op in computation.values() if op.root)


def shapes(type: str) -> list[Shape]:
    """The arrays in a type, with nested tuples flattened in order."""
    return [
        Shape(dtype, tuple(int(d.lstrip("<=")) for d in dims.split(",") if d), layout)
        for dtype, dims, layout in _SHAPE.findall(type)
    ]


def elements(type: str) -> list[str]:
    """The elements of a tuple `(a, (b, c))`: `a` and `(b, c)`; any other type by itself."""
    if not type.startswith("("):
        return [type]
    parts, depth, begin = [], 0, 1
    for n, character in enumerate(type):
        depth += (character in "([{") - (character in ")]}")
        if (character == "," and depth == 1) or depth == 0:
            parts.append(type[begin:n].strip())
            begin = n + 1
        if depth == 0:
            break
    return [part for part in parts if part]


def read_program(text: str) -> Program:
    """Parses a compiled program's text; ValueError if it has no entry computation."""
    computations: dict[str, Computation] = {}
    entry, current = None, None
    for line in _whole_lines(text):
        header = _HEADER.match(line)
        if current is None and header and not line.startswith("HloModule"):
            current = computations.setdefault(header.group(2), {})
            entry = header.group(2) if header.group(1) else entry
        elif _END.match(line):
            current = None
        elif current is not None and (parts := _INSTRUCTION.match(line)):
            instruction = _read_instruction(parts.group(2), parts.group(3), bool(parts.group(1)))
            current[instruction.name] = instruction
    if entry is None:
        raise ValueError("this text has no ENTRY computation: it is no compiled program's")
    return Program(computations, entry)


def _whole_lines(text: str) -> Iterator[str]:
    """The lines; an instruction whose attributes contain line breaks (a kernel's text) is one."""
    pending = ""
    for line in text.splitlines():
        if _INSTRUCTION.match(line) or _HEADER.match(line) or _END.match(line):
            if pending:
                yield pending
            pending = line
        else:
            pending += f"\n{line}"
    yield pending


def _read_instruction(name: str, definition: str, root: bool) -> Instruction:
    definition = re.sub(r"/\*.*?\*/", "", definition)
    type, rest = _split_at_close(definition) if definition[0] == "(" else definition.split(" ", 1)
    opcode, _, rest = rest.strip().partition("(")
    literal, attributes = _split_at_close(f"({rest}")
    return Instruction(name, type, opcode, literal[1:-1].strip(), attributes, root)


def _split_at_close(text: str) -> tuple[str, str]:
    depth = 0
    for n, character in enumerate(text):
        depth += (character == "(") - (character == ")")
        if depth == 0:
            return text[: n + 1], text[n + 1 :]
    return text, ""
