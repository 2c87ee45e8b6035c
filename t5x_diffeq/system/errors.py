"""The errors with which a verb fails with one clear line (see `command_line`)."""

import errno
import json
import os
import re
import socket
import ssl
import sysconfig
import traceback
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path


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
# EAGAIN is that of a fork on a machine that runs too many processes. ENOLCK (there is no service of
# locks) and ENODEV stay until somebody mends the machine.
_PASSING = {
    getattr(errno, name)
    for name in (
        *("ECONNABORTED", "ECONNREFUSED", "ECONNRESET", "ENOTCONN", "EPIPE", "ESHUTDOWN"),
        *("EHOSTDOWN", "EHOSTUNREACH", "ENETDOWN", "ENETRESET", "ENETUNREACH", "ETIMEDOUT"),
        *("ECOMM", "ENOLINK", "ENONET", "EPROTO"),
        *("EIO", "EREMOTEIO", "ESTALE", "ENOTEMPTY", "EBUSY", "EAGAIN", "EINTR", "EHWPOISON"),
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
# What TensorStore writes behind a message: the error number and the HTTP status of its cause.
_NUMBER = re.compile(r"\[os_error_code='(\d+)'\]")
_STATUS = re.compile(r"\[http_response_code='(\d+)'\]")
# Where such a number is missing: a message that begins with a code and has an error number's text.
_LAST_WORDS = re.compile(
    rf"^[A-Z_]+: .*: ({'|'.join(sorted(re.escape(os.strerror(n)) for n in _PASSING))})\b", re.DOTALL
)
NO_GPU = "No visible GPU devices"  # a driver that is starting, or a machine without any
_SIGNS = re.compile(  # under any code
    r"\bGloo [\w ]+ failed|Connection (closed by|reset by|refused)|Socket closed|\bGOAWAY\b"
    r"|coordination service|NCCL operation .* failed|ncclRemoteError|ncclSystemError"
    r"|Timed out while waiting for \w+ barrier|request from a newer incarnation"
    r"|TPU initialization failed|halted unexpectedly|Driver must be Open to DMA map"
    r"|ECC_UNCORRECTABLE|uncorrectable ECC error"
    r"|Failed to parse (object|response) metadata"  # TensorStore's, of a portal's page
    r"|StatusCode\.(UNAVAILABLE|DEADLINE_EXCEEDED)"  # of gRPC
    r"|check your connection"  # of huggingface_hub, which has no copy of a file either
    r"|Worker process was terminated unexpectedly"  # of Grain, killed for its memory or by a person
    rf"|{NO_GPU}"
)
# Of the compilers, of the installation, of a full disk and of the user's own code and settings: a
# retry would fail the same way, whatever the code, and whatever came of it.
_FINAL = re.compile(
    r"RET_CHECK failure|Mosaic|ptxas (exited|fatal)|[Uu]nable to load NCCL"
    r"|NCCL operation .* failed: invalid (usage|argument)|cannot open shared object file"
    r"|libdevice not found|unsupported toolchain|Autotuning failed|No valid config found"
    r"|CpuCallback error|CUDA_ERROR_ILLEGAL_ADDRESS|no kernel image is available"
    r"|No space left on device|shared memory segment /dev/shm"
    r"|[Oo]ffline[ _]?[Mm]ode ?[Ii]s ?[Ee]nabled|outgoing traffic has been disabled"
    r"|CERTIFICATE_VERIFY_FAILED|certificate verify failed"
    r"|Anonymous caller"  # of a bucket's answers with status 401 the one of no expired token
)

_REFUSED = re.compile(r"JAX flag \w+|environment 'JAX_\w+'")  # of the values of JAX's variables
# Texts of jaxlib 0.11.2 on an H100 whose memory another process held.
_GPU_FULL = re.compile(
    r"no supported devices found for platform CUDA|cuBlas allocation failure"
    r"|CUDA_ERROR_OUT_OF_MEMORY"
)

# Libraries that talk to servers; their errors mean that no server answered, but for ValueErrors (a
# bad address).
_CLIENTS = ("aiohttp", "httpx", "httpx2", "requests", "urllib3")
_NO_ANSWER = (  # of google.auth, gcsfs and http.client
    *("TransportError", "ChecksumError", "IncompleteRead", "BadStatusLine"),
)
_READ_ANSWERS = (*_CLIENTS, "gcsfs", "google", "huggingface_hub")
_PASSING_TLS = (ssl.SSLEOFError, ssl.SSLZeroReturnError, ssl.SSLSyscallError)
_PASSING_TLS_WORDS = re.compile(
    r"BAD_RECORD_MAC|bad record mac|UNEXPECTED_EOF|RECORD_LAYER_FAILURE"
)
# What these say is about the program; an error that was being handled is no reason for them.
_MISTAKES = (
    *(ArithmeticError, AssertionError, AttributeError, LookupError, NameError),
    *(NotImplementedError, SyntaxError, TypeError),
)


def is_infrastructure_failure(error: BaseException) -> bool:
    """Whether a process, a link, a device or a bucket failed, so that a retry may succeed.

    The errors that this one was raised for are looked at, too, the nearest first. Of each, the most
    certain fact decides: the class, the error number, the HTTP status, and the text last. A
    permanent failure that is taken for a temporary one occurs again at the same step: see
    `recurrence`.
    """
    if isinstance(error, InfrastructureError):
        return True
    causes = list(_causes(error))
    if any(_is_final(each) for each in causes):
        return False
    known = (passes for each in causes if (passes := _passes(each)) is not None)
    # Of a library that has given up, whose last error is unknown.
    return next(known, type(causes[-1]).__name__ == "RetryError")


def _causes(error: BaseException) -> Iterator[BaseException]:
    """The error, then those that it was raised for, wherever a library keeps them."""
    coming, seen = [error], set()
    while coming:
        each = coming.pop(0)
        if id(each) in seen:
            continue
        seen.add(id(each))
        if type(each).__name__ != "JaxStackTraceBeforeTransformation":  # whose text is source code
            yield each
        is_of_program = isinstance(each, (InputError, RunError, *_MISTAKES))
        handled = None if each.__suppress_context__ or is_of_program else each.__context__
        last = getattr(each, "last_attempt", None)  # of tenacity
        last = last.exception() if isinstance(last, Future) else getattr(each, "cause", None)
        several = each.exceptions if isinstance(each, BaseExceptionGroup) else ()
        links = (each.__cause__, handled, last, *several, *each.args)
        coming += [link for link in links if isinstance(link, BaseException)]


def _is_final(error: BaseException) -> bool:
    """Whether no retry can succeed, whatever was raised because of this error."""
    if (
        isinstance(error, OSError)
        and error.errno is not None
        and not isinstance(error, ssl.SSLError)
    ):
        return False  # the number says it, and the text has a file's name
    named = type(error).__name__ in ("SSLCertVerificationError", "OfflineModeIsEnabled")
    return named or _FINAL.search(str(error)) is not None


def _passes(error: BaseException) -> bool | None:
    """Whether a retry may succeed, by this error alone; None if it doesn't say."""
    if isinstance(error, InputError | RunError):
        return None
    if isinstance(error, ssl.SSLError):
        return isinstance(error, _PASSING_TLS) or bool(_PASSING_TLS_WORDS.search(str(error)))
    passing = (InfrastructureError, ConnectionError, TimeoutError)
    if isinstance(error, passing) or _is_without_answer(error):
        return True
    if (status := _http_status(error)) is not None:
        return _passes_status(status, type(error).__module__.startswith("gcsfs"))
    if isinstance(error, socket.gaierror):
        return error.errno == socket.EAI_AGAIN  # the name server doesn't answer
    if isinstance(error, OSError) and error.errno is not None:
        return error.errno in _PASSING
    if type(error).__name__ == "BrokenProcessPool":  # a process of it was killed
        return True
    return _passes_text(str(error), type(error))


def _passes_text(text: str, kind: type) -> bool | None:
    if (number := system_error_in(text)) is not None:
        return number in _PASSING
    if status := _STATUS.search(text):
        return _passes_status(int(status[1]), True)
    if _SIGNS.search(text) or _LAST_WORDS.search(text):
        return True
    code = _CODES.search(text)
    # SentencePiece has the same codes, in a RuntimeError. JAX raises that type for backends alone.
    return True if code and (kind is not RuntimeError or code[1] is not None) else None


def system_error_in(text: str) -> int | None:
    """The number of the system's error that a text of TensorStore has; None if it has none."""
    number = _NUMBER.search(text)
    return int(number[1]) if number else None


def _passes_status(status: int, is_bucket: bool) -> bool:
    """Whether an HTTP status is temporary; that of a bucket also for a token that has expired."""
    return status in (408, 425, 429) or status >= 500 or (is_bucket and status == 401)


def advice(error: BaseException) -> str:
    """What to look at first, for a failure whose message doesn't say it; else nothing."""
    if NO_GPU in str(error):
        return "; if this machine has no GPU, unset JAX_PLATFORMS, or set it to cpu"
    if not _GPU_FULL.search(str(error)):
        return ""
    return (
        "; check with nvidia-smi whether another process holds the GPU's memory, of which JAX "
        "takes 75% to 92% when it starts: end that process, or start each with "
        "XLA_CLIENT_MEM_FRACTION=0.4; if there is none, lower that fraction"
    )


def describe_foreign(error: BaseException) -> str:
    """One line for an error in another package's code: its kind, its text, and the line there."""
    ours = str(Path(__file__).parents[1]) + os.sep
    libraries = [sysconfig.get_path(name) + os.sep for name in ("stdlib", "purelib", "platlib")]
    frames = traceback.extract_tb(error.__traceback__)
    theirs = [each for each in frames if not each.filename.startswith((ours, "<", *libraries))]
    at = f" ({theirs[-1].filename}, line {theirs[-1].lineno})" if theirs else ""
    return f"{type(error).__name__}: {' '.join(str(error).split())}{at}"


def platform_error(error: BaseException) -> InputError | None:
    """The error if a variable of JAX has a value that it, or this machine, doesn't take; else None.

    For `cuda` without a GPU JAX (0.10.2 and 0.12.0) raises an AssertionError without words.
    """
    frames = traceback.extract_tb(error.__traceback__)
    wordless = isinstance(error, AssertionError) and any(
        frame.filename.endswith("jax/_src/xla_bridge.py") for frame in frames[-1:]
    )
    if refused := _REFUSED.search(str(error)):
        name = refused[0].split()[-1].strip("'").upper()
        if name in os.environ:
            return InputError(f"{name}={os.environ[name]}: {error}; correct or unset it")
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
