"""Files of folders that may come from anybody: a workdir, a Hugging Face folder, a sweep's output.

Such a folder can hold links to files of this machine, pipes and devices whose reading never ends,
and files larger than the memory. `open_inside` opens a regular file of the folder, and nothing
else. Before a library opens the files of a folder by their names, `check_inside` looks at them all.
"""

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import IO

from etils import epath

from t5x_diffeq.system.errors import InputError

MOST_BYTES = 2**28  # of JSON, a template or a tokenizer, which are read whole
MOST_BYTES_OF_ARRAYS = 2**33  # also of the reports of a long run
LFS_POINTER = b"version https://git-lfs"  # how the pointer begins
_KINDS = {
    stat.S_IFIFO: "a named pipe",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFSOCK: "a socket",
    stat.S_IFDIR: "a folder",
}


def open_inside(path: Path | epath.Path) -> AbstractContextManager[IO[bytes]]:
    """A regular file, here or in a bucket, opened to be read.

    A link is followed to a file of the same folder, and in Hugging Face's cache to one of the same
    model, but not out of it.

    Raises:
      OSError: if there is none, or it can't be read.
      InputError: if it is something else, or a link out of its folder.
    """
    if not isinstance(path, Path):
        return path.open("rb")  # type: ignore[return-value]  # etils types its files more loosely
    real = _resolve(path, _root_of(path.parent))
    # Without O_NONBLOCK, opening a pipe would wait for its writer.
    descriptor = os.open(real, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        facts = os.fstat(descriptor)
        if stat.S_ISDIR(facts.st_mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
        _check_regular(path, facts)
        return os.fdopen(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


def read_inside(path: Path | epath.Path, most: int = MOST_BYTES) -> bytes:
    """The content of a file, here as `open_inside` opens it, or in a bucket.

    Raises:
      OSError: if there is none, or it can't be read.
      InputError: as `open_inside`, or if it has more than `most` bytes, or is a pointer of Git LFS.
    """
    if not isinstance(path, Path):
        _check_size(path, path.stat().length, most)
        return path.read_bytes()
    with open_inside(path) as file:
        size = os.fstat(file.fileno()).st_size
        _check_size(path, size, most)
        content = file.read(size)  # and no more, if it grows
    check_downloaded(path, content)
    return content


def check_downloaded(path: Path, start: bytes) -> None:
    """Raises an InputError if a file that begins so is only a pointer of Git LFS."""
    if start.startswith(LFS_POINTER):
        raise InputError(f"{path} is a pointer of Git LFS; run git lfs pull in its folder")


def check_inside(folder: Path | epath.Path) -> None:
    """Checks that a folder holds only regular files, and that no link leads out of its parent.

    Raises:
      InputError: if the folder holds anything else; names the first such path.
    """
    if not isinstance(folder, Path) or not os.path.lexists(folder):
        return
    root = folder.parent.resolve()
    for path in (Path(_resolve(folder, root)), *_links_and_files(folder)):
        if path.is_symlink():
            _check_regular(path, os.stat(_resolve(path, root)))
        elif not path.is_dir():
            _check_regular(path, os.lstat(path))


def _links_and_files(folder: Path) -> Iterator[Path]:
    for within, folders, files in os.walk(folder):
        links = (name for name in folders if os.path.islink(os.path.join(within, name)))
        yield from (Path(within, name) for name in (*links, *files))


def _root_of(folder: Path) -> Path:
    """The folder that the links of files in `folder` may lead to.

    Hugging Face's cache has the files of a model in MODEL/blobs, and links to them in
    MODEL/snapshots/COMMIT.
    """
    real = folder.resolve()
    in_cache = real.parent.name == "snapshots" and (real.parent.parent / "blobs").is_dir()
    return real.parent.parent if in_cache else real


def _resolve(path: Path, root: Path) -> str:
    """The path without links, which must lie in `root`."""
    real = os.path.realpath(path, strict=True)
    if not Path(real).is_relative_to(root):
        raise InputError(
            f"{path} is a link to {real}, outside of {root}; if you trust it, replace it by a copy"
        )
    return real


def _check_regular(path: Path, facts: os.stat_result) -> None:
    if not stat.S_ISREG(facts.st_mode):
        kind = _KINDS.get(stat.S_IFMT(facts.st_mode), "no file")
        raise InputError(f"{path} is {kind}, where a file is needed; remove it")


def _check_size(path: object, size: int, most: int) -> None:
    if size > most:
        raise InputError(f"{path} has {size} bytes, and may have at most {most}; restore it")
