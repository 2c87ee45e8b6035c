"""Keeps compiled steps on disk, so that a resumed run recompiles nothing."""

import os
import stat
from pathlib import Path

import jax

_FOLDER = "~/.cache/t5x_diffeq/compilation"
_BYTES = 10 * 2**30  # in total; the least recently used entries are evicted


def enable_cache() -> str:
    """Enables the persistent compilation cache; returns where it is, or why there is none.

    It is in JAX_COMPILATION_CACHE_DIR, else in a folder that only this user can write to: it holds
    native code, and whoever can write to it can run code here. So it is never in a workdir, which
    others may write to, unless that variable says so. On CPU with several devices there is none: a
    reloaded program runs its collectives in a different order on each device, and they deadlock
    (jax 0.10.2).
    """
    if given := jax.config.values["jax_compilation_cache_dir"]:
        return given
    if jax.default_backend() == "cpu" and jax.device_count() > 1:
        return "off: several CPU devices can't share reloaded programs"
    folder = Path(_FOLDER).expanduser()
    if reason := _make_private_folder(folder):
        return f"off: {folder} {reason}"
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_compilation_cache_max_size", _BYTES)
    return str(folder)


def _make_private_folder(folder: Path) -> str | None:
    """Makes the folder, writable by this user only; returns why it can't be used, or None."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        facts = folder.stat()
    except OSError as error:
        return f"can't be made: {error.strerror}"
    if facts.st_uid != os.getuid():
        return "belongs to another user"
    if stat.S_IMODE(facts.st_mode) & 0o022:
        return "can be written by others; chmod 700 makes it this user's alone"
    return None
