"""Deadlines of tests on a machine that may be busy."""

import os
import time


def patience(seconds: float) -> float:
    """How long this machine may take for what takes an idle one `seconds`.

    The factor is measured: how many threads wanted each core in the last minute.
    """
    return seconds * max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))


def wait_for(is_so, seconds: float = 600) -> None:
    """Waits until it is."""
    deadline = time.monotonic() + patience(seconds)
    while not is_so():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.1)
