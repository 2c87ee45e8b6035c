"""The server: the page's files, its endpoints, and requests, which are checked and take turns."""

import asyncio
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.gzip import GZipMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles

from t5x_diffeq.config.keys.values import INT32, SEEDS, Values
from t5x_diffeq.inference.explorer.answers import MOST_STEPS, PAGE, Answer, Depth, Explorer
from t5x_diffeq.inference.sampling import Sampling
from t5x_diffeq.system.errors import InputError
from t5x_diffeq.system.files import parse_json

_FROM_HERE_ALONE = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_ANSWERS_KEPT = 64
MOST_BYTES = 256 * 1024  # of a body
_MOST_WAITING = 32
_SECONDS_BETWEEN_LOOKS = 0.2  # at whether the client is still there
_RUN = {"run": Values(str)}
_GRID = {**_RUN, "num_steps": Values(int, 1, MOST_STEPS), "scheme": Values(str)}
_TEXT = {"text": Values(str, can_be_empty=True)}
_TOKEN = {**_TEXT, "output": Values(int, 0, INT32)}
_CONTINUATION = {
    **_TEXT,
    "max_tokens": Values(int, 0, INT32),
    "temperature": Values(float),
    "seed": Values(int, 0, SEEDS - 1),
}
_Fields = dict[str, Any]
_Result = TypeVar("_Result")
_Handler = Callable[[Request], Awaitable[Response]]


class _Page(StaticFiles):
    """The page's files, which load nothing from anywhere else."""

    def file_response(self, *args: Any, **kwargs: Any) -> Response:
        """The file, with what a browser may do with it."""
        response = super().file_response(*args, **kwargs)
        response.headers["content-security-policy"] = _FROM_HERE_ALONE
        response.headers["cache-control"] = "no-cache"
        response.headers["referrer-policy"] = "no-referrer"
        return response


async def _read_fields(
    request: Request, needed: Mapping[str, Values], optional: Mapping[str, Values]
) -> _Fields:
    """The fields of a request's body, with None for optional ones that it leaves out."""
    received = b""
    async for chunk in request.stream():
        received += chunk
        if len(received) > MOST_BYTES:
            raise HTTPException(413, f"the body has more than {MOST_BYTES} bytes; shorten the text")
    try:
        body = parse_json(received)
    except ValueError as error:
        raise InputError(f"the body is not JSON: {_shorten(str(error))}") from error
    if not isinstance(body, dict):
        raise InputError(f"the body is {_shorten(body)}; it must be a JSON object")
    allowed = {**optional, **needed}
    for name in body:
        if name not in allowed:
            raise InputError(f"there is no field {_shorten(name)}; there are {', '.join(allowed)}")
    for name in needed:
        if body.get(name) is None:
            raise InputError(f"the field {name!r} is missing")
    for name, value in body.items():
        if value is not None and (fault := allowed[name].fault(value)):
            raise InputError(f"{name} is {_shorten(value)}; {fault}")
    return {name: body.get(name) for name in allowed}


