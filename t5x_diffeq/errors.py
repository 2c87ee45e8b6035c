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


def is_of_machinery(error: BaseException) -> bool:
    """Whether what failed is a process, a link, a device or a bucket, which may work again.

    The libraries raise these as JaxRuntimeError, ValueError, OSError or TimeoutError: what tells
    them from the program's own is their text.
    """
    if isinstance(error, InputError | RunError):
        return False
    if isinstance(error, MachineryError | ConnectionError | TimeoutError):
        return True
    text = str(error)
    return bool(CODES.search(text) or SIGNS.search(text))
