"""The errors with which a verb fails with one clear line (see `command_line`)."""

import errno
import json
import os
import re
import socket
import ssl
import traceback


class InputError(ValueError):
    """The arguments, the config or the input is invalid: exit status 2.

    The message is one line that names the key, the value and what to do instead.
    """


class RunError(RuntimeError):
    """The run failed after it had started well: exit status 1."""


class InfrastructureError(RuntimeError):
    """Infrastructure failure (a process, link, device or bucket): exit status 175.

    The same command continues the run.
    """


# The errors of the system that pass: of links, of machines, and of what is mounted from them.
_PASSING = {
    getattr(errno, name)
    for name in (
        *("ECONNABORTED", "ECONNREFUSED", "ECONNRESET", "ENOTCONN", "EPIPE", "ESHUTDOWN"),
        *("EHOSTDOWN", "EHOSTUNREACH", "ENETDOWN", "ENETRESET", "ENETUNREACH", "ETIMEDOUT"),
        *("EIO", "EREMOTEIO", "ESTALE"),
    )
    if hasattr(errno, name)
}
# The gRPC codes with which XLA and TensorStore prefix a message, JAX's own words before them. The
# others (INVALID_ARGUMENT, RESOURCE_EXHAUSTED, DATA_LOSS, ...) are the program's own fault, or the
# data's: a retry would fail the same way.
_BACKEND = "Unable to initialize backend"
_CODES = re.compile(
    rf"^({_BACKEND} '\w+': )?"
    r"(UNAVAILABLE|UNAUTHENTICATED|DEADLINE_EXCEEDED|ABORTED|CANCELLED|INTERNAL)\b"
)
_SIGNS = re.compile(  # under any code
    r"\bGloo [\w ]+ failed|Connection (closed by|reset by|refused)|Socket closed|\bGOAWAY\b"
    r"|coordination service|NCCL operation .* failed|ncclRemoteError|ncclSystemError"
    r"|Timed out while waiting for \w+ barrier|request from a newer incarnation"
    r"|TPU initialization failed|halted unexpectedly|Driver must be Open to DMA map"
    r"|ECC_UNCORRECTABLE|uncorrectable ECC error"
    r"|Failed to parse (object|response) metadata"  # TensorStore's, of a portal's page
    r"|http_response_code='401'"  # likewise, of a token that has expired
    r"|Worker process was terminated unexpectedly"  # of Grain, killed for its memory or by a person
)
# Of the compilers, of the installation and of the user's own code: a retry would fail the same way,
# whatever the code.
_OF_PROGRAM = re.compile(
    r"RET_CHECK failure|Mosaic|ptxas (exited|fatal)|[Uu]nable to load NCCL"
    r"|NCCL operation .* failed: invalid (usage|argument)|cannot open shared object file"
    r"|libdevice not found|unsupported toolchain|Autotuning failed|No valid config found"
    r"|CpuCallback error|CUDA_ERROR_ILLEGAL_ADDRESS"
)

# Texts of jaxlib 0.11.2 on an H100 whose memory another process held.
_GPU_FULL = re.compile(
    r"no supported devices found for platform CUDA|cuBlas allocation failure"
    r"|CUDA_ERROR_OUT_OF_MEMORY"
)

# Libraries that talk to servers; their errors mean that no server answered, but for ValueErrors (a
# bad address).
_CLIENTS = ("aiohttp", "httpx", "httpx2", "requests", "urllib3")
_NO_ANSWER = ("TransportError", "ChecksumError")  # of google.auth and gcsfs
_READ_ANSWERS = (*_CLIENTS, "gcsfs", "google", "huggingface_hub")
# Of a bucket's answers with status 401 the one that isn't of a token that has expired.
_WITHOUT_TOKEN = "Anonymous caller"
_PASSING_TLS = (ssl.SSLEOFError, ssl.SSLZeroReturnError, ssl.SSLSyscallError)


