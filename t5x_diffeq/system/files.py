"""Files that are either complete or absent, on this machine or in Google Cloud Storage.

`parse_path` turns the value of a flag or key into a path. What both kinds of paths support (exists,
read_bytes, read_text, /) is done with their own methods, all else with the functions here.
"""

import base64
import errno
import glob
import hashlib
import json
import os
import re
import shutil
import stat
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, TypeAlias

import fsspec
import google_crc32c
from etils import epath

from t5x_diffeq.system.errors import (
    OWN_ERRORS,
    InfrastructureError,
    InputError,
    RunError,
    is_infrastructure_failure,
)
from t5x_diffeq.system.extras import install_command
from t5x_diffeq.system.foreign_files import check_inside, read_inside

BUCKETS = "gs://"
_CHUNK_BYTES = 2**22  # that are hashed at once
_SILENCE = 30  # seconds without a byte after which a request to a bucket is retried
_OF_HUB = "; hf:// is read by data.source=stream alone"
_WAY_OUT = (
    "; check the bucket's name and the credentials: the machine's service account, or "
    "`gcloud auth application-default login`"
)
AnyPath: TypeAlias = Path | epath.Path


def parse_path(text: str, name: str) -> AnyPath:
    """The path that a flag or key (`name`) gives: an absolute one here, or `gs://BUCKET/...`.

    Raises:
      InputError: if it is any other kind of path, invalid here, or the bucket denies access.
      InfrastructureError: if the bucket does not answer.
    """
    if not text:
        raise InputError(f"{name} is empty; give a path, such as . for the current folder")
    scheme, is_url, bucket = text.partition("://")
    if re.match("gs:/?(?!/)", text) or (is_url and not bucket.strip("/")):
        raise InputError(f"{name}={text} names no bucket; write {BUCKETS}BUCKET/PATH")
    if not is_url:
        return _local_path(text, name)
    if scheme + is_url != BUCKETS:
        raise InputError(
            f"{name}={text}: {scheme}:// is not supported; give a path of this machine (or mounted "
            f"on it), or {BUCKETS}BUCKET/PATH{_OF_HUB if scheme == 'hf' else ''}"
        )
    with bucket_errors(f"{name}={text} can't be reached", InputError, _WAY_OUT):
        try:
            bucket_files().info(text)
        except FileNotFoundError:
            pass  # it may be created later
        except ImportError as error:
            raise InputError(
                f"{name}={text} needs the package gcsfs ({error}); "
                f"{install_command('gcs')}, or give a folder of this machine"
            ) from error
    return epath.Path(text)


def is_in_bucket(path: AnyPath) -> bool:
    """Whether a path is an object, or a folder of objects, in Google Cloud Storage."""
    return str(path).startswith(BUCKETS)


@cache
def bucket_files() -> fsspec.AbstractFileSystem:
    """The file system of Google Cloud Storage; an ImportError if gcsfs isn't installed."""
    import aiohttp  # a dependency of gcsfs

    # fsspec returns epath's instance, because the arguments are the same. It caches no listings,
    # because TensorStore writes to the bucket, too.
    fsspec.config.conf["gcs"] = {
        "use_listings_cache": False,
        # Limits the silence of a server, not the length of a download.
        "requests_timeout": aiohttp.ClientTimeout(sock_connect=_SILENCE, sock_read=_SILENCE),
    }
    return fsspec.filesystem("gcs", finalize_on_close=True)


def _local_path(text: str, name: str) -> Path:
    path = Path(os.path.expanduser(text))  # ~NAME stays where there is no such user
    try:
        text.encode()
        path = path.absolute()  # whatever becomes the current folder later
        os.lstat(path)
    except (NotADirectoryError, PermissionError):
        pass  # whoever opens the path raises the error
    except FileNotFoundError as error:
        if not path.is_absolute():  # `absolute` failed
            raise InputError(
                f"{name}={text}: the current folder was deleted; cd to another, or give a "
                "whole path"
            ) from error
    except UnicodeEncodeError as error:
        raise InputError(
            f"{name}={text!a}: its name isn't UTF-8; rename it, or set PYTHONUTF8=1 if it is"
        ) from error
    except (OSError, ValueError) as error:
        raise InputError(f"{name}={text[:60]!a}: {describe_error(error)}; check it") from error
    return path


def describe_error(error: BaseException) -> str:
    """An error as one line of at most 300 characters, without its class if it has a text."""
    reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
    return " ".join(reason.split())[:300]


def absolute_path(path: AnyPath) -> AnyPath:
    """The absolute path; a path in a bucket is absolute already."""
    return path if is_in_bucket(path) else path.absolute()


def parse_json(text: str | bytes) -> Any:
    """The value of a JSON text, which may come from anybody; a ValueError if it isn't JSON."""
    try:
        return json.loads(text)
    except RecursionError as error:
        raise ValueError("its lists or objects are nested too deeply") from error


