"""A thread in which computations take turns, so that the server answers meanwhile."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request

_MOST_WAITING = 32
_SECONDS_BETWEEN_LOOKS = 0.2  # at whether the client is still there
_Result = TypeVar("_Result")


class Worker:
    """One thread. A waiting computation is cancelled when its client disconnects."""

    def __init__(self, name: str):
        self._pool = ThreadPoolExecutor(1, thread_name_prefix=name)
        self._waiting = 0

    async def run(self, request: Request, compute: Callable[[], _Result]) -> _Result:
        """The result of `compute`, which is called in the thread when its turn comes.

        Raises:
          HTTPException: if too many wait already: status 503.
          ClientDisconnect: if the client goes before.
        """
        if self._waiting >= _MOST_WAITING:
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
