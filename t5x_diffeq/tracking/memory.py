"""How much memory this process and its devices hold."""

import os
from pathlib import Path

import jax

_STATM = Path("/proc/self/statm")  # of Linux; its second number is the resident pages
_GIB = 2**30


def memory_in_use() -> dict[str, float]:
    """Memory in GiB, as far as the platform tells.

    Returns:
      `host_memory_gib`: resident memory of this process; `device_memory_gib` and
        `device_memory_peak_gib`: the most that any of its devices holds, and has held.
    """
    gibibytes = {}
    if _STATM.exists():
        pages = int(_STATM.read_text("utf-8").split()[1])
        gibibytes["host_memory_gib"] = pages * os.sysconf("SC_PAGE_SIZE") / _GIB
    stats = [each for device in jax.local_devices() if (each := device.memory_stats())]
    for name, key in (
        ("device_memory_gib", "bytes_in_use"),
        ("device_memory_peak_gib", "peak_bytes_in_use"),
    ):
        sizes = [each[key] for each in stats if key in each]
        if sizes:
            gibibytes[name] = max(sizes) / _GIB
    return gibibytes