def parse_json_object(text: str | bytes) -> dict[str, Any]:
    """The JSON object that a text is; a ValueError if it is none."""
    content = parse_json(text)
    if not isinstance(content, dict):
        raise ValueError("it is not a JSON object")
    return content


def read_json_object(path: AnyPath) -> dict[str, Any]:
    """The JSON object that a file holds; a ValueError if it holds none."""
    return parse_json_object(read_inside(path))


def join_path(folder: AnyPath, text: str) -> AnyPath:
    """`folder / text`, or `text` alone if it is an absolute path or in a bucket."""
    return epath.Path(text) if text.startswith(BUCKETS) else folder / text


def files_in(path: AnyPath, hidden: bool = False) -> list[AnyPath]:
    """The files in a folder and its subfolders, sorted, including links to missing files.

    Links to folders are followed, and no folder is read twice. Hidden files, and files in hidden
    folders, are left out unless `hidden`.
    """
    if is_in_bucket(path):
        files = [epath.Path(BUCKETS + name) for name in sorted(bucket_files().find(str(path)))]
    else:
        files = sorted(filter(_is_file_or_lost, _walk(path)))
    return [file for file in files if hidden or not is_hidden(file, path)]


def _walk(root: Path) -> Iterator[Path]:
    """What is in a folder, its subfolders and those that links lead to, but the folders themselves.

    A folder that several names lead to is walked once, and by its own name if it lies in `root`: a
    link may lead to a folder above it, or, like `latest`, to one beside it. If it has a hidden and
    a visible name, it is walked by both.
    """
    starts = [root]
    walked: set[tuple[str, bool]] = set()
    for start in starts:
        for folder, within, names in os.walk(start):
            key = os.path.realpath(folder), is_hidden(Path(folder), root)
            if key in walked:
                within.clear()
                continue
            walked.add(key)
            within.sort()
            paths = (Path(folder, name) for name in within)
            starts += [path for path in paths if path.is_symlink()]
            yield from (Path(folder, name) for name in names)


def files_matching(pattern: AnyPath) -> list[AnyPath]:
    """The files that match a glob, sorted, as `files_in`; `**` is any number of folders."""
    if is_in_bucket(pattern):
        names = sorted(bucket_files().glob(str(pattern)))
        return [
            x for x in map(epath.Path, (BUCKETS + n for n in names)) if not is_hidden(x, pattern)
        ]
    return sorted(filter(_is_file_or_lost, map(Path, glob.glob(str(pattern), recursive=True))))


def is_hidden(file: AnyPath, asked: AnyPath) -> bool:
    """Whether a file or a folder above it is hidden, unless the path or glob `asked` names it."""

    def count(path: AnyPath) -> int:
        return sum(part.startswith(".") and part != ".." for part in path.parts)

    return count(file) > count(asked)


def _is_file_or_lost(path: Path) -> bool:
    return path.is_file() or (path.is_symlink() and not path.exists())


def check_links(files: Iterable[AnyPath], name: str) -> None:
    """Raises an InputError, which begins with `name`, if a file is a link to a missing file."""
    lost = [file for file in files if isinstance(file, Path) and not file.exists()]
    if lost:
        raise InputError(
            f"{name}: {lost[0]} is a link to {lost[0].readlink()}, which doesn't exist (one of "
            f"{len(lost)} such links); restore the file, or delete the link"
        )


# ------------------------------------------------------------------------------ writing

# Folders that this process has locked, each with a function that raises an error if the lock is
# lost (see `locks`).
write_guards: list[tuple[AnyPath, Callable[[], None]]] = []


@contextmanager
def guarded(folder: AnyPath, check: Callable[[], None]) -> Iterator[None]:
    """A context in which `check_writable` calls `check` for every path in the folder."""
    write_guards.append((folder, check))
    try:
        yield
    finally:
        write_guards.remove((folder, check))


def check_writable(path: AnyPath) -> None:
    """Checks that this process still has the locks on the folders of the path.

    Raises:
      RunError: if one of the folders was moved.
      InfrastructureError: if another process holds the lease on a folder in a bucket.
    """
    for folder, check in list(write_guards):
        if path.is_relative_to(folder):
            check()


def open_to_write(path: Path, flags: int) -> int:
    """Opens a file, which is created if it is missing, and not truncated; returns its descriptor.

    Raises:
      OSError: if the file can't be opened; if it is a pipe or a device; if it is a link, because
        writing would change a file elsewhere.
    """
    # Without O_NONBLOCK, opening a pipe would wait for its reader.
    flags |= os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
    try:
        descriptor = os.open(path, flags, 0o666)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise OSError(error.errno, "it is a link; remove it", str(path)) from error
        if error.errno == errno.ENXIO:
            raise OSError(error.errno, "it is no regular file; remove it", str(path)) from error
        raise
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "it is no regular file; remove it", str(path))
    return descriptor


