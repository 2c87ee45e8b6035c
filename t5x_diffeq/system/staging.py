"""Local copies of objects in buckets, in a cache of bounded size.

T5X_DIFFEQ_CACHE is the folder of the cache. T5X_DIFFEQ_CACHE_GIB is its size, by default 20 or half
of the free space on its disk. Whenever a copy is used, it must have the checksum that the bucket
reports, or the known hash of the object. Copies stay until a person deletes them.
"""

import shutil
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from t5x_diffeq.system import files
from t5x_diffeq.system.console import format_count, log
from t5x_diffeq.system.environment import CACHE, CACHE_GIB
from t5x_diffeq.system.errors import InfrastructureError, InputError, RunError
from t5x_diffeq.system.files import AnyPath
from t5x_diffeq.system.locks import hold_local_lock

_FOLDER = "~/.cache/t5x_diffeq"
DEFAULT_GIB = 20  # the tokens of OpenWebText are 17
_THREADS = 8
_NAME_LENGTH = 32  # of a copy's folder


class NoRoomError(InputError):
    """The objects don't fit into the cache, or into what other copies leave of it."""


@dataclass(frozen=True)
class Copy:
    """An object, and its copy in a folder that is named after the object and its version.

    `crc32c` is the checksum that the bucket reports, `sha256` the hash that it must have, if known.
    """

    source: AnyPath
    size: int
    file: Path
    crc32c: str
    sha256: str | None


def stage(paths: Sequence[AnyPath], sha256: Sequence[str] | None = None) -> list[Path]:
    """Local paths of the files; files in buckets are copied once. `sha256`: their known hashes.

    Raises:
      NoRoomError: if they don't fit into the cache.
      InputError: if one does not exist, or doesn't match its hash.
      RunError: if one can't be copied.
      InfrastructureError: if the bucket does not answer.
    """
    hashes: Sequence[str | None] = sha256 or [None] * len(paths)
    copies = [
        _copy_of(path, hash)
        for path, hash in zip(paths, hashes, strict=True)
        if files.is_in_bucket(path)
    ]
    if not copies:
        return list(paths)
    lock, name = cache_folder() / ".lock", f"T5X_DIFFEQ_CACHE={cache_folder()}"
    with hold_local_lock(lock, name, wait=True):  # a process that waits here then finds the copies
        missing = [copy for copy in copies if not _is_good(copy)]
        _check_room(missing)
        if missing:
            size = format_count(sum(copy.size for copy in missing))
            log(f"copying {size} bytes from {missing[0].source.parent} to {cache_folder()}")
        with ThreadPoolExecutor(_THREADS) as pool:
            list(pool.map(_fetch, missing))
    local = {copy.source: copy.file for copy in copies}
    return [local.get(path, path) for path in paths]


def _copy_of(path: AnyPath, sha256: str | None) -> Copy:
    with files.bucket_errors(f"{path} can't be read", InputError):
        try:
            facts = files.bucket_files().info(str(path))
        except FileNotFoundError as error:
            raise InputError(f"{path}: there is no such object") from error
    version = files.digest([str(path).encode(), str(facts.get("generation")).encode()])
    file = cache_folder() / version[:_NAME_LENGTH] / path.name
    return Copy(path, int(facts["size"]), file, facts["crc32c"], sha256)


def cache_folder() -> Path:
    """The folder of the cache."""
    return CACHE.read() or Path(_FOLDER).expanduser()


def _cache_bytes(cached: int) -> int:
    """The cache's maximum size: the variable's, else `DEFAULT_GIB`, or less on a small disk."""
    if (gib := CACHE_GIB.read()) is not None:
        return int(gib * 2**30)
    return min(int(DEFAULT_GIB * 2**30), (shutil.disk_usage(cache_folder()).free + cached) // 2)


def _is_good(copy: Copy) -> bool:
    if copy.sha256 and copy.file.exists():
        return files.file_digest(copy.file) == copy.sha256
    return copy.file.exists() and files.crc32c(copy.file) == copy.crc32c


def _check_room(missing: list[Copy]) -> None:
    """Checks that the missing copies fit into the cache beside the copies in it."""
    if not missing:
        return
    sizes = {copy.file: copy.size for copy in missing}
    present = cache_folder().glob(f"{'?' * _NAME_LENGTH}/*")  # other caches may be in the folder
    wanted = sum(sizes.values())
    cached = sum(file.stat().st_size for file in present if file not in sizes)
    most = _cache_bytes(cached)
    if wanted + cached > most:
        raise NoRoomError(
            f"{missing[0].source.parent}: its {wanted / 2**30:.2f} GiB don't fit into the cache "
            f"{cache_folder()}, which holds {cached / 2**30:.2f} of at most "
            f"T5X_DIFFEQ_CACHE_GIB={most / 2**30:g}; delete old copies there, raise this limit, "
            "set T5X_DIFFEQ_CACHE to a folder on a larger disk, or mount the bucket"
        )


def _fetch(copy: Copy) -> None:
    with files.atomic_file(copy.file) as partial:
        with files.bucket_errors(f"{copy.source} can't be copied to {copy.file.parent}", RunError):
            files.bucket_files().get_file(str(copy.source), str(partial))
        if files.crc32c(partial) != copy.crc32c:
            raise InfrastructureError(
                f"{copy.source} was damaged in transit; run the command again"
            )
        if copy.sha256 not in (None, files.file_digest(partial)):
            raise InputError(
                f"{copy.source} is damaged: it doesn't have the hash of what was written; make it "
                "again"
            )
