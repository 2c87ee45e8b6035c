"""How a verb that fails ends: a clear last line, an exit status, word to the other processes."""

import os
import signal
import sys
import sysconfig
import time
import traceback
from contextlib import suppress

from t5x_diffeq.cluster import peers
from t5x_diffeq.system import console, errors
from t5x_diffeq.system.failed_imports import IMPORT_ERRORS, explain_import
from t5x_diffeq.system.files import describe_error

_SECONDS_FOR_OTHERS = 3  # for other processes to say why they ended, before we blame this one


def find_peers() -> peers.Peers | None:
    """The connections to the other processes, if this one has joined any."""
    processes = sys.modules.get("t5x_diffeq.cluster.processes")
    return processes.peers if processes else None


def fail(status: int, error: object) -> int:
    """Prints the last line, and tells the other processes; returns the status."""
    others = find_peers()
    failure = peers.Failure(others.index if others else 0, status, str(error)).unless_repeated()
    if others:
        others.send_failure(failure)
    peers.LAST_LINE.print(failure)
    return failure.status


def end_of(error: BaseException) -> int:
    """Ends a verb that raised `error`: prints the last line, and returns the exit status.

    The status is never 0, even after `sys.exit(0)`: only a verb that returns is done. An InputError
    or a RunError has the status of its class, unless an infrastructure failure caused it, such as a
    bucket or a network disk that does not answer.
    """
    unwritten = console.results_error() if isinstance(error, OSError) else None
    if unwritten:
        return fail_to_write(unwritten)
    if isinstance(error, KeyboardInterrupt):
        return fail(peers.EXIT_INTERRUPTED, "stopped by Ctrl-C")
    if isinstance(error, errors.InputError | errors.RunError):
        status = 2 if isinstance(error, errors.InputError) else 1
        if errors.is_infrastructure_failure(error):
            status = peers.EXIT_INFRASTRUCTURE
        return fail(status, _with_notes(str(error), error))
    if not isinstance(error, Exception):
        return fail(1, _explain_exit(error))
    return _fail_unforeseen(error)


def _with_notes(message: str, error: BaseException) -> str:
    """The message with our notes, which name the hook that failed; not with JAX's and Grain's."""
    notes = (each for each in getattr(error, "__notes__", ()) if each.startswith("in the hook "))
    return "; ".join([message, *notes])


def _explain_exit(error: BaseException) -> str:
    """One line for code that wants to end the process, such as by `sys.exit`: where it stands."""
    library = (sysconfig.get_path("stdlib") + os.sep, "<")
    frames = traceback.extract_tb(error.__traceback__)
    others = [each for each in frames if not each.filename.startswith(library)]
    at = (others or frames)[-1]
    message = (
        f"{at.filename}, line {at.lineno}, raised {type(error).__name__}({error}): code that a "
        "verb calls can't end it; return there, or raise an error that says what is wrong"
    )
    return _with_notes(message, error)


def fail_to_write(error: OSError) -> int:
    """`fail` for results that can't be written to standard output.

    If the reader has ended, as in `generate | head -1`, SIGPIPE ends this process without a word.
    """
    if isinstance(error, BrokenPipeError):
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGPIPE)
    return fail(1, f"standard output can't be written: {describe_error(error)}")


def _fail_unforeseen(error: Exception) -> int:
    """`fail` for an error of a library, of the system or of our own, with its traceback.

    An infrastructure failure, a platform without devices or a failed import gets one line instead.
    """
    if find_peers():
        time.sleep(_SECONDS_FOR_OTHERS)  # another may have failed first, and will end this one
    if isinstance(error, errors.InfrastructureError):
        return fail(peers.EXIT_INFRASTRUCTURE, error)
    if errors.is_infrastructure_failure(error):
        who = "a bucket or another server does not answer: " if errors.is_of_server(error) else ""
        message = f"{who}{describe_error(error)}{errors.advice(error)}"
        return fail(peers.EXIT_INFRASTRUCTURE, f"{message}; the same command continues the run")
    unusable = isinstance(error, IMPORT_ERRORS) and explain_import(error)
    if refused := errors.platform_error(error) or unusable:
        return fail(2, refused)
    if isinstance(error, PermissionError) and error.filename is not None:
        return fail(2, f"{error.filename}: {describe_error(error)}; change that, or name another")
    with suppress(OSError):
        traceback.print_exception(error)
    if others := find_peers():
        others.wait_for_all()  # a lost process is noticed later than the errors that it causes
    return fail(1, _with_notes(f"{type(error).__name__}: {error}", error))
