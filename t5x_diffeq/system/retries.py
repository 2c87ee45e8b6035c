"""Tries work again if a server or a link failed for a moment."""

import time
from collections.abc import Callable
from typing import TypeVar

from t5x_diffeq.system.console import write
from t5x_diffeq.system.errors import is_infrastructure_failure
from t5x_diffeq.system.files import describe_error

PAUSES = (0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0)  # seconds between tries
_Result = TypeVar("_Result")


def retry(work: Callable[[], _Result], what: str) -> _Result:
    """The result of `work`, which is tried again after each pause while the infrastructure fails.

    Before each pause a warning says `what` (such as "X can't be read") and the reason. The error of
    the last try is raised, and an error of another kind at once.
    """
    for tried, pause in enumerate(PAUSES, 1):
        try:
            return work()
        except Exception as error:  # of any library
            if not is_infrastructure_failure(error):
                raise
            reason = describe_error(error)
        number = f"{tried} of {len(PAUSES)}"
        write(f"warning: {what}: {reason}; trying again in {pause:g} s ({number})")
        time.sleep(pause)
    return work()
