"""Counts how often each loop of a compiled program runs, and so each instruction.

The trip count of a loop is the number of its iterations. The compiler annotates it
(`known_trip_count`), or it is found here by running the loop's counter: the few scalar instructions
that the loop's condition depends on. A count that depends on data is an error, never a guess.
"""

import operator
from collections.abc import Callable, Iterator
from functools import cache, partial
from typing import Any

from t5x_diffeq.planner.hlo import FUSIONS, Execution, Instruction, Program, root

_MOST_ITERATIONS = 1_000_000

_Value = Any  # an int, or the `_Elements` of a tuple, depending on the instruction
_Elements = Callable[[int], _Value]  # each is computed on demand, and raises if it is unknown

_SAME = (
    *("copy", "copy-start", "copy-done", "fusion-done", "bitcast", "convert", "reshape"),
    "optimization-barrier",
)
_ARITHMETIC: dict[str, Callable[[int, int], int]] = {
    "add": operator.add,
    "subtract": operator.sub,
    "multiply": operator.mul,
    "divide": operator.floordiv,
    "remainder": operator.mod,
    "and": operator.and_,
    "or": operator.or_,
    "minimum": min,
    "maximum": max,
}


class _UnknownValueError(Exception):
    """A value that depends on data."""


def executions(program: Program) -> Iterator[Execution]:
    """Every instruction of the program with the number of times it runs.

    Raises:
      ValueError: if the trip count of a loop can't be determined.
    """

    def unknown(number: int) -> _Value:
        raise _UnknownValueError(f"parameter {number} of the program")

    yield from _visit(program, program.entry, 1, False, unknown)


def _visit(
    program: Program, name: str, times: int, fused: bool, arguments: _Elements
) -> Iterator[Execution]:
    """`executions` of one computation, run `times` times, and of the computations it calls."""
    value = _evaluate(program, name, arguments)
    for op in program.computations[name].values():
        yield Execution(op, name, times, fused)
        operand = _operands(op, value)
        if op.opcode == "while":
            body = op.required_attribute(r"body=%?([\w.\-]+)")
            count = _trip_count(program, name, op, operand)
            state = _constant_state(program, body, operand)
            yield from _visit(program, body, times * count, fused, _only(state))
            continue
        for number, called in enumerate(op.callees):
            branch = partial(_branch_argument, operand, number)
            argument = branch if op.opcode == "conditional" else operand
            yield from _visit(program, called, times, fused or op.opcode in FUSIONS, argument)


def _branch_argument(operand: _Elements, branch: int, _: int) -> _Value:
    """A conditional's first operand selects the branch; each branch gets one of the others."""
    return operand(branch + 1)


def _trip_count(program: Program, caller: str, loop: Instruction, operand: _Elements) -> int:
    """How often a loop's body runs each time that the loop is reached."""
    if known := loop.attribute(r'"known_trip_count":\{"n":"(\d+)"'):
        return int(known)
    condition = loop.required_attribute(r"condition=%?([\w.\-]+)")
    body = loop.required_attribute(r"body=%?([\w.\-]+)")
    try:
        state = operand(0)
        for count in range(_MOST_ITERATIONS):
            if not _result(program, condition, _only(state)):
                return count
            state = _result(program, body, _only(state))
    except _UnknownValueError as error:
        raise ValueError(
            f"the trip count of loop {loop.name} in {caller} is unknown: it depends on {error}, "
            "whose value is only known when the program runs"
        ) from error
    raise ValueError(f"loop {loop.name} in {caller} runs more than {_MOST_ITERATIONS} times")


def _only(value: _Value) -> _Elements:
    """The arguments of a computation with a single parameter."""
    return lambda _: value


def _operands(op: Instruction, value: Callable[[str], _Value]) -> _Elements:
    return lambda number: value(op.operands[number])


def _constant_state(program: Program, body: str, operand: _Elements) -> _Elements:
    """The part of a loop's state that is the same in every iteration; the rest is unknown."""
    instructions = program.computations[body]
    results = root(instructions)

    def element(index: int) -> _Value:
        source = instructions[results.operands[index]]
        while source.opcode in _SAME:
            source = instructions[source.operands[0]]
        passed_on = source.opcode == "get-tuple-element" and (
            instructions[source.operands[0]].opcode == "parameter"
            and int(source.required_attribute(r"index=(\d+)")) == index
        )
        if not passed_on:
            raise _UnknownValueError(
                f"element {index} of the state of {body}, which changes between iterations"
            )
        return operand(0)(index)

    return element


def _result(program: Program, name: str, arguments: _Elements) -> _Value:
    return _evaluate(program, name, arguments)(root(program.computations[name]).name)


def _evaluate(program: Program, name: str, arguments: _Elements) -> Callable[[str], _Value]:
    """The function from an instruction's name to its value, a scalar or a tuple of scalars."""
    instructions = program.computations[name]

    @cache
    def value(name: str) -> _Value:
        op = instructions[name]
        operand = _operands(op, value)
        match op.opcode:
            case "constant":
                return _read_constant(op)
            case "parameter":
                return arguments(int(op.literal))
            case "get-tuple-element":
                return operand(0)(int(op.required_attribute(r"index=(\d+)")))
            case "tuple":
                return operand
            case "fusion" | "fusion-start" | "call":
                return _result(program, op.callees[0], operand)
            case "compare":
                compare = getattr(operator, op.required_attribute(r"direction=(\w+)").lower())
                return compare(operand(0), operand(1))
            case "select":
                return operand(1) if operand(0) else operand(2)
        if op.opcode in _SAME:
            return operand(0)
        if op.opcode in _ARITHMETIC:
            return _ARITHMETIC[op.opcode](operand(0), operand(1))
        raise _UnknownValueError(f"the result of {op.opcode} {op.name}")

    return value


def _read_constant(op: Instruction) -> int:
    value = {"true": "1", "false": "0"}.get(op.literal, op.literal)
    if not value.lstrip("-").isdigit():
        raise _UnknownValueError(f"constant {op.name}")
    return int(value)
