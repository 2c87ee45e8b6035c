"""Files that are either whole or not there."""

import fcntl
import hashlib
import io
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from t5x_diffeq.errors import InputError, RunError


def write_whole(path: Path, content: bytes) -> None:
    """Writes `path` so that it never exists half-written, whatever kills the process.

    The content reaches the disk under another name in the same folder first.

    Raises:
      RunError: if it can't be written; what was there is kept.
    """
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with partial.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise RunError(f"{path} can't be written: {error.strerror}") from error


def digest(parts: Iterable[bytes]) -> str:
    """SHA-256 over parts and their boundaries, in hexadecimal."""
    total = hashlib.sha256()
    for part in parts:
        total.update(len(part).to_bytes(8, "little"))
        total.update(part)
    return total.hexdigest()


def file_digest(path: Path) -> str:
    """SHA-256 of a file, in hexadecimal.

    Raises:
      RunError: if it can't be read.
    """
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise RunError(f"{path} can't be read: {error.strerror}") from error


def save_array(path: Path, array: np.ndarray) -> None:
    """`np.save`, whole or not at all."""
    content = io.BytesIO()
    np.save(content, array)
    write_whole(path, content.getvalue())


@contextmanager
def held(lock: Path, what: str) -> Iterator[None]:
    """Holds a file against other processes; a killed one lets go by itself.

    Args:
      lock: the file; its folder is made.
      what: names the thing held, for the message.

    Raises:
      InputError: if it can't be made, or another process holds it.
    """
    try:
        lock.parent.mkdir(parents=True, exist_ok=True)
        file = lock.open("w")
    except OSError as error:
        raise InputError(f"{what} can't be written: {error.strerror}") from error
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise InputError(
                f"another process is writing {what}; wait for it or stop it"
            ) from error
        yield
