"""Silences libraries, whose messages a user should not see, or see only once."""

import logging as python_logging
import os
import re
import sys
import warnings

from absl import logging

from t5x_diffeq.system import console

_CACHE_FAILED = "Error (reading|writing) persistent compilation cache"
_cache_failures: set[str] = set()


def silence_libraries() -> None:
    """Silences the libraries, so that a run shows only our lines; Python's -W shows warnings."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    logging.set_verbosity(logging.FATAL)  # Orbax's errors reach us as exceptions
    python_logging.getLogger("jax").setLevel(python_logging.ERROR)
    for library in ("asyncio", "gcsfs", "google"):
        python_logging.getLogger(library).setLevel(python_logging.CRITICAL)
    sys.unraisablehook = _show_unless_loop_closed
    if not sys.warnoptions:
        warnings.simplefilter("ignore")
        # JAX goes on without its cache, and then each start compiles everything again.
        warnings.filterwarnings("always", message=_CACHE_FAILED)
        warnings.showwarning = _log_first_failure


def _show_unless_loop_closed(unraisable: "sys.UnraisableHookArgs") -> None:
    """Shows an error that nothing can catch, unless it is of TensorStore's threads.

    After a failed save, these threads report each remaining file to an event loop, which Orbax has
    already closed.
    """
    if str(unraisable.exc_value) != "Event loop is closed":
        sys.__unraisablehook__(unraisable)


def _log_first_failure(message: Warning | str, *_: object, **__: object) -> None:
    """Prints JAX's first warning about reading and its first about writing, each in one line."""
    failure = re.match(_CACHE_FAILED, str(message))
    if failure and failure[0] not in _cache_failures:
        _cache_failures.add(failure[0])
        console.log(f"warning: {' '.join(str(message).split())}")
