"""The errors that end a verb with one clear line (see `command_line`), and which are temporary."""

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


OWN_ERRORS = (InputError, RunError, InfrastructureError)  # their messages need no explanation

# The system's temporary errors: of links, of machines, and of file systems that they mount. A fork
# fails with EAGAIN on a machine that runs too many processes. ENOLCK (no lock service) and ENODEV
# last until somebody mends the machine.
_TEMPORARY = {
    getattr(errno, name)
    for name in (
        *("ECONNABORTED", "ECONNREFUSED", "ECONNRESET", "ENOTCONN", "EPIPE", "ESHUTDOWN"),
        *("EHOSTDOWN", "EHOSTUNREACH", "ENETDOWN", "ENETRESET", "ENETUNREACH", "ETIMEDOUT"),
        *("ECOMM", "ENOLINK", "ENONET", "EPROTO"),
        *("EIO", "EREMOTEIO", "ESTALE", "ENOTEMPTY", "EBUSY", "EAGAIN", "EINTR", "EHWPOISON"),
    )
    if hasattr(errno, name)
}
# The gRPC codes of temporary failures. XLA and TensorStore begin a message with a code, and JAX may
# put its own words before it. With the other codes (INVALID_ARGUMENT, RESOURCE_EXHAUSTED,
# DATA_LOSS, ...) the program or the data is at fault: a retry would fail the same way.
_BACKEND = "Unable to initialize backend"
_CODES = re.compile(
    rf"^({_BACKEND} '\w+': )?"
    r"(UNAVAILABLE|UNAUTHENTICATED|DEADLINE_EXCEEDED|ABORTED|CANCELLED|INTERNAL)\b"
)
# TensorStore appends to a message the error number and the HTTP status of its cause.
_NUMBER = re.compile(r"\[os_error_code='(\d+)'\]")
_STATUS = re.compile(r"\[http_response_code='(\d+)'\]")
# If the number is missing, the message has its text: a code, and further on a temporary error's
# text.
_LAST_WORDS = re.compile(
    rf"^[A-Z_]+: .*: ({'|'.join(sorted(re.escape(os.strerror(n)) for n in _TEMPORARY))})\b",
    re.DOTALL,
)
NO_GPU = "No visible GPU devices"  # a driver that is starting, or a machine without any
_SIGNS = re.compile(  # of a temporary failure, whatever the code
    r"\bGloo [\w ]+ failed|Connection (closed by|reset by|refused)|Socket closed|\bGOAWAY\b"
    r"|coordination service|NCCL operation .* failed|ncclRemoteError|ncclSystemError"
    r"|Timed out while waiting for \w+ barrier|request from a newer incarnation"
    r"|TPU initialization failed|halted unexpectedly|Driver must be Open to DMA map"
    r"|ECC_UNCORRECTABLE|uncorrectable ECC error"
    r"|Failed to parse (object|response) metadata"  # TensorStore got the page of a login portal
    r"|StatusCode\.(UNAVAILABLE|DEADLINE_EXCEEDED)"  # gRPC
    r"|check your connection"  # huggingface_hub has no connection, and no copy of the file
    r"|Worker process was terminated unexpectedly"  # Grain's was killed for memory or by a person
    rf"|{NO_GPU}"
)
# Failures of the compilers, of the installation, of a full disk, and of the user's code and
# settings. A retry would fail the same way, whatever their code, and whatever error they caused.
_FINAL = re.compile(
    r"RET_CHECK failure|Mosaic|ptxas (exited|fatal)|[Uu]nable to load NCCL"
    r"|NCCL operation .* failed: invalid (usage|argument)|cannot open shared object file"
    r"|libdevice not found|unsupported toolchain|Autotuning failed|No valid config found"
    r"|CpuCallback error|CUDA_ERROR_ILLEGAL_ADDRESS|no kernel image is available"
    r"|No space left on device|shared memory segment /dev/shm"
    r"|[Oo]ffline[ _]?[Mm]ode ?[Ii]s ?[Ee]nabled|outgoing traffic has been disabled"
    r"|CERTIFICATE_VERIFY_FAILED|certificate verify failed"
    r"|Anonymous caller"  # a bucket's 401 without a token; any other 401 means an expired token
)

