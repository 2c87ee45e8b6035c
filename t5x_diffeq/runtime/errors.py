"""The errors with which a verb fails with one clear line (see `command_line`)."""

import os
import re
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


# The gRPC codes with which XLA and TensorStore prefix a message, JAX's own words before them. The
# others (INVALID_ARGUMENT, RESOURCE_EXHAUSTED, ...) are the program's own fault: a retry would fail
# the same way.
_BACKEND = "Unable to initialize backend"
_CODES = re.compile(
    rf"^({_BACKEND} '\w+': )?"
    r"(UNAVAILABLE|DEADLINE_EXCEEDED|ABORTED|CANCELLED|INTERNAL|DATA_LOSS)\b"
)
_SIGNS = re.compile(  # under any code
    r"\bGloo [\w ]+ failed|Connection (closed by|reset by|refused)|Socket closed"
    r"|coordination service|NCCL operation .* failed|ncclRemoteError|ncclSystemError"
    r"|Timed out while waiting for \w+ barrier"
    r"|TPU initialization failed|halted unexpectedly|ECC_UNCORRECTABLE|uncorrectable ECC error"
)
# Of the compilers and of the installation: a retry would fail the same way, whatever the code.
_OF_PROGRAM = re.compile(
    r"RET_CHECK failure|Mosaic failed to compile|ptxas (exited|fatal)|[Uu]nable to load NCCL"
    r"|NCCL operation .* failed: invalid (usage|argument)|cannot open shared object file"
)

# Texts of jaxlib 0.11.2 on an H100 whose memory another process held.
_GPU_FULL = re.compile(
    r"no supported devices found for platform CUDA|cuBlas allocation failure"
    r"|CUDA_ERROR_OUT_OF_MEMORY"
)

# HTTP libraries whose errors mean that no server answered, but for ValueErrors (a bad address).
_CLIENTS = ("aiohttp", "httpx", "httpx2", "requests", "urllib3")
_NO_ANSWER = ("TransportError", "ChecksumError")  # of google.auth and gcsfs


def is_infrastructure_failure(error: BaseException) -> bool:
    """Whether a process, a link, a device or a bucket failed, so that a retry may succeed.

    The libraries raise these as JaxRuntimeError, ValueError, OSError or TimeoutError: only their
    text distinguishes them from the program's own. A server's answer is judged by its HTTP status.
    """
    if isinstance(error, InputError | RunError):
        return False
    if isinstance(error, InfrastructureError | ConnectionError | TimeoutError):
        return True
    status = _http_status(error)
    if status is not None:
        return status in (408, 429) or status >= 500
    text = str(error)
    if _OF_PROGRAM.search(text):
        return False
    if _SIGNS.search(text) or _is_without_answer(error):
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
    """The message for a platform that JAX_PLATFORMS names and this machine lacks, if it is that.

    For `cuda` without a GPU JAX (0.10.2 and 0.12.0) raises an AssertionError without words.
    """
    frames = traceback.extract_tb(error.__traceback__)
    wordless = isinstance(error, AssertionError) and any(
        frame.filename.endswith("jax/_src/xla_bridge.py") for frame in frames[-1:]
    )
    if not wordless and (not str(error).startswith(_BACKEND) or is_infrastructure_failure(error)):
        return None
    reason = "" if wordless else f" ({error})"
    platforms = os.environ.get("JAX_PLATFORMS", "")
    extra = "tpu" if platforms.startswith("tpu") else "gpu"
    return InputError(
        f"JAX_PLATFORMS={platforms}: JAX finds no such device on this machine{reason}; if there is "
        f"one, pip install 't5x_diffeq[{extra}]'; if not, unset JAX_PLATFORMS, or set it to cpu"
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
    """Whether an HTTP library got no complete answer from a server."""
    library = type(error).__module__.partition(".")[0]
    if library in _CLIENTS:
        return not isinstance(error, ValueError)
    return type(error).__name__ in _NO_ANSWER
