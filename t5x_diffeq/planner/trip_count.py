"""How often the loops of a compiled program run, and thus every instruction.

A loop's trip count is the compiler's annotation (`known_trip_count`), or is found by running the
loop's counter: the few scalar instructions that its condition depends on. A count that depends on
data is an error, never a guess, but for loops whose name says that they run once at most.
"""

import operator
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from t5x_diffeq.planner.hlo import Execution, Instruction, Program
from t5x_diffeq.training.update import AT_MOST_ONCE

_MOST_ITERATIONS = 1_000_000

_Value = Any  # an int, or the `_Elements` of a tuple, depending on the instruction
_Elements = Callable[[int], _Value]  # each is computed on demand

_SAME = {
    "copy",
    "bitcast",
    "convert",
    "reshape",
    "optimization-barrier",
    "copy-start",
    "copy-done",
}
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
_COMPARISONS = {
    "LT": operator.lt,
    "LE": operator.le,
    "GT": operator.gt,
    "GE": operator.ge,
    "EQ": operator.eq,
    "NE": operator.ne,
}


class _UnknownValueError(Exception):
    """A value that depends on data."""


def executions(program: Program) -> Iterator[Execution]:
    """Every instruction of the program with the number of times it runs.

    Raises:
      ValueError: if the trip count of a loop can't be determined.
    """

    def of_entry(number: int) -> _Value:
        raise _UnknownValueError(f"parameter {number} of the program")

    yield from _visit(program, program.entry, 1, False, of_entry)


def _visit(
    program: Program, name: str, times: int, fused: bool, arguments: _Elements
) -> Iterator[Execution]:
    """`executions` of one computation, run `times` times, and of those that it calls."""
    for instruction in program.computations[name].values():
        yield Execution(instruction, name, times, fused)
        if instruction.opcode == "while":
            count = _trip_count(program, name, instruction, arguments)
            body = instruction.required_attribute(r"body=%?([\w.\-]+)")
            kept = _constant_state(
                program, body, _initial_state(program, name, instruction, arguments)
            )
            yield from _visit(program, body, times * count, fused, _sole_argument(kept))
            continue
        inside = fused or instruction.opcode == "fusion"
        for number, called in enumerate(instruction.callees):
            given = partial(_pass_argument, program, name, instruction, number, arguments)
            yield from _visit(program, called, times, inside, given)


def _pass_argument(
    program: Program,
    caller: str,
    call: Instruction,
    number: int,
    arguments: _Elements,
    parameter: int,
) -> _Value:
    """The value of a parameter of the computation `number` that an instruction calls.

    A conditional's first operand selects the branch; each branch gets one of the other operands.
    """
    operand = number + 1 if call.opcode == "conditional" else parameter
    return _find_value(program, caller, call.operands[operand], arguments)


def _trip_count(program: Program, caller: str, loop: Instruction, arguments: _Elements) -> int:
    """How often a loop's body runs each time that the loop is reached."""
    known = loop.attribute(r'"known_trip_count":\{"n":"(\d+)"')
    if known is not None:
        return int(known)
    if loop.attribute(rf'op_name="[^"]*/({AT_MOST_ONCE})/while"'):
        return 1
    condition = loop.required_attribute(r"condition=%?([\w.\-]+)")
    body = loop.required_attribute(r"body=%?([\w.\-]+)")
    try:
        state = _initial_state(program, caller, loop, arguments)
        for count in range(_MOST_ITERATIONS):
            if not _find_value(
                program, condition, _root(program, condition), _sole_argument(state)
            ):
                return count
            state = _next_state(program, body, state)
    except _UnknownValueError as error:
        raise ValueError(
            f"the trip count of loop {loop.name} in {caller} is unknown: it depends on {error}"
        ) from error
    raise ValueError(f"loop {loop.name} in {caller} runs more than {_MOST_ITERATIONS} times")


def _initial_state(
    program: Program, caller: str, loop: Instruction, arguments: _Elements
) -> _Elements:
    return _remember(lambda index: _find_value(program, caller, loop.operands[0], arguments)(index))


def _sole_argument(state: _Value) -> _Elements:
    """The arguments of a computation whose one parameter is `state`."""
    return lambda _: state


def _next_state(program: Program, body: str, state: _Elements) -> _Elements:
    return _remember(
        lambda index: _find_value(program, body, _root(program, body), _sole_argument(state))(index)
    )


def _constant_state(program: Program, body: str, state: _Elements) -> _Elements:
    """The part of a loop's state that is the same in every iteration; the rest is unknown."""
    instructions = program.computations[body]
    results = instructions[_root(program, body)]

    def element(index: int) -> _Value:
        source = instructions[results.operands[index]]
        while source.opcode in _SAME:
            source = instructions[source.operands[0]]
        passed_on = source.opcode == "get-tuple-element" and (
            instructions[source.operands[0]].opcode == "parameter"
            and int(source.required_attribute(r"index=(\d+)")) == index
        )
        if not passed_on:
            raise _UnknownValueError(f"element {index} of the state of {body}, which varies")
        return state(index)

    return element


def _remember(element: _Elements) -> _Elements:
    """A tuple that computes each of its elements only once."""
    found: dict[int, _Value] = {}

    def lookup(index: int) -> _Value:
        if index not in found:
            found[index] = element(index)
        return found[index]

    return lookup


def _root(program: Program, name: str) -> str:
    instructions = program.computations[name].values()
    return next(i.name for i in instructions if i.root)


def _find_value(program: Program, computation: str, name: str, arguments: _Elements) -> _Value:
    """The value of a scalar instruction, or of a tuple of scalars."""
    it = program.computations[computation][name]

    def operand(number: int) -> _Value:
        return _find_value(program, computation, it.operands[number], arguments)

    if it.opcode == "constant":
        return _read_constant(it)
    if it.opcode == "parameter":
        return arguments(int(it.literal))
    if it.opcode == "get-tuple-element":
        return operand(0)(int(it.required_attribute(r"index=(\d+)")))
    if it.opcode == "tuple":
        return operand
    if it.opcode in ("fusion", "call"):
        return _find_value(program, it.callees[0], _root(program, it.callees[0]), operand)
    return _compute(it, operand)


def _compute(it: Instruction, operand: _Elements) -> _Value:
    if it.opcode in _SAME:
        return operand(0)
    if it.opcode in _ARITHMETIC:
        return _ARITHMETIC[it.opcode](operand(0), operand(1))
    if it.opcode == "compare":
        return _COMPARISONS[it.required_attribute(r"direction=(\w+)")](operand(0), operand(1))
    if it.opcode == "select":
        return operand(1) if operand(0) else operand(2)
    raise _UnknownValueError(f"{it.opcode} {it.name}")


def _read_constant(it: Instruction) -> int:
    value = {"true": "1", "false": "0"}.get(it.literal, it.literal)
    if not value.lstrip("-").isdigit():
        raise _UnknownValueError(f"constant {it.name}")
    return int(value)
