"""A Python that has imported JAX, Flax and Orbax already, for processes whose start isn't tested.

`executable` gives the path of a program that is used like `python`. It hands its arguments, its
environment, its folder and its open files to a server, which has imported those libraries once and
forks a child to run the program. It hands signals on to the child, and ends as the child ends. If
it is killed, the child is killed too.
"""

import atexit
import contextlib
import importlib
import json
import os
import runpy
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path

LIBRARIES = (  # this project's own modules are imported by each child, from where it runs
    *("jax", "jax.experimental.pallas", "flax.linen", "optax", "orbax.checkpoint", "grain"),
    *("scipy.linalg", "ml_collections.config_flags", "sentencepiece", "tensorboardX", "rich"),
    *("fsspec", "jaxtyping", "clu.metrics"),
)
HANDED_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGCONT)


@cache
def executable() -> str:
    """The path of the program; its server runs until this process ends."""
    folder = Path(tempfile.mkdtemp(prefix="warm-"))
    place, program = folder / "socket", folder / "python"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -IS {__file__} {place} "$@"\n')
    program.chmod(0o755)
    of_jax = [name for name in os.environ if name.startswith(("JAX_", "XLA_"))]
    environment = {name: value for name, value in os.environ.items() if name not in of_jax}
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(place))
    listener.listen(64)
    server = subprocess.Popen(
        [sys.executable, __file__, "--serve", str(listener.fileno())],
        env={**environment, "JAX_PLATFORMS": "cpu"},
        pass_fds=[listener.fileno()],
        stdin=subprocess.PIPE,  # closed when this process ends, however it ends
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    listener.close()
    atexit.register(server.kill)
    return str(program)


# ------------------------------------------------------------------------------- the program


def run_in_server(place: str, arguments: list[str]) -> None:
    """Has the server run a program, and ends as it ends."""
    if arguments[0].startswith("-") and arguments[0] != "-m":
        os.execv(sys.executable, [sys.executable, *arguments])
    pending: list[int] = []
    for number in HANDED_ON:
        signal.signal(number, lambda number, _: pending.append(number))
    server = socket.socket(socket.AF_UNIX)
    server.connect(place)
    socket.send_fds(server, [b"!"], [0, 1, 2])
    request = {"arguments": arguments, "environment": dict(os.environ), "folder": os.getcwd()}
    server.sendall(json.dumps(request).encode() + b"\n")
    answers = server.makefile()
    child = int(answers.readline())
    for number in HANDED_ON:
        signal.signal(number, lambda number, _: os.kill(child, number))
    for number in pending:
        os.kill(child, number)
    status = int(answers.readline())
    if status < 0:
        signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    os._exit(status)


# -------------------------------------------------------------------------------- the server


def serve(listener: socket.socket) -> dict:
    """Forks a child for each program; returns what to run, in the child alone."""
    watched = selectors.DefaultSelector()
    clients: dict[int, socket.socket] = {}  # by the child's number
    ended, note = os.pipe()
    os.set_blocking(note, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(note)
    for each in (listener, ended, sys.stdin):
        watched.register(each, selectors.EVENT_READ)
    while True:
        for key, _ in watched.select():
            if key.fileobj is sys.stdin:
                for child in clients:
                    os.kill(child, signal.SIGKILL)
                os._exit(0)
            elif key.fileobj == ended:
                os.read(ended, 4096)
                for child, status in iter(_ended_child, None):
                    if client := clients.pop(child, None):
                        watched.unregister(client)
                        _tell(client, os.waitstatus_to_exitcode(status))
                        client.close()
            elif key.fileobj is listener:
                client = listener.accept()[0]
                files = socket.recv_fds(client, 1, 3)[1]
                request = json.loads(client.makefile().readline())
                if not (child := os.fork()):
                    signal.set_wakeup_fd(-1)
                    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                    os.setpgid(0, 0)
                    for number, file in enumerate(files):
                        os.dup2(file, number)
                    # An object that is collected later would close its number, by then another
                    # file's.
                    for each in (watched, listener, client, *clients.values()):
                        each.close()
                    os.closerange(3, 1024)
                    return request
                for file in files:
                    os.close(file)
                clients[child] = client
                watched.register(client, selectors.EVENT_READ, child)
                _tell(client, child)
            else:  # the program was killed
                os.kill(key.data, signal.SIGKILL)
                client = clients.pop(key.data)
                watched.unregister(client)
                client.close()


def _ended_child() -> tuple[int, int] | None:
    try:
        child, status = os.waitpid(-1, os.WNOHANG)
    except ChildProcessError:
        return None
    return (child, status) if child else None


def _tell(client: socket.socket, number: int) -> None:
    with contextlib.suppress(OSError):  # the program was killed
        client.sendall(b"%d\n" % number)


def become(request: dict) -> None:
    """Runs the program in this process, as `python` would."""
    os.environ.clear()
    os.environ.update(request["environment"])
    os.chdir(request["folder"])
    read_settings_of_jax()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    first, *rest = request["arguments"]
    paths = [path for path in os.environ.get("PYTHONPATH", "").split(":") if path]
    if first == "-m":
        sys.path[:1] = [os.getcwd(), *paths]
        sys.argv = rest
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    else:
        sys.path[:1] = [str(Path(first).resolve().parent), *paths]
        sys.argv = [first, *rest]
        runpy.run_path(first, run_name="__main__")


def read_settings_of_jax() -> None:
    """JAX reads its variables when it is imported, which was before they were set."""
    import jax

    for name in ("jax_platforms", "jax_compilation_cache_dir"):
        jax.config.update(name, os.environ.get(name.upper()))


if __name__ == "__main__":
    if sys.argv[1] != "--serve":
        run_in_server(sys.argv[1], sys.argv[2:])
    for library in LIBRARIES:
        importlib.import_module(library)
    become(serve(socket.socket(fileno=int(sys.argv[2]))))