def is_infrastructure_failure(error: BaseException) -> bool:
    """Whether a process, a link, a device or a bucket failed, so that a retry may succeed.

    The most certain fact decides: the class, the error number, the HTTP status, and the text last.
    A permanent failure that is taken for a temporary one occurs again at the same step: see
    `recurrence`.
    """
    if isinstance(error, InputError | RunError):
        return False
    passing = (InfrastructureError, ConnectionError, TimeoutError, *_PASSING_TLS)
    if isinstance(error, passing) or _is_without_answer(error):
        return True
    status = _http_status(error)
    if status is not None:
        is_bucket = type(error).__module__.startswith("gcsfs")
        expired = is_bucket and status == 401 and _WITHOUT_TOKEN not in str(error)
        return expired or status in (408, 425, 429) or status >= 500
    if isinstance(error, socket.gaierror):
        return error.errno == socket.EAI_AGAIN  # the name server doesn't answer
    if isinstance(error, OSError) and error.errno is not None:
        return error.errno in _PASSING
    text = str(error)
    if _OF_PROGRAM.search(text) or _WITHOUT_TOKEN in text:
        return False
    if _SIGNS.search(text):
        return True
    code = _CODES.search(text)
    # SentencePiece has the same codes, in a RuntimeError. JAX raises that type for backends alone.
    return code is not None and (type(error) is not RuntimeError or code[1] is not None)


def advice(error: BaseException) -> str:
    """What to look at first, for a failure whose message doesn't say it; else nothing."""
    if not _GPU_FULL.search(str(error)):
        return ""
    return (
        "; check with nvidia-smi whether another process holds the GPU's memory, of which JAX "
        "takes 75% to 92% when it starts: end that process, or start each with "
        "XLA_CLIENT_MEM_FRACTION=0.4; if there is none, lower that fraction"
    )


def platform_error(error: BaseException) -> InputError | None:
    """The error if JAX_PLATFORMS names a platform that this machine doesn't have; else None.

    For `cuda` without a GPU JAX (0.10.2 and 0.12.0) raises an AssertionError without words.
    """
    frames = traceback.extract_tb(error.__traceback__)
    wordless = isinstance(error, AssertionError) and any(
        frame.filename.endswith("jax/_src/xla_bridge.py") for frame in frames[-1:]
    )
    if not wordless and (not str(error).startswith(_BACKEND) or is_infrastructure_failure(error)):
        return None
    from t5x_diffeq.system.extras import install_command  # which imports this module

    reason = "" if wordless else f" ({error})"
    platforms = os.environ.get("JAX_PLATFORMS", "")
    install = install_command("tpu" if platforms.startswith("tpu") else "gpu")
    return InputError(
        f"JAX_PLATFORMS={platforms}: JAX finds no such device on this machine{reason}; if there is "
        f"one, {install}; if not, unset JAX_PLATFORMS, or set it to cpu"
    )


def _http_status(error: BaseException) -> int | None:
    """The HTTP status of a server's error, from 400 to 599; None if the error has none."""
    numbers = [getattr(error, name, None) for name in ("code", "status")]
    numbers.append(getattr(getattr(error, "response", None), "status_code", None))
    return next((n for n in numbers if isinstance(n, int) and 400 <= n < 600), None)


def is_of_server(error: BaseException) -> bool:
    """Whether an HTTP server refused the request or did not answer."""
    return _http_status(error) is not None or _is_without_answer(error)


def _is_without_answer(error: BaseException) -> bool:
    """Whether a library got no complete answer from a server."""
    library = type(error).__module__.partition(".")[0]
    if library in _CLIENTS:
        return _http_status(error) is None and not isinstance(error, ValueError)
    if isinstance(error, json.JSONDecodeError):  # cut off, or of a portal that wants a login
        at_work = (frame.f_globals for frame, _ in traceback.walk_tb(error.__traceback__))
        return any(str(each.get("__name__")).startswith(_READ_ANSWERS) for each in at_work)
    if type(error).__name__ == "RefreshError":  # of the token, which a server near this one gives
        return type(error.__cause__).__name__ in _NO_ANSWER or getattr(error, "retryable", False)
    return type(error).__name__ in _NO_ANSWER
