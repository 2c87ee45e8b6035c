"""Hashes the contents of files and tables, wherever they lie and whenever they were written.

A table is hashed once on a machine: the hash is kept in the user's cache (`staging.cache_folder`)
until a file of the table has another size or time. Files that are read while a model trains may be
terabytes, so only the name, the size and both ends of each file are hashed.
"""

import json
import os
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from t5x_diffeq.data.documents import text_as_bytes
from t5x_diffeq.system.console import Progress
from t5x_diffeq.system.errors import RunError
from t5x_diffeq.system.files import AnyPath, digest, read_json_object, write_whole
from t5x_diffeq.system.staging import cache_folder

if TYPE_CHECKING:
    import datasets

_END_BYTES = 2**16  # enough for the statistics of a parquet file's columns, which are at its end
_THREADS = 16  # they mostly wait for a file system


def hash_of_ends(paths: Iterable[AnyPath]) -> str:
    """A hash of the names and sizes of files, and of the first and last 64 KiB of each."""
    with ThreadPoolExecutor(_THREADS) as pool:
        return digest(pool.map(_ends_of, paths))


def _ends_of(path: AnyPath) -> bytes:
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        parts = [path.name.encode(), str(size).encode()]
        for start in (0, max(0, size - _END_BYTES)):
            file.seek(start)
            parts.append(file.read(_END_BYTES))
    return digest(parts).encode()


def hash_of_table(table: "datasets.Dataset") -> str:
    """A hash of the names of a table's columns and of their values, row by row."""
    facts = [table._fingerprint, *map(_state_of, sorted(x["filename"] for x in table.cache_files))]
    record = cache_folder() / f"contents-{digest(map(str.encode, facts))[:32]}.json"
    with suppress(OSError, ValueError, KeyError):
        return str(read_json_object(record)["sha256"])
    with Progress("hashing the documents", len(table), "documents") as progress:
        sha256 = digest(_rows_of(table, progress))
    with suppress(OSError, RunError):  # without a record, the next start hashes the table again
        record.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        write_whole(record, json.dumps({"sha256": sha256}).encode())
    return sha256


def _state_of(name: str) -> str:
    facts = Path(name).stat()
    return f"{name} {facts.st_size} {facts.st_mtime_ns}"


def _rows_of(table: "datasets.Dataset", progress: Progress) -> Iterator[bytes]:
    """Each row as text that doesn't depend on the file's layout or the library's version."""
    done = 0
    for batch in table.with_format("arrow").iter(batch_size=1000):
        for row in batch.cast(text_as_bytes(batch.schema)).to_pylist():
            yield repr(row).encode()
        done += len(batch)
        progress.update(done)