@contextmanager
def atomic_file(path: AnyPath) -> Iterator[Path]:
    """A context with a local file to write, which becomes `path` at its end; never half-written.

    On this machine the file has another name in the same folder, and is renamed. For a bucket it is
    in a temporary folder, and is uploaded as one object, which appears only when it is complete.

    Raises:
      RunError: if `path` can't be written; its old content is kept.
      InfrastructureError: as `check_writable`; or if the bucket doesn't answer.
    """
    if is_in_bucket(path):
        with tempfile.TemporaryDirectory() as folder:
            partial = Path(folder) / path.name
            yield partial
            check_writable(path)  # now, because the lease may have been lost meanwhile
            with bucket_errors(f"{path} can't be written", RunError):
                bucket_files().put_file(str(partial), str(path), consistency="md5")
        return
    partial = path.parent / f".{path.name}.{os.getpid()}.partial"
    check_writable(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial.unlink(missing_ok=True)
        os.close(open_to_write(partial, os.O_WRONLY | os.O_EXCL))
        yield partial
        # Before the rename: else a crash of the machine could leave an empty file of that name.
        with partial.open("rb") as file:
            os.fsync(file.fileno())
        os.replace(partial, path)
    except OSError as error:
        raise RunError(f"{path} can't be written: {describe_error(error)}") from error
    finally:
        partial.unlink(missing_ok=True)


@contextmanager
def bucket_errors(what: str, refused: type[Exception], way_out: str = "") -> Iterator[None]:
    """A context that turns what a bucket's client raises into an error of one line.

    Its message begins with `what`. If the bucket answered and refused, it is of class `refused` and
    ends with `way_out`.

    Raises:
      InfrastructureError: if the bucket did not answer, which may be temporary.
    """
    try:
        yield
    except OWN_ERRORS:
        raise
    except Exception as error:  # from any library below
        reason = describe_error(error)
        if not is_infrastructure_failure(error):
            raise refused(f"{what}: {reason}{way_out}") from error
        if getattr(error, "code", None) == 401:
            raise InfrastructureError(f"{what}: the bucket refuses the token: {reason}") from error
        raise InfrastructureError(f"{what}: the bucket does not answer: {reason}") from error


def write_whole(path: AnyPath, content: bytes) -> None:
    """Writes `path` whole or not at all, whatever kills the process; raises as `atomic_file`."""
    with atomic_file(path) as partial:
        partial.write_bytes(content)


def make_folder(folder: AnyPath, name: str) -> None:
    """Makes a folder of this machine if there is none; InputError if it can't be written."""
    if is_in_bucket(folder):
        return
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise InputError(
            f"{name}={folder} can't be written: {describe_error(error)}; name another folder"
        ) from error


def remove_folder(folder: AnyPath) -> None:
    """Removes a folder and everything in it."""
    epath.Path(folder).rmtree()


def copy_folder(source: AnyPath, target: AnyPath) -> None:
    """Copies a folder, here or in a bucket, to one that doesn't exist, here or in a bucket.

    Raises:
      InputError: if the folder holds anything but regular files and folders (see `check_inside`).
      RunError: if a bucket refuses.
      InfrastructureError: if a bucket does not answer.
    """
    check_inside(source)
    with bucket_errors(f"{source} can't be copied to {target}", RunError):
        if is_in_bucket(source) and is_in_bucket(target):
            bucket_files().copy(str(source), str(target), recursive=True)
        elif is_in_bucket(target):
            bucket_files().put(str(source), str(target), recursive=True)
        elif is_in_bucket(source):
            target.parent.mkdir(parents=True, exist_ok=True)
            bucket_files().get(str(source), str(target), recursive=True)
        else:
            shutil.copytree(source, target)


def move_folder(source: AnyPath, target: AnyPath) -> None:
    """Moves a folder, replacing `target` if it exists; objects are copied, then deleted."""
    if is_in_bucket(source):
        if target.exists():
            bucket_files().rm(str(target), recursive=True)
        bucket_files().mv(str(source), str(target), recursive=True)
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(target, ignore_errors=True)
    shutil.move(source, target)


# ------------------------------------------------------------------------------ digests


def digest(parts: Iterable[bytes]) -> str:
    """SHA-256 over parts and their boundaries, in hexadecimal."""
    total = hashlib.sha256()
    for part in parts:
        total.update(len(part).to_bytes(8, "little"))
        total.update(part)
    return total.hexdigest()


def file_digest(path: AnyPath) -> str:
    """SHA-256 of a file, in hexadecimal; a RunError if it can't be read."""
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise RunError(f"{path} can't be read: {describe_error(error)}") from error


def crc32c(path: AnyPath) -> str:
    """A file's CRC-32C in base64: the checksum that Google Cloud Storage keeps for every object."""
    checksum = google_crc32c.Checksum()
    with path.open("rb") as file:
        for _ in checksum.consume(file, _CHUNK_BYTES):
            pass
    return base64.b64encode(checksum.digest()).decode()