_REFUSED = re.compile(r"JAX flag \w+|environment 'JAX_\w+'")  # JAX names a variable that it refuses
_OLD_PLATFORM = "JAX_PLATFORM_NAME"  # before JAX_PLATFORMS
# Texts of jaxlib 0.11.2 on an H100 whose memory another process held.
_GPU_FULL = re.compile(
    r"no supported devices found for platform CUDA|cuBlas allocation failure"
    r"|CUDA_ERROR_OUT_OF_MEMORY"
)

# Libraries that talk to servers. Their errors mean that no server answered, except ValueErrors,
# which mean a bad address.
_CLIENTS = ("aiohttp", "httpx", "httpx2", "requests", "urllib3")
_NO_ANSWER = (  # of google.auth, gcsfs and http.client
    *("TransportError", "ChecksumError", "IncompleteRead", "BadStatusLine"),
)
_READ_ANSWERS = (*_CLIENTS, "gcsfs", "google", "huggingface_hub")  # they parse servers' JSON
_TEMPORARY_TLS = (ssl.SSLEOFError, ssl.SSLZeroReturnError, ssl.SSLSyscallError)
_TEMPORARY_TLS_WORDS = re.compile(
    r"BAD_RECORD_MAC|bad record mac|UNEXPECTED_EOF|RECORD_LAYER_FAILURE"
)
# Mistakes of the program: if one is raised while another error is handled, that error isn't its
# cause.
_MISTAKES = (
    *(ArithmeticError, AssertionError, AttributeError, LookupError, NameError),
    *(NotImplementedError, SyntaxError, TypeError),
)


def is_infrastructure_failure(error: BaseException) -> bool:
    """Whether a process, a link, a device or a bucket failed, so that a retry may succeed.

    The causes of the error are examined, too, the nearest first. For each error the most certain
    fact decides: the class, the error number, the HTTP status, and last the text. If a permanent
    failure is taken for a temporary one, it occurs again at the same step: see `recurrence`.
    """
    if isinstance(error, InfrastructureError):
        return True
    causes = list(_causes(error))
    if any(_is_final(each) for each in causes):
        return False
    known = (answer for each in causes if (answer := _is_temporary(each)) is not None)
    # With a RetryError a library says that it has given up; its last error is unknown here.
    return next(known, type(causes[-1]).__name__ == "RetryError")


def failure_kind(error: BaseException) -> type[RuntimeError]:
    """The class of the error to raise because of another one: a retry may succeed, or not."""
    return InfrastructureError if is_infrastructure_failure(error) else RunError


def _causes(error: BaseException) -> Iterator[BaseException]:
    """The error, then its causes, wherever a library keeps them."""
    waiting, seen = [error], set()
    while waiting:
        current = waiting.pop(0)
        if id(current) in seen:
            continue
        seen.add(id(current))
        # The text of this class is source code.
        if type(current).__name__ != "JaxStackTraceBeforeTransformation":
            yield current
        is_of_program = isinstance(current, (InputError, RunError, *_MISTAKES))
        handled = None if current.__suppress_context__ or is_of_program else current.__context__
        last = getattr(current, "last_attempt", None)  # of tenacity
        last = last.exception() if isinstance(last, Future) else getattr(current, "cause", None)
        group = current.exceptions if isinstance(current, BaseExceptionGroup) else ()
        causes = (current.__cause__, handled, last, *group, *current.args)
        waiting += [cause for cause in causes if isinstance(cause, BaseException)]


def _is_final(error: BaseException) -> bool:
    """Whether no retry can succeed, whatever was raised because of this error."""
    if (
        isinstance(error, OSError)
        and error.errno is not None
        and not isinstance(error, ssl.SSLError)
    ):
        return False  # the number decides: a file's name in the text may look like a final failure
    named = type(error).__name__ in ("SSLCertVerificationError", "OfflineModeIsEnabled")
    return named or _FINAL.search(str(error)) is not None