def _shorten(value: object) -> str:
    text = ascii(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


class Turns:
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

        A client that has a part of the answer (`begun`) isn't sent away.

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


class _Server:
    """The endpoints. Tokens, readings and analyses have a thread each: none waits for another."""

    def __init__(self, explorers: Mapping[str, Explorer], token: str):
        self.explorers, self.token = explorers, token
        self.tokens = Turns("tokens")
        self.readings, self.analyses = Turns("readings"), Turns("analyses")
        self._answers: dict[tuple, Answer] = {}  # the last answers, by path and fields

    def guarded(self, handler: _Handler) -> _Handler:
        """The handler, for requests with the token."""

        async def guarded(request: Request) -> Response:
            _, _, shown = request.headers.get("authorization", "").partition(" ")
            # In constant time: how long a refusal takes tells nothing about the token.
            if not secrets.compare_digest(shown.strip().encode(), self.token.encode()):
                raise HTTPException(
                    401,
                    "the header Authorization: Bearer TOKEN lacks the server's token; its terminal "
                    "prints an address with it",
                )
            return await handler(request)

        return guarded

    async def runs(self, request: Request) -> Response:
        """What `Explorer.about` says of each run."""
        return JSONResponse({"runs": [explorer.about() for explorer in self.explorers.values()]})

    def on_grid(
        self,
        worker: Turns,
        needed: Mapping[str, Values],
        compute: Callable[[Explorer, Depth, _Fields], Answer],
    ) -> _Handler:
        """Answers what an explorer computes of a request's fields on its grid."""

        async def handler(request: Request) -> Response:
            fields, explorer, grid = await self._read_request(request, needed)
            compute_answer = partial(compute, explorer, grid, fields)
            return await self._answer(request, worker, fields, compute_answer)

        return handler

    async def continuation(self, request: Request) -> Response:
        """What follows a text, as plain text, token by token."""
        fields, explorer, grid = await self._read_request(request, _CONTINUATION)
        sampling = Sampling(fields["temperature"])
        pieces = explorer.continuation(
            fields["text"], grid, fields["max_tokens"], sampling, fields["seed"]
        )
        # Each token waits for its turn, so that readings come between them. What can't be answered
        # is refused at the first one, while the answer can still have another status.
        take = partial(self.readings.run, request, partial(next, pieces, None))
        first = await take()

        async def stream() -> AsyncIterator[str]:
            piece = first
            with suppress(ClientDisconnect):
                while piece is not None:
                    yield piece
                    piece = await take(begun=True)

        uncompressed = {"content-encoding": "identity"}  # a compressor may hold pieces back
        return StreamingResponse(stream(), media_type="text/plain", headers=uncompressed)

    async def paths(self, request: Request) -> Response:
        """The paths of W(t)."""
        fields = await _read_fields(request, {}, _RUN)
        compute = self._find(fields["run"]).paths
        return await self._answer(request, self.analyses, fields, compute)

    async def _read_request(
        self, request: Request, needed: Mapping[str, Values]
    ) -> tuple[_Fields, Explorer, Depth]:
        """A request's fields, run and grid; what it leaves out of the grid is the run's own.

        A run's own scheme may be another package's, but no request can name such a scheme.
        """
        fields = await _read_fields(request, needed, _GRID)
        explorer = self._find(fields["run"])
        trained, scheme = explorer.config, fields["scheme"]
        if scheme not in (None, *explorer.schemes):
            raise InputError(
                f"scheme is {_shorten(scheme)}; it can be {', '.join(explorer.schemes)}"
            )
        return (
            fields,
            explorer,
            (fields["num_steps"] or trained.num_steps, scheme or trained.scheme),
        )

    def _find(self, name: str | None) -> Explorer:
        if name is None:
            return next(iter(self.explorers.values()))
        if name not in self.explorers:
            raise InputError(
                f"there is no run {_shorten(name)}; there are {', '.join(self.explorers)}"
            )
        return self.explorers[name]

    async def _answer(
        self, request: Request, worker: Turns, fields: _Fields, compute: Callable[[], Answer]
    ) -> Response:
        """The answer, which is given at once if it was given before."""
        key = (request.url.path, *fields.values())
        answer = self._answers.get(key)
        if answer is None:
            answer = self._answers[key] = await worker.run(request, compute)
            if len(self._answers) > _ANSWERS_KEPT:
                del self._answers[next(iter(self._answers))]  # the oldest: a dict keeps the order
        return JSONResponse(answer)


async def _refuse(request: Request, error: Exception) -> Response:
    if isinstance(error, HTTPException):
        return JSONResponse({"error": error.detail}, error.status_code, error.headers)
    gone = isinstance(error, ClientDisconnect)
    return JSONResponse({"error": "gone" if gone else str(error)}, 499 if gone else 400)


async def _fail(request: Request, error: Exception) -> Response:
    """A bug in the program. Its message goes only to the terminal, since it may name paths."""
    return JSONResponse({"error": "the server could not answer; its terminal says why"}, 500)


def make_app(explorers: Mapping[str, Explorer], token: str) -> Starlette:
    """The server's application.

    Args:
      explorers: the runs, by name; the first is shown first.
      token: what every request for data must show in its header `Authorization: Bearer TOKEN`.
    """
    server = _Server(explorers, token)
    readings, analyses = server.readings, server.analyses
    handlers: dict[str, _Handler] = {
        "runs": server.runs,
        "tokens": server.on_grid(
            server.tokens, _TEXT, lambda run, grid, f: run.tokens(f["text"], grid)
        ),
        "read": server.on_grid(readings, _TEXT, lambda run, grid, f: run.read(f["text"], grid)),
        "continue": server.continuation,
        "validation": server.on_grid(analyses, {}, lambda run, grid, f: run.validation(grid)),
        "sensitivity": server.on_grid(
            analyses, _TOKEN, lambda run, grid, f: run.sensitivity(f["text"], f["output"], grid)
        ),
        "paths": server.paths,
    }
    routes = [
        Route(f"/api/{name}", server.guarded(answer), methods=["GET" if name == "runs" else "POST"])
        for name, answer in handlers.items()
    ]
    return Starlette(
        routes=[*routes, Mount("/", _Page(directory=PAGE, html=True))],
        middleware=[Middleware(GZipMiddleware, minimum_size=2000)],
        exception_handlers={
            InputError: _refuse,
            HTTPException: _refuse,
            ClientDisconnect: _refuse,
            Exception: _fail,
        },
    )
