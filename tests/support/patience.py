"""Deadlines of tests on a machine that may be busy."""

import os


def patience(seconds: float) -> float:
    """How long this machine may take for what takes an idle one `seconds`.

    The factor is measured: how many threads wanted each core in the last minute.
    """
    return seconds * max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))
