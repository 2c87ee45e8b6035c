"""The fields of a request, checked: a mistake is answered with its name and its value."""

from collections.abc import Mapping
from typing import Any

from t5x_diffeq.runtime.errors import InputError
from t5x_diffeq.runtime.keys.values import Values

Fields = dict[str, Any]


def check_fields(body: object, allowed: Mapping[str, Values], needed: tuple[str, ...]) -> Fields:
    """The fields of a request's body, with None for those that it leaves out.

    Args:
      body: what its JSON says.
      allowed: the values of each field that there is.
      needed: fields that can't be left out.

    Raises:
      InputError: if the body isn't an object, or one of its fields is invalid.
    """
    if not isinstance(body, dict):
        raise InputError(f"the body is {shorten(body)}; it must be a JSON object")
    for name in body:
        if name not in allowed:
            raise InputError(f"there is no field {shorten(name)}; there are {', '.join(allowed)}")
    for name in needed:
        if body.get(name) is None:
            raise InputError(f"the field {name!r} is missing")
    for name, value in body.items():
        if value is not None and (fault := allowed[name].fault(value)):
            raise InputError(f"{name} is {shorten(value)}; {fault}")
    return {name: body.get(name) for name in allowed}


def shorten(value: object) -> str:
    """The value as a short text for a message."""
    text = ascii(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
