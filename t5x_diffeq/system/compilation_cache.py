"""Keeps compiled programs on disk, so that a second start compiles nothing; counts those read."""

import importlib.util
import os
import stat
import tempfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import jax

from t5x_diffeq.system.console import log

_FOLDER = "~/.cache/t5x_diffeq/compilation"
_BYTES = 10 * 2**30  # in total; the least recently used entries are evicted
_SECONDS = 10  # to wait for another process that reads or writes an entry; JAX waits as long
_COMPILED_OR_READ = "/jax/core/compile/backend_compile_duration"
_READ = "/jax/compilation_cache/cache_hits"


@dataclass
class ProgramCounts:
    """Counts the programs that this process has needed since the cache was enabled.

    `read` of the `needed` programs came from the cache, and the others were compiled. `cache` says
    where the cache is, or why it is off.
    """

    needed: int = 0
    read: int = 0
    cache: str = ""

    def __str__(self) -> str:
        compiled = self.needed - self.read
        return f"programs: {self.read} read, {compiled} compiled; compilation cache: {self.cache}"


def enable_cache() -> ProgramCounts:
    """Enables JAX's persistent compilation cache, or says in one line why it can't be used.

    The cache is in JAX_COMPILATION_CACHE_DIR, which may be in a bucket, or else in a folder that
    only this user can write to. A cache holds native code: whoever can write to it can run code
    here. So it is never in a workdir, which others may write to, unless the variable says so. With
    several CPU devices the cache is off: a program that was read runs its collectives in a
    different order on each device, and they deadlock (jax 0.10.2).
    """
    programs = _count_programs()
    folder = Path(_FOLDER).expanduser()
    # By default, JAX keeps only programs that took a second or more to compile.
    if "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS" not in os.environ:
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    if jax.default_backend() == "cpu" and jax.device_count() > 1:
        programs.cache = "off, as several CPU devices can't share programs that are read"
        jax.config.update("jax_enable_compilation_cache", False)
    elif given := jax.config.values["jax_compilation_cache_dir"]:
        programs.cache = given
    elif reason := _prepare(folder):
        programs.cache = "off"
        log(f"warning: compiled programs are not kept, which makes each start slow: {reason}")
    else:
        programs.cache = str(folder)
        jax.config.update("jax_compilation_cache_dir", str(folder))
        jax.config.update("jax_compilation_cache_max_size", _BYTES)
    return programs


@cache
def _count_programs() -> ProgramCounts:
    programs = ProgramCounts()

    def count_needed(event: str, duration_secs: float, **_: object) -> None:
        programs.needed += event == _COMPILED_OR_READ

    def count_read(event: str, **_: object) -> None:
        programs.read += event == _READ

    jax.monitoring.register_event_duration_secs_listener(count_needed)
    jax.monitoring.register_event_listener(count_read)
    return programs


def _prepare(folder: Path) -> str | None:
    """Makes the folder, writable by this user only; returns why it can't be used, or None."""
    if importlib.util.find_spec("filelock") is None:
        return "JAX needs the package filelock for it; pip install filelock"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        facts = folder.stat()
        if facts.st_uid != os.getuid():
            return f"{folder} belongs to another user"
        if stat.S_IMODE(facts.st_mode) & 0o022:
            return f"{folder} can be written by others; chmod 700 makes it this user's alone"
        tempfile.TemporaryFile(dir=folder).close()
        _remove_half_written(folder)
    except OSError as error:
        return f"{folder} can't be used: {error.strerror or error}"
    return None


def _remove_half_written(folder: Path) -> None:
    """Removes entries of processes that were killed while they wrote.

    JAX writes an entry first, and then its time of use. If the time is missing, JAX (0.12) never
    replaces the entry, and writes no other entries beside it.
    """
    from filelock import FileLock

    with FileLock(folder / ".lockfile", timeout=_SECONDS):  # its Timeout is an OSError
        for entry in folder.glob("*-cache"):
            if not entry.with_name(f"{entry.name.removesuffix('-cache')}-atime").exists():
                entry.unlink()
