"""Keeps freed memory in the process where XLA computes on CPUs.

XLA allocates and frees the buffers of every step. glibc returns large blocks to the kernel at once,
and the kernel hands them out again page by page, each zeroed at a page fault. These faults take a
quarter of the CPU time of a step of configs/tiny.py. mallopt(3) makes glibc keep freed blocks. It
affects only this process and only later allocations, so it must be called before XLA starts its
threads.
"""

import ctypes
import glob
import os
from collections.abc import Mapping

from t5x_diffeq.system.environment import KEEP_MEMORY

ACCELERATORS = ("/dev/nvidia[0-9]*", "/dev/kfd", "/dev/accel*", "/dev/vfio/[0-9]*")
# From malloc.h. Blocks of any size come from the heap, which never shrinks.
# Threads share one heap: heaps of their own would be in memory that is mapped and unmapped.
_M_TRIM_THRESHOLD, _M_MMAP_MAX, _M_ARENA_MAX = -1, -4, -8
_SETTINGS = {_M_MMAP_MAX: 0, _M_TRIM_THRESHOLD: -1, _M_ARENA_MAX: 1}

is_configured = False  # whether this process keeps freed memory


def keep_freed_memory(environment: Mapping[str, str]) -> bool:
    """Configures glibc's allocator if `is_wanted`; returns whether it is now configured."""
    global is_configured
    if not is_configured and is_wanted(environment):
        mallopt = ctypes.CDLL(None).mallopt
        is_configured = all(mallopt(parameter, value) for parameter, value in _SETTINGS.items())
    return is_configured


def is_wanted(environment: Mapping[str, str]) -> bool:
    """Whether XLA will compute on CPUs, with glibc, and the user has not turned this off."""
    is_off = KEEP_MEMORY.read(environment) == 0
    return not is_off and has_glibc() and computes_on_cpus(environment.get("JAX_PLATFORMS", ""))


def has_glibc() -> bool:
    """Whether this is Linux with glibc."""
    return "CS_GNU_LIBC_VERSION" in getattr(os, "confstr_names", {})


def computes_on_cpus(platforms: str) -> bool:
    """Whether JAX will use CPUs: what JAX_PLATFORMS says, else whether there is no accelerator."""
    if platforms:
        return platforms.split(",")[0] == "cpu"
    return not any(map(glob.glob, ACCELERATORS))
