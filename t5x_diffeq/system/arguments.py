"""Checks the arguments of the Python interface's functions against their signatures.

The annotation of a parameter says which values are allowed, and its line in the docstring ends the
error's message. What an annotation can't say, such as a number's range, the function itself checks.
"""

import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from itertools import repeat
from numbers import Integral, Real
from os import PathLike
from types import FunctionType, NoneType, UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin

from t5x_diffeq.system.errors import InputError

_Checked = TypeVar("_Checked", bound=Callable)
_WORDS = {
    str: "a text",
    int: "a whole number",
    float: "a number",
    bool: "True or False",
    NoneType: "None",
    PathLike: "a path",
    Callable: "a function",
    Mapping: "a dict",
}
# NumPy's numbers, and tuples in place of lists, are accepted, too.
_ABSTRACT: dict[Any, Any] = {int: Integral, float: Real, list: Sequence}
_LINES = re.MULTILINE | re.DOTALL
_MOST = 60  # characters of a value that are shown


def checked(target: _Checked) -> _Checked:
    """Makes a function, or the constructor and public methods of a class, check their arguments.

    They raise an InputError for an argument of another type than its annotation's. For an unknown
    or missing argument they raise a TypeError, which lists the parameters. Parameters whose
    annotation is a text or an array's type are not checked.
    """
    if isinstance(target, FunctionType):
        return _checked_function(target, target.__doc__)
    names = {"__init__"} | {name for name in vars(target) if not name.startswith("_")}
    for name in names - getattr(target, "__dataclass_fields__", {}).keys():
        if isinstance(member := vars(target).get(name), FunctionType):
            setattr(target, name, _checked_function(member, member.__doc__ or target.__doc__))
    return target


def _checked_function(function: Any, doc: str | None) -> Any:
    signature = inspect.signature(function)

    @wraps(function)
    def call(*given: Any, **named: Any) -> Any:
        try:
            arguments = signature.bind(*given, **named).arguments
        except TypeError as error:
            takes = ", ".join(
                f"{name}=" if parameter.kind is parameter.KEYWORD_ONLY else name
                for name, parameter in signature.parameters.items()
                if name != "self"
            )
            takes = takes or "no arguments"
            raise TypeError(f"{function.__qualname__}(): {error}; it takes {takes}") from None
        for name, value in arguments.items():
            hint = signature.parameters[name].annotation
            if not _allows(hint, value):
                raise InputError(
                    f"{name}={_show(value)}; it must be {_describe(hint)}{_meaning(doc, name)}"
                )
        return function(*given, **named)

    return call


def _allows(hint: Any, value: Any) -> bool:
    """Whether an annotation allows a value; an annotation that can't be checked allows all."""
    kind, inner = get_origin(hint) or hint, get_args(hint)
    if kind in (Union, UnionType):
        return any(_allows(each, value) for each in inner)
    if isinstance(kind, TypeVar):
        return any(_allows(each, value) for each in kind.__constraints__)
    if kind is Literal:
        return isinstance(value, str | int) and value in inner
    if kind is None or kind in (Any, inspect.Parameter.empty) or not isinstance(kind, type):
        return kind is not None or value is None
    kind = _ABSTRACT.get(kind, kind)
    if not isinstance(value, kind) or _is_array_of_objects(value):
        return False
    if isinstance(value, bool):
        return kind not in (Integral, Real)
    if kind is Mapping:
        return all(_allows(inner[0], key) for key in value)
    if issubclass(kind, Sequence) and inner:
        hints = inner if kind is tuple and inner[-1] is not ... else repeat(inner[0])
        return not isinstance(value, str | bytes) and all(map(_allows, hints, value))
    return True


def _is_array_of_objects(value: object) -> bool:
    return getattr(getattr(value, "dtype", None), "kind", "f") in "OSU"


def _show(value: object) -> str:
    """The start of a value's repr; the type alone if another package's type has a long repr."""
    shown = repr(value)
    if len(shown) <= _MOST and "\n" not in shown:
        return shown
    is_plain = type(value).__module__ == "builtins"
    return f"{shown[:_MOST]}..." if is_plain else f"<{type(value).__name__}>"


def _describe(hint: Any, plural: bool = False) -> str:
    """`a text, a path or None`; in the plural, `texts`."""
    kind, inner = get_origin(hint) or hint, get_args(hint)
    inner = getattr(kind, "__constraints__", inner)
    if kind in (Union, UnionType, Literal) or isinstance(kind, TypeVar):
        words = [repr(x) if kind is Literal else _describe(x, plural) for x in inner]
        *first, last = dict.fromkeys(words)
        return f"{', '.join(first)} or {last}" if first else last
    if issubclass(kind, Sequence) and inner:
        return f"a {'tuple' if kind is tuple else 'list'} of {_describe(inner[0], plural=True)}"
    array_type = kind.__name__.split("[")[-1].split(",")[0]  # jaxtyping's: Integer[ndarray, 'n']
    is_array = array_type.endswith(("array", "Array"))
    word = "an array" if is_array else _WORDS.get(kind, f"a {kind.__name__}")
    return f"{word.split(' ', 1)[1]}s" if plural and " " in word else word


def _meaning(doc: str | None, name: str) -> str:
    """What the docstring says of a parameter, as the way out."""
    line = re.search(rf"^ +{name}: (.+?)(?=^ +\w+: |^ *$)", doc or "", _LINES)
    return f" ({' '.join(line[1].split()).rstrip('.')})" if line else ""
