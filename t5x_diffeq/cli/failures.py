"""How a verb that fails ends: a clear last line, an exit status, word to the other processes."""

import os
import signal
import sys
import time
import traceback
from contextlib import suppress

from t5x_diffeq.cluster.peers import EXIT_INFRASTRUCTURE, LAST_LINE, Failure, Peers
from t5x_diffeq.system.errors import (
    InfrastructureError,
    InputError,
    RunError,
    advice,
    is_infrastructure_failure,
    is_of_server,
    platform_error,
)
from t5x_diffeq.system.files import describe_error

_SECONDS_FOR_OTHERS = 3  # for other processes to say why they ended, before we blame this one


def find_peers() -> Peers | None:
    """The connections to the other processes, if this one has joined any."""
    processes = sys.modules.get("t5x_diffeq.cluster.processes")
    return processes.peers if processes else None


def fail(status: int, error: object) -> int:
    """Prints the last line, and tells the other processes; returns the status."""
    others = find_peers()
    failure = Failure(others.index if others else 0, status, str(error)).unless_repeated()
    if others:
        others.send_failure(failure)
    LAST_LINE.print(failure)
    return failure.status


def _with_notes(error: Exception) -> str:
    """Its message, with our notes that say where it was raised; JAX and Grain add others."""
    notes = (each for each in getattr(error, "__notes__", ()) if each.startswith("in the hook "))
    return "; ".join([str(error), *notes])


def fail_foreseen(error: InputError | RunError) -> int:
    """`fail` for an error whose message this package wrote.

    If a file can't be read or written because its bucket or network disk does not answer, the
    problem may be temporary, and the status is that of a `InfrastructureError`.
    """
    if error.__cause__ is not None and is_infrastructure_failure(error.__cause__):
        return fail(EXIT_INFRASTRUCTURE, _with_notes(error))
    return fail(2 if isinstance(error, InputError) else 1, _with_notes(error))


def fail_to_write(error: OSError) -> int:
    """`fail` for results that standard output doesn't take.

    If their reader has ended, as in `generate | head -1`, nobody wants the rest.
    """
    if isinstance(error, BrokenPipeError):
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGPIPE)
    return fail(1, f"standard output can't be written: {describe_error(error)}")


def fail_unforeseen(error: Exception) -> int:
    """`fail` for an error of a library, of the system or of our own, with its traceback.

    Failures of the infrastructure, and what the platform refuses, get one line instead.
    """
    if find_peers():
        time.sleep(_SECONDS_FOR_OTHERS)  # another may have failed first, and will end this one
    if isinstance(error, InfrastructureError):
        return fail(EXIT_INFRASTRUCTURE, error)
    if is_infrastructure_failure(error):
        who = "a bucket or another server does not answer: " if is_of_server(error) else ""
        message = f"{who}{describe_error(error)}{advice(error)}"
        return fail(EXIT_INFRASTRUCTURE, f"{message}; the same command continues the run")
    if refused := platform_error(error):
        return fail(2, refused)
    with suppress(OSError):
        traceback.print_exception(error)
    if others := find_peers():
        others.wait_for_all()  # one may be lost, which takes longer to notice than its consequences
    return fail(1, f"{type(error).__name__}: {_with_notes(error)}")
