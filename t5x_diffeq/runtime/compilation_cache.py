"""Compiled steps kept on disk, so that a run continued compiles nothing anew."""

import os
import stat
from pathlib import Path

import jax

FOLDER = "~/.cache/t5x_diffeq/compilation"
BYTES = 10 * 2**30  # in all; those unused for longest make room


def keep_compiled() -> str:
    """Switches the persistent compilation cache on; says where it is, or why there is none.

    It lies where JAX_COMPILATION_CACHE_DIR says, else in a folder of this user alone: a cache is
    native code, and whoever can write it runs code here. So a workdir, which others may write, is
    no place for it unless that variable says so. On CPU with several devices there is none: a
    reloaded program runs its collectives in another order on each device, and they wait for each
    other forever (jax 0.10.2).
    """
    if given := jax.config.values["jax_compilation_cache_dir"]:
        return given
    if jax.default_backend() == "cpu" and jax.device_count() > 1:
        return "off: several CPU devices can't share reloaded programs"
    folder = Path(FOLDER).expanduser()
    if reason := unsafe(folder):
        return f"off: {folder} {reason}"
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_compilation_cache_max_size", BYTES)
    return str(folder)


def unsafe(folder: Path) -> str | None:
    """Makes the folder, of this user alone; says why it can't be one, or None."""
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
