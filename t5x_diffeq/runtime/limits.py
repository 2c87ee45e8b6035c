"""The limits that the shell sets on a process."""

import resource

from t5x_diffeq.runtime.errors import InputError

_FILES, _FEWEST_FILES = 4096, 256  # that a run may have open: wanted, and needed
_LEAST_BYTES = 2 * 2**30  # of memory for JAX and its compiler


def raise_limits() -> None:
    """Raises the number of open files as far as it may, and checks that the limits suffice.

    Raises:
      InputError: if they don't; without this, libraries end in tracebacks or crash.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = _FILES if hard == resource.RLIM_INFINITY else min(_FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    if most < _FEWEST_FILES:
        raise InputError(
            f"ulimit -Hn is {hard}, and a run needs {_FEWEST_FILES} open files; raise it"
        )
    for letter, kind in (("d", resource.RLIMIT_DATA), ("v", resource.RLIMIT_AS)):
        allowed, _ = resource.getrlimit(kind)
        if allowed != resource.RLIM_INFINITY and allowed < _LEAST_BYTES:
            raise InputError(
                f"ulimit -{letter} is {allowed // 1024} KiB, and JAX with its compiler needs at "
                f"least {_LEAST_BYTES // 1024}; raise it"
            )
