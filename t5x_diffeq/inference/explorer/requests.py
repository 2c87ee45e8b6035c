"""A request: its body, read and checked, and its turn in a thread."""

import asyncio
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request

from t5x_diffeq.config.keys.values import Values
from t5x_diffeq.system.errors import InputError
from t5x_diffeq.system.files import parse_json

MOST_BYTES = 256 * 1024  # of a body
_MOST_WAITING = 32
_SECONDS_BETWEEN_LOOKS = 0.2  # at whether the client is still there
Fields = dict[str, Any]
_Result = TypeVar("_Result")


async def read_fields(
    request: Request, needed: Mapping[str, Values], optional: Mapping[str, Values]
) -> Fields:
    """The fields of a request's body, with None for optional ones that it leaves out.

    Raises:
      HTTPException: if the body is too long: status 413.
      InputError: if it isn't a JSON object, or one of its fields is invalid.
    """
    body = await _read_json(request)
    if not isinstance(body, dict):
        raise InputError(f"the body is {shorten(body)}; it must be a JSON object")
    allowed = {**optional, **needed}
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


async def _read_json(request: Request) -> object:
    body = b""
    async for chunk in request.stream():
        body += chunk
        if len(body) > MOST_BYTES:
            raise HTTPException(413, f"the body has more than {MOST_BYTES} bytes; shorten the text")
    try:
        return parse_json(body)
    except ValueError as error:
        raise InputError(f"the body is not JSON: {shorten(str(error))}") from error


def shorten(value: object) -> str:
    """The value as a short text for a message."""
    text = ascii(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


class Worker:
    """A thread in which computations take turns, so that the server answers meanwhile.

    A waiting computation is cancelled when its client disconnects.
    """

    def __init__(self, name: str):
        self._pool = ThreadPoolExecutor(1, thread_name_prefix=name)
        self._waiting = 0

    async def run(
        self, request: Request, compute: Callable[[], _Result], begun: bool = False
    ) -> _Result:
        """The result of `compute`, which is called in the thread when its turn comes.

        Args:
          request: whose client waits for it.
          compute: the computation.
          begun: whether the client has a part of the answer, so that it isn't sent away.

        Raises:
          HTTPException: if too many wait already: status 503.
          ClientDisconnect: if the client goes before.
        """
        if self._waiting >= _MOST_WAITING and not begun:
            raise HTTPException(503, f"{self._waiting} requests are waiting; try again later")
        if await request.is_disconnected():  # between two tokens of a continuation
            raise ClientDisconnect
        self._waiting += 1
        result = asyncio.wrap_future(self._pool.submit(compute))
        try:
            while not (await asyncio.wait({result}, timeout=_SECONDS_BETWEEN_LOOKS))[0]:
                if await request.is_disconnected():
                    raise ClientDisconnect
            return result.result()
        finally:
            result.cancel()  # which also takes it out of the queue
            self._waiting -= 1
