"""Files that are either whole or not there."""

import hashlib
import os
from collections.abc import Iterable
from pathlib import Path


def write_whole(path: Path, content: bytes) -> None:
    """Writes `path` so that it never exists half-written, whatever kills the process.

    The content reaches the disk under another name in the same folder first.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    with partial.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, path)


def digest(parts: Iterable[bytes]) -> str:
    """SHA-256 over parts and their boundaries, in hexadecimal."""
    total = hashlib.sha256()
    for part in parts:
        total.update(len(part).to_bytes(8, "little"))
        total.update(part)
    return total.hexdigest()
