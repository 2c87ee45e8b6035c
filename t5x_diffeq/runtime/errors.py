"""The ways in which a verb fails with one clear line (see `command_line`)."""

import re


class InputError(ValueError):
    """The arguments, the config or the input can't be used: exit status 2.

    The message is one line that names the key, the value and the way out.
    """


class RunError(RuntimeError):
    """The run failed after it had started well: exit status 1."""


class MachineryError(RuntimeError):
    """A process, a link, a device or a bucket failed, not the run: exit status 175.

    The same command, started again, continues the run.
    """


# gRPC's codes as XLA and TensorStore put them before a message. The others (INVALID_ARGUMENT,
# RESOURCE_EXHAUSTED, ...) are the program's own doing: again would be the same.
CODES = re.compile(r"^(UNAVAILABLE|DEADLINE_EXCEEDED|ABORTED|CANCELLED|INTERNAL|DATA_LOSS)\b")
SIGNS = re.compile(
    r"\bGloo \w+ failed|Connection (closed by|reset by|refused)|Socket closed|coordination service"
    r"|NCCL operation .* failed|ncclRemoteError|ncclSystemError"
    r"|Timed out while waiting for \w+ barrier"
)


# Of these libraries, what is no answer of a server; their mistakes in an address are ValueErrors.
CLIENTS = ("aiohttp", "requests", "urllib3")
NO_ANSWER = ("TransportError", "ChecksumError")  # of google.auth and gcsfs


def is_of_machinery(error: BaseException) -> bool:
    """Whether what failed is a process, a link, a device or a bucket, which may work again.

    The libraries raise these as JaxRuntimeError, ValueError, OSError or TimeoutError: what tells
    them from the program's own is their text. What a server has answered is decided by its status.
    """
    if isinstance(error, InputError | RunError):
        return False
    if isinstance(error, MachineryError | ConnectionError | TimeoutError):
        return True
    status = http_status(error)
    if status is not None:
        return status in (408, 429) or status >= 500
    text = str(error)
    return bool(CODES.search(text) or SIGNS.search(text)) or is_without_answer(error)


def http_status(error: BaseException) -> int | None:
    """The status with which a server refused, from 400 to 599; None if the error has none."""
    found = (getattr(error, name, None) for name in ("code", "status"))
    return next((n for n in found if isinstance(n, int) and 400 <= n < 600), None)


def is_of_server(error: BaseException) -> bool:
    """Whether it is the refusal of a server over HTTP, or the lack of its answer."""
    return http_status(error) is not None or is_without_answer(error)


def is_without_answer(error: BaseException) -> bool:
    """Whether a library that speaks HTTP got no whole answer from a server."""
    library = type(error).__module__.partition(".")[0]
    if library in CLIENTS:
        return not isinstance(error, ValueError)
    return type(error).__name__ in NO_ANSWER
