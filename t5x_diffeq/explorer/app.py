"""The server: the page's files, its endpoints, and OpenAI's completions."""

import json
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
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

from t5x_diffeq.explorer.answers import PAGE, Answer, Explorer
from t5x_diffeq.explorer.completions import Completions, join_choices
from t5x_diffeq.explorer.fields import Fields, check_fields, shorten
from t5x_diffeq.explorer.grids import MOST_STEPS, Depth
from t5x_diffeq.explorer.worker import Worker
from t5x_diffeq.runtime.errors import InputError
from t5x_diffeq.runtime.files import parse_json
from t5x_diffeq.runtime.keys.values import INT32, Values

MOST_BYTES = 256 * 1024  # of a request's body
_FROM_HERE_ALONE = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_GRID = {
    "run": Values(str),
    "num_steps": Values(int, 1, MOST_STEPS),
    "scheme": Values(str),
}
_TEXT = {"text": Values(str)}
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
        fields, explorer, grid = await self._asked(request, _TEXT, ("text",))
        key = ("read", fields["text"], *grid)
        compute = partial(explorer.read, fields["text"], grid)
        return await self._answer(request, self.readings, explorer, key, compute)

    async def validation(self, request: Request) -> Response:
        """The loss at a depth."""
        _, explorer, grid = await self._asked(request, {}, ())
        compute = partial(explorer.validation, grid)
        return await self._answer(request, self.analyses, explorer, ("validation", *grid), compute)

    async def sensitivity(self, request: Request) -> Response:
        """The sensitivity of a token's output to the tokens before."""
        more = {**_TEXT, "output": Values(int, 0, INT32)}
        fields, explorer, grid = await self._asked(request, more, ("text", "output"))
        key = ("sensitivity", fields["text"], fields["output"], *grid)
        compute = partial(explorer.sensitivity, fields["text"], fields["output"], grid)
        return await self._answer(request, self.analyses, explorer, key, compute)

    async def paths(self, request: Request) -> Response:
        """The paths of W(t)."""
        body = check_fields(await _read_json(request), {"run": _GRID["run"]}, ())
        explorer = self._find(body["run"])
        return await self._answer(request, self.analyses, explorer, ("paths",), explorer.paths)

    async def models(self, request: Request) -> Response:
        """OpenAI's list of models: each run at its own depth and at the others of its training."""
        names = [
            each.name if steps == each.config.num_steps else f"{each.name}@{steps}"
            for each in self.explorers.values()
            for steps in each.grids.trained
        ]
        data = [
            {"id": name, "object": "model", "created": 0, "owned_by": "t5x_diffeq"}
            for name in names
        ]
        return JSONResponse({"object": "list", "data": data})

    async def completions(self, request: Request) -> Response:
        """OpenAI's completions."""
        asked = Completions.of(await _read_json(request), self.explorers)
        head = {
            "id": f"cmpl-{secrets.token_hex(12)}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": asked.model,
        }
        choices = self._take(request, asked)
        if asked.stream:
            return StreamingResponse(_events(head, choices), media_type="text/event-stream")
        pieces = [piece async for piece in choices]
        drawn = sum(piece["tokens"] for piece in pieces)
        usage = {
            "prompt_tokens": asked.prompt_tokens,
            "completion_tokens": drawn,
            "total_tokens": asked.prompt_tokens + drawn,
        }
        return JSONResponse({**head, "choices": join_choices(pieces), "usage": usage})

    async def _take(self, request: Request, asked: Completions) -> AsyncIterator[Answer]:
        """Pieces of the choices; each waits for its turn, so that readings come between them."""
        pieces = asked.choices()
        while piece := await self.readings.run(request, partial(next, pieces, None)):
            yield piece

    async def _asked(
        self, request: Request, more: Mapping[str, Values], needed: tuple[str, ...]
    ) -> tuple[Fields, Explorer, Depth]:
        fields = check_fields(await _read_json(request), {**_GRID, **more}, needed)
        explorer = self._find(fields["run"])
        return fields, explorer, explorer.grid(fields["num_steps"], fields["scheme"])

    def _find(self, name: str | None) -> Explorer:
        if name is None:
            return next(iter(self.explorers.values()))
        if name not in self.explorers:
            raise InputError(
                f"there is no run {shorten(name)}; there are {', '.join(self.explorers)}"
            )
        return self.explorers[name]

    async def _answer(
        self,
        request: Request,
        worker: Worker,
        explorer: Explorer,
        key: tuple,
        compute: Callable[[], Answer],
    ) -> Response:
        """The answer, which is given at once if it was given before."""
        answer = explorer.kept(key)
        if answer is None:
            answer = explorer.keep(key, await worker.run(request, compute))
        return JSONResponse(answer)


async def _events(head: Answer, choices: AsyncIterator[Answer]) -> AsyncIterator[str]:
    """Server-sent events, as OpenAI has them. An error is the last event."""
    try:
        async for piece in choices:
            choice = {name: value for name, value in piece.items() if name != "tokens"}
            yield f"data: {json.dumps({**head, 'choices': [choice]})}\n\n"
    except ClientDisconnect:
        return
    except HTTPException as error:  # too many requests wait
        yield f"data: {json.dumps(_error_body(error.detail))}\n\n"
    yield "data: [DONE]\n\n"


async def _read_json(request: Request) -> object:
    """The body's JSON.

    Raises:
      HTTPException: if it is too long: status 413.
      InputError: if it isn't JSON.
    """
    body = b""
    async for chunk in request.stream():
        body += chunk
        if len(body) > MOST_BYTES:
            raise HTTPException(413, f"the body has more than {MOST_BYTES} bytes; shorten the text")
    try:
        return parse_json(body)
    except ValueError as error:
        raise InputError(f"the body is not JSON: {shorten(str(error))}") from error


def _error_body(message: str) -> Answer:
    return {"error": {"message": message, "type": "invalid_request_error"}}


async def _refuse_input(request: Request, error: Exception) -> Response:
    return JSONResponse(_error_body(str(error)), 400)


async def _refuse(request: Request, error: Exception) -> Response:
    status, detail = (
        (error.status_code, error.detail) if isinstance(error, HTTPException) else (499, "gone")
    )
    headers = getattr(error, "headers", None)
    return JSONResponse(_error_body(detail), status, headers)


async def _fail(request: Request, error: Exception) -> Response:
    """A bug in the program. Its message goes only to the terminal, since it may name paths."""
    body = _error_body("the server could not answer; its terminal says why")
    return JSONResponse(body, 500)


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
        ("/api/validation", server.validation, "POST"),
        ("/api/sensitivity", server.sensitivity, "POST"),
        ("/api/paths", server.paths, "POST"),
        ("/v1/models", server.models, "GET"),
        ("/v1/completions", server.completions, "POST"),
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
