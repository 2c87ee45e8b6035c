"""The server: the page's files, and its endpoints."""

import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import suppress
from functools import partial
from typing import Any

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
from t5x_diffeq.inference.explorer.requests import Fields, Worker, read_fields, shorten
from t5x_diffeq.inference.sampling import Sampling
from t5x_diffeq.system.errors import InputError

_FROM_HERE_ALONE = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_ANSWERS_KEPT = 64
_RUN = {"run": Values(str)}
_GRID = {**_RUN, "num_steps": Values(int, 1, MOST_STEPS), "scheme": Values(str)}
_TEXT = {"text": Values(str)}
_OF_TOKEN = {**_TEXT, "output": Values(int, 0, INT32)}
_CONTINUATION = {
    **_TEXT,
    "max_tokens": Values(int, 0, INT32),
    "temperature": Values(float),
    "seed": Values(int, 0, SEEDS - 1),
}
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


class _Server:
    """The endpoints. Readings and analyses have a thread each, so that neither waits for the other.

    Args:
      explorers: the runs, by name.
      token: what a request must show.
    """

    def __init__(self, explorers: Mapping[str, Explorer], token: str):
        self.explorers, self.token = explorers, token
        self.readings, self.analyses = Worker("readings"), Worker("analyses")
        self._answers: dict[tuple, Answer] = {}  # given last, by path and fields

    def guarded(self, handler: _Handler) -> _Handler:
        """The handler, for requests with the token."""

        async def guarded(request: Request) -> Response:
            _, _, shown = request.headers.get("authorization", "").partition(" ")
            if not secrets.compare_digest(shown.strip().encode(), self.token.encode()):
                raise HTTPException(
                    401,
                    "the header Authorization: Bearer TOKEN lacks the server's token; its terminal "
                    "prints an address with it",
                )
            return await handler(request)

        return guarded

    async def runs(self, request: Request) -> Response:
        """The runs."""
        return JSONResponse({"runs": [each.about() for each in self.explorers.values()]})

    async def read(self, request: Request) -> Response:
        """A text at a depth."""
        fields, explorer, grid = await self._asked(request, _TEXT)
        compute = partial(explorer.read, fields["text"], grid)
        return await self._answer(request, self.readings, fields, compute)

    async def continuation(self, request: Request) -> Response:
        """What follows a text, as plain text, token by token."""
        fields, explorer, grid = await self._asked(request, _CONTINUATION)
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

        as_they_come = {"content-encoding": "identity"}  # a compressor may hold them back
        return StreamingResponse(stream(), media_type="text/plain", headers=as_they_come)

    async def validation(self, request: Request) -> Response:
        """The loss at a depth."""
        fields, explorer, grid = await self._asked(request, {})
        compute = partial(explorer.validation, grid)
        return await self._answer(request, self.analyses, fields, compute)

    async def sensitivity(self, request: Request) -> Response:
        """The sensitivity of a token's output to the tokens before."""
        fields, explorer, grid = await self._asked(request, _OF_TOKEN)
        compute = partial(explorer.sensitivity, fields["text"], fields["output"], grid)
        return await self._answer(request, self.analyses, fields, compute)

    async def paths(self, request: Request) -> Response:
        """The paths of W(t)."""
        fields = await read_fields(request, {}, _RUN)
        compute = self._find(fields["run"]).paths
        return await self._answer(request, self.analyses, fields, compute)

    async def _asked(
        self, request: Request, needed: Mapping[str, Values]
    ) -> tuple[Fields, Explorer, Depth]:
        """A request's fields, its run, and its grid, which is the run's own where it says nothing.

        A run's own scheme may be of another package, but no request can name one.
        """
        fields = await read_fields(request, needed, _GRID)
        explorer = self._find(fields["run"])
        own, scheme = explorer.config, fields["scheme"]
        if scheme not in (None, *explorer.schemes):
            raise InputError(
                f"scheme is {shorten(scheme)}; it can be {', '.join(explorer.schemes)}"
            )
        return fields, explorer, (fields["num_steps"] or own.num_steps, scheme or own.scheme)

    def _find(self, name: str | None) -> Explorer:
        if name is None:
            return next(iter(self.explorers.values()))
        if name not in self.explorers:
            raise InputError(
                f"there is no run {shorten(name)}; there are {', '.join(self.explorers)}"
            )
        return self.explorers[name]

    async def _answer(
        self, request: Request, worker: Worker, fields: Fields, compute: Callable[[], Answer]
    ) -> Response:
        """The answer, which is given at once if it was given before."""
        key = (request.url.path, *fields.values())
        answer = self._answers.get(key)
        if answer is None:
            answer = self._answers[key] = await worker.run(request, compute)
            if len(self._answers) > _ANSWERS_KEPT:
                del self._answers[next(iter(self._answers))]
        return JSONResponse(answer)


async def _refuse_input(request: Request, error: Exception) -> Response:
    return JSONResponse({"error": str(error)}, 400)


async def _refuse(request: Request, error: Exception) -> Response:
    status, detail = (
        (error.status_code, error.detail) if isinstance(error, HTTPException) else (499, "gone")
    )
    headers = getattr(error, "headers", None)
    return JSONResponse({"error": detail}, status, headers)


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
    endpoints = (
        ("/api/runs", server.runs, "GET"),
        ("/api/read", server.read, "POST"),
        ("/api/continue", server.continuation, "POST"),
        ("/api/validation", server.validation, "POST"),
        ("/api/sensitivity", server.sensitivity, "POST"),
        ("/api/paths", server.paths, "POST"),
    )
    routes = [
        Route(path, server.guarded(handler), methods=[method])
        for path, handler, method in endpoints
    ]
    return Starlette(
        routes=[*routes, Mount("/", _Page(directory=PAGE, html=True))],
        middleware=[Middleware(GZipMiddleware, minimum_size=2000)],
        exception_handlers={
            InputError: _refuse_input,
            HTTPException: _refuse,
            ClientDisconnect: _refuse,
            Exception: _fail,
        },
    )
