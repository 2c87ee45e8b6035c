"""Files within zip and tar archives, read in one pass and never unpacked to disk."""

import gzip
import io
import lzma
import os
import tarfile
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path, PurePosixPath
from typing import IO

from t5x_diffeq.runtime.errors import InputError

_TAR_SUFFIXES = (".tar", ".xz", ".gz", ".tgz")  # of OpenWebText's archives, with or without .tar
_DAMAGE = (
    EOFError,
    UnicodeDecodeError,
    gzip.BadGzipFile,
    lzma.LZMAError,
    tarfile.TarError,
    zipfile.BadZipFile,
    zlib.error,
)


@contextmanager
def _report_damage(path: str, kind: str) -> Iterator[None]:
    """A context in which the file is read."""
    try:
        yield
    except _DAMAGE as error:
        raise InputError(
            f"data.path: {path} is no {kind}, damaged, or cut short ({error}); delete it and get "
            "it again"
        ) from error


def find(root: Path, names: Sequence[str]) -> str:
    """The path, within a folder or zip, of the first of these names that it contains.

    Raises:
      InputError: if it contains none of them, or isn't a zip file.
    """
    if root.is_dir():
        paths = [path.relative_to(root).as_posix() for path in root.rglob("*") if path.is_file()]
    else:
        with _report_damage(str(root), "zip archive"), zipfile.ZipFile(root) as archive:
            paths = archive.namelist()
    for name in names:
        for path in sorted(paths):
            if PurePosixPath(path).name == name:
                return path
    raise InputError(f"data.path={root} has no {' or '.join(names)}; give the whole archive")


def read_lines(root: Path, path: str) -> Iterator[str]:
    """The lines of a UTF-8 file within a folder or zip.

    Raises:
      InputError: if it can't be read to its end.
    """
    with _report_damage(f"{root}, {path}", "UTF-8 text"), ExitStack() as stack:
        file: IO[bytes]
        if root.is_dir():
            file = stack.enter_context((root / path).open("rb"))
        else:
            file = stack.enter_context(zipfile.ZipFile(root)).open(path)
        # Lines end only at \n, or a stray \r within a paragraph would split it.
        yield from stack.enter_context(io.TextIOWrapper(file, encoding="utf-8", newline="\n"))


def iter_text_files(root: Path) -> Iterator[tuple[str, bytes]]:
    """Every .txt file in a folder or tar archive, and in the archives within it.

    Yields:
      Its path, through the archives that contain it (except the outermost), and its content; in
      the archives' order, and sorted in folders.

    Raises:
      InputError: if an archive can't be read to its end; names it.
    """
    if not root.is_dir():
        with root.open("rb") as stream:
            yield from _members(stream, str(root), "")
        return
    for folder, folders, names in os.walk(root):
        folders.sort()
        for name in sorted(names):
            path = Path(folder, name)
            with path.open("rb") as stream:
                yield from _contents(stream, path.relative_to(root).as_posix())


def _contents(stream: io.BufferedReader, path: str) -> Iterator[tuple[str, bytes]]:
    """The file itself if it is text, the text files in it if it is an archive, else nothing."""
    if path.endswith(".txt"):
        yield path, stream.read()
    elif path.endswith(_TAR_SUFFIXES):
        yield from _members(stream, path, f"{path}/")


def _members(stream: io.BufferedReader, name: str, prefix: str) -> Iterator[tuple[str, bytes]]:
    """The text files of a tar archive, compressed or not.

    Args:
      stream: the archive, read once, forwards.
      name: its name, for messages.
      prefix: the prefix of the paths.
    """
    with _report_damage(name, "tar archive"):
        plain = _decompress(stream)
        with tarfile.open(fileobj=plain, mode="r|") as archive:
            for member in archive:
                if isinstance(file := archive.extractfile(member), io.BufferedReader):
                    yield from _contents(file, prefix + member.name)
        # tarfile stops at its end marker; the compression's checksum is after it.
        while plain.read(2**20):
            pass


def _decompress(stream: io.BufferedReader) -> io.BufferedIOBase:
    """The stream, decompressed if it begins like xz or gzip.

    Its first bytes decide, because a downloaded file may have lost its suffix.
    """
    start = stream.peek(6)
    if start.startswith(b"\xfd7zXZ\0"):
        return lzma.open(stream)
    return gzip.open(stream) if start.startswith(b"\x1f\x8b") else stream
