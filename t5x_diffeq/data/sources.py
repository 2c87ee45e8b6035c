"""Sources of documents.

A source has two splits, each a random access sequence of documents (text), in an order that
depends on nothing but the data; and a fingerprint, by which a resumed run knows its data again.
"""

import glob
import os
import platform
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ml_collections import ConfigDict

from t5x_diffeq.errors import InputError
from t5x_diffeq.files import digest

VALIDATION_EVERY = 20  # of the standard library's files, one in so many validates
VALIDATION_PART = 0.1  # of text files, the last part validates
TEXT_SUFFIXES = (".txt", ".md")
NOT_CORPUS = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}


@dataclass(frozen=True)
class Source:
    """Documents of both splits, and what they are called in logs."""

    name: str
    train: Sequence[str]
    validation: Sequence[str]

    @property
    def fingerprint(self) -> str:
        """A hash of every document of both splits."""
        splits = (b"train", *map(str.encode, self.train), b"validation")
        return digest((*splits, *map(str.encode, self.validation)))


def load_source(data: ConfigDict) -> Source:
    """The source that `config.data` describes.

    Raises:
      InputError: if there is no such source or its data can't be used.
    """
    if data.source == "stdlib":
        return stdlib()
    if data.source == "text_files":
        return text_files(data.path)
    raise InputError(f"data.source is {data.source!r}; it can be stdlib, text_files or tokens")


def stdlib() -> Source:
    """The source files of the running Python's standard library, without its tests."""
    root = Path(sysconfig.get_path("stdlib"))
    files = sorted(
        path
        for path in root.rglob("*.py")
        if not NOT_CORPUS.intersection(path.relative_to(root).parts)
    )
    documents = [read_if_text(path) for path in files]
    documents = [text for text in documents if text.strip()]
    if len(documents) < VALIDATION_EVERY:
        raise InputError(
            f"data.source=stdlib: {root} holds {len(documents)} source files of this Python's "
            f"standard library, fewer than {VALIDATION_EVERY}; use data.source=text_files"
        )
    return Source(
        name=f"the standard library of Python {platform.python_version()}",
        train=[text for i, text in enumerate(documents) if i % VALIDATION_EVERY],
        validation=documents[::VALIDATION_EVERY],
    )


def read_if_text(path: Path) -> str:
    """The file's text; empty for the few source files that are not UTF-8."""
    try:
        return path.read_bytes().decode("utf-8")
    except UnicodeDecodeError:
        return ""


def text_files(path: str | None) -> Source:
    """A file, the text files of a folder, or a glob; the last tenth of the text validates."""
    documents = [read_text(file) for file in find_text_files(path)]
    documents = [text for text in documents if text.strip()]
    if not documents:
        raise InputError(f"data.path={path}: every file there is empty; give files with text")
    cut = int(sum(map(len, documents)) * (1 - VALIDATION_PART))
    train, validation = [], []
    for text in documents:
        head, tail = text[: max(cut, 0)], text[max(cut, 0) :]
        cut -= len(text)
        train += [head] if head else []
        validation += [tail] if tail else []
    return Source(name=str(path), train=train, validation=validation)


def find_text_files(path: str | None) -> list[Path]:
    """The files that `data.path` means, sorted.

    Raises:
      InputError: if it is not given or names none.
    """
    if not path:
        raise InputError(
            "data.path is not set; data.source=text_files needs --config.data.path=FILE, "
            "a folder, or a glob"
        )
    place = Path(os.path.expanduser(path))
    if any(len(os.fsencode(part)) > 255 for part in place.parts):
        raise InputError(f"data.path={path[:60]}...: no file has so long a name; check the path")
    if place.is_file():
        return [place]
    if place.is_dir():
        found = [file for file in place.rglob("*") if file.suffix in TEXT_SUFFIXES]
        kinds = f"are no files ending in {' or '.join(TEXT_SUFFIXES)}"
    else:
        found = [Path(name) for name in glob.glob(str(place), recursive=True)]
        kinds = "is no file or folder of that name, and nothing that matches it as a glob"
    files = sorted(file for file in found if file.is_file())
    if not files:
        raise InputError(f"data.path={path}: there {kinds}; check the path")
    return files


def read_text(path: Path) -> str:
    """The file's text.

    Raises:
      InputError: if it can't be read, or is not UTF-8 text.
    """
    try:
        content = path.read_bytes()
        text = content.decode("utf-8")
    except OSError as error:
        raise InputError(f"data.path: {path} can't be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise InputError(
            f"data.path: {path} is not text: byte 0x{content[error.start]:02x} at offset "
            f"{error.start} is not UTF-8; convert the file or leave it out"
        ) from error
    if "\0" in text:
        offset = content.index(0)
        raise InputError(
            f"data.path: {path} is not text: byte 0x00 at offset {offset}; leave the file out"
        )
    return text
