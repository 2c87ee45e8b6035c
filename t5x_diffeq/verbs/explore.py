"""The page that shows trained runs at any depth, served until Ctrl-C."""

import secrets
import socket
from collections.abc import Sequence
from contextlib import suppress

import uvicorn
from absl.flags import FlagValues

from t5x_diffeq.explorer.answers import Explorer
from t5x_diffeq.explorer.app import make_app
from t5x_diffeq.inference.trained_run import load
from t5x_diffeq.runtime.console import say
from t5x_diffeq.runtime.errors import InputError
from t5x_diffeq.runtime.files import AnyPath, absolute_path, describe_error

_LOCAL = ("127.0.0.1", "::1", "localhost")


def explore(workdirs: Sequence[AnyPath], flags: FlagValues) -> int:
    """Serves the page of the runs, whose address it prints on standard output.

    Raises:
      InputError: if a workdir holds no run, or the address can't be used.
    """
    at = _bind(flags.host, flags.port)
    explorers: dict[str, Explorer] = {}
    for workdir in workdirs:
        name = _name_of(workdir, explorers)
        run = load(str(workdir), checkpoint=flags.checkpoint, averages=flags.averages)
        explorers[name] = Explorer(name, run)
    token = secrets.token_urlsafe(16)
    config = uvicorn.Config(
        make_app(explorers, token),
        log_level="warning",
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=1,
    )
    if flags.host not in _LOCAL:
        say(
            f"warning: --host={flags.host}: other machines can reach this server, and what they "
            "send and get, its token included, is not encrypted"
        )
    host = f"[{flags.host}]" if ":" in flags.host else flags.host
    print(f"http://{host}:{at.getsockname()[1]}/#token={token}", flush=True)
    say("open this address in a browser; Ctrl-C ends the server")
    with suppress(KeyboardInterrupt):  # the usual end
        uvicorn.Server(config).run(sockets=[at])
    return 0


def _bind(host: str, port: int) -> socket.socket:
    """A socket at the address, opened before the runs are loaded."""
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((host, port), family=family)
    except (OSError, ValueError) as error:  # a name that is none is a ValueError
        raise InputError(
            f"--host={host} --port={port} can't be used: {describe_error(error)}; --port=0 takes a "
            "port that is free"
        ) from error


def _name_of(workdir: AnyPath, taken: dict[str, Explorer]) -> str:
    """The folder's name, with a number if it isn't the first of that name."""
    base = absolute_path(workdir).name or "run"
    names = (base if n == 1 else f"{base}-{n}" for n in range(1, len(taken) + 2))
    return next(name for name in names if name not in taken)
