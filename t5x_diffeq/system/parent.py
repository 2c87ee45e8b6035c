"""Ends a command when the process that started it ends, for whatever reason."""

import ctypes
import os
import signal
from collections.abc import MutableMapping
from contextlib import suppress

from t5x_diffeq.system.console import log
from t5x_diffeq.system.environment import PARENT

_PR_SET_PDEATHSIG = 1  # of <sys/prctl.h>


def environment_of_child() -> dict[str, str]:
    """The environment for a command that calls `end_with_parent`."""
    return {**os.environ, PARENT.name: str(os.getpid())}


def end_with_parent(environment: MutableMapping[str, str]) -> None:
    """Asks Linux for a SIGTERM when the parent ends, if the parent made this environment.

    If the parent has ended already, this process ends here. The processes that this one starts
    don't inherit the request. Other systems than Linux have no such call.
    """
    parent = PARENT.read(environment)
    if parent is None:
        return
    del environment[PARENT.name]
    with suppress(AttributeError, OSError):  # another system
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:  # after the request: the parent may have ended before it
        log(f"error: {PARENT.name}={parent}: that process has ended, and this one ends with it")
        os.kill(os.getpid(), signal.SIGTERM)
