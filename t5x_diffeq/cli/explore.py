"""Serves a page that shows a run at any depth: --workdir=DIR [--workdir=DIR ...].

Prints the page's address, and serves it until Ctrl-C. The page shows the loss of each token of a
text, what each node predicts, and a continuation. Several runs are compared side by side.
Its endpoints are described in docs/depth.md.
Needs Starlette and uvicorn: pip install -e '.[explore]'.
"""

import secrets
import socket
from contextlib import suppress

from t5x_diffeq.cli import flag_values
from t5x_diffeq.cli.verb_flags import VerbFlags
from t5x_diffeq.system.console import log, print_result
from t5x_diffeq.system.errors import InputError
from t5x_diffeq.system.extras import need_package
from t5x_diffeq.system.files import AnyPath, absolute_path, describe_error

_LOCAL = ("127.0.0.1", "::1", "localhost")
FLAGS = VerbFlags(__name__)
_WORKDIR = FLAGS.define_texts("workdir", "Folder of a run; may be repeated.")
_HOST = FLAGS.define_text(
    "host", "Address to listen on; 0.0.0.0 also serves other machines.", "127.0.0.1"
)
_PORT = FLAGS.define_integer("port", "Port to listen on; 0 takes a free one.", 8765, 0, 65535)
_CHECKPOINT = FLAGS.define_checkpoint()
_AVERAGES = FLAGS.define_averages()


def main() -> None:
    """Runs the verb."""
    workdirs = flag_values.parse_folders(_WORKDIR, "explore")
    for package in ("starlette", "uvicorn"):
        need_package(package, "explore")

    import uvicorn

    from t5x_diffeq.inference.explorer.answers import Explorer  # importing JAX takes seconds
    from t5x_diffeq.inference.explorer.app import make_app
    from t5x_diffeq.inference.trained_run import load

    listener = _bind(_HOST.value, _PORT.value)
    explorers: dict[str, Explorer] = {}
    for workdir in workdirs:
        name = _name_of(workdir, explorers)
        run = load(str(workdir), checkpoint=_CHECKPOINT.value, averages=_AVERAGES.value)
        explorers[name] = Explorer(name, run)
    token = secrets.token_urlsafe(16)
    config = uvicorn.Config(
        make_app(explorers, token),
        log_level="warning",
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=1,
    )
    if _HOST.value not in _LOCAL:
        log(
            f"warning: --host={_HOST.value}: other machines can reach this server, and what they "
            "send and get, its token included, is not encrypted"
        )
    host = f"[{_HOST.value}]" if ":" in _HOST.value else _HOST.value
    print_result(f"http://{host}:{listener.getsockname()[1]}/#token={token}")
    log("open this address in a browser; Ctrl-C ends the server")
    with suppress(KeyboardInterrupt):  # the usual end
        uvicorn.Server(config).run(sockets=[listener])


def _bind(host: str, port: int) -> socket.socket:
    """A socket at the address, opened before the runs are loaded."""
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((host, port), family=family)
    except (OSError, ValueError) as error:  # an invalid host name is a ValueError
        way_out = "--port=0 takes a port that is free"
        if isinstance(error, socket.gaierror | ValueError):
            way_out = "give an address of this machine, such as --host=127.0.0.1 or 0.0.0.0"
        raise InputError(
            f"--host={host} --port={port} can't be used: {describe_error(error)}; {way_out}"
        ) from error


def _name_of(workdir: AnyPath, taken) -> str:
    """The folder's name, with a number if it isn't the first of that name."""
    base = absolute_path(workdir).name or "run"
    names = (base if n == 1 else f"{base}-{n}" for n in range(1, len(taken) + 2))
    return next(name for name in names if name not in taken)