def _is_temporary(error: BaseException) -> bool | None:
    """Whether a retry may succeed, judged by this error alone; None if it doesn't tell."""
    if isinstance(error, InputError | RunError):
        return None
    if isinstance(error, ssl.SSLError):
        return isinstance(error, _TEMPORARY_TLS) or bool(_TEMPORARY_TLS_WORDS.search(str(error)))
    temporary = (InfrastructureError, ConnectionError, TimeoutError)
    if isinstance(error, temporary) or _is_without_answer(error):
        return True
    if (status := _http_status(error)) is not None:
        return _is_temporary_status(status, type(error).__module__.startswith("gcsfs"))
    if isinstance(error, socket.gaierror):
        return error.errno == socket.EAI_AGAIN  # the name server doesn't answer
    if isinstance(error, OSError) and error.errno is not None:
        return error.errno in _TEMPORARY
    if type(error).__name__ == "BrokenProcessPool":  # one of its processes was killed
        return True
    return _is_temporary_text(str(error), type(error))


def _is_temporary_text(text: str, kind: type) -> bool | None:
    if (number := system_error_in(text)) is not None:
        return number in _TEMPORARY
    if status := _STATUS.search(text):
        return _is_temporary_status(int(status[1]), True)
    if _SIGNS.search(text) or _LAST_WORDS.search(text):
        return True
    code = _CODES.search(text)
    # SentencePiece's RuntimeErrors begin with the same codes. JAX raises a RuntimeError only for a
    # backend, which group 1 then names.
    return True if code and (kind is not RuntimeError or code[1] is not None) else None


def system_error_in(text: str) -> int | None:
    """The system's error number in a text of TensorStore; None if the text has none."""
    number = _NUMBER.search(text)
    return int(number[1]) if number else None


def _is_temporary_status(status: int, is_bucket: bool) -> bool:
    """Whether an HTTP status is temporary. A bucket's 401 is, because it means an expired token."""
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
    """One line for an error in a user's code: its class, its text, and the file and line there."""
    ours = str(Path(__file__).parents[1]) + os.sep
    libraries = [sysconfig.get_path(name) + os.sep for name in ("stdlib", "purelib", "platlib")]
    frames = traceback.extract_tb(error.__traceback__)
    theirs = [each for each in frames if not each.filename.startswith((ours, "<", *libraries))]
    at = f" ({theirs[-1].filename}, line {theirs[-1].lineno})" if theirs else ""
    text = " ".join(str(error).split())
    if isinstance(error, NotImplementedError) and not text and frames:
        text = f"it has no {frames[-1].name} of its own"
    return f"{type(error).__name__}: {text}{at}"


def platform_error(error: BaseException) -> InputError | None:
    """An InputError if JAX or this machine refuses the value of a variable of JAX; else None.

    For `cuda` without a GPU JAX (0.10.2 and 0.12.0) raises an AssertionError without a message.
    """
    frames = traceback.extract_tb(error.__traceback__)
    wordless = isinstance(error, AssertionError) and any(
        frame.filename.endswith("jax/_src/xla_bridge.py") for frame in frames[-1:]
    )
    if refused := _REFUSED.search(str(error)):
        name = refused[0].split()[-1].strip("'").upper()
        if name in os.environ:
            return InputError(f"{name}={os.environ[name]}: {error}; correct or unset it")
    if re.match("Unknown backend:? '", str(error)) and (named := os.environ.get(_OLD_PLATFORM)):
        return InputError(f"{_OLD_PLATFORM}={named}: {error}; unset it")
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
    if isinstance(error, json.JSONDecodeError):  # an answer cut off, or the page of a login portal
        at_work = (frame.f_globals for frame, _ in traceback.walk_tb(error.__traceback__))
        return any(str(each.get("__name__")).startswith(_READ_ANSWERS) for each in at_work)
    if type(error).__name__ == "RefreshError":  # a server gave no new token
        return type(error.__cause__).__name__ in _NO_ANSWER or getattr(error, "retryable", False)
    return type(error).__name__ in _NO_ANSWER
