"""Reads the documents in files, and holds no more than a few chunks of them in memory.

A document is a whole file (txt, md), a line (jsonl) or a row (parquet). A chunk is what is read at
once: a file, about 16 MiB of lines, or a row group; a compressed file is one chunk.
"""

import gzip
import os
import resource
import zlib
from bisect import bisect_right
from codecs import BOM_UTF8
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, BinaryIO, Protocol, runtime_checkable

from t5x_diffeq.data.conversations import fields_of
from t5x_diffeq.data.rows import Skipped, document_of, document_of_line, document_of_text
from t5x_diffeq.system.console import log
from t5x_diffeq.system.errors import InputError
from t5x_diffeq.system.extras import need_package
from t5x_diffeq.system.files import describe_error, digest, file_digest

if TYPE_CHECKING:
    import pyarrow
    import pyarrow.parquet

CHUNK_BYTES = 16 * 2**20
_RECENT_CHUNKS = 2  # the number of chunks whose texts are cached
_TEXT, _LINES, _ROWS = (".txt", ".md"), (".jsonl", ".ndjson", ".json"), (".parquet",)
FILE_KINDS = (*_TEXT, ".jsonl", ".ndjson", *_ROWS)


@runtime_checkable
class Documents(Protocol):
    """A sequence of texts, such as a list of strings."""

    def __len__(self) -> int:
        """The number of documents."""

    def __getitem__(self, number: int, /) -> str:
        """Document `number`."""

    def __iter__(self) -> Iterator[str]:
        """All documents in order."""
        return (self[number] for number in range(len(self)))


@dataclass(frozen=True)
class Chunk:
    """The part of a file from `start` to `stop`: bytes of its lines, or indices of row groups."""

    path: Path
    name: str  # what errors call the file
    start: int = 0
    stop: int | None = None  # None: the end of the file
    # `_count_contents` sets these two numbers.
    documents: int = 0
    characters: int = 0


class FileDocuments(Documents):
    """The documents in files, in the order of the files; fast if they are read in order.

    The `field` of a line or row holds the text; if it is None, each line or row is a conversation.
    Errors name the files as those of `data.{key}`.

    Raises:
      InputError: if a file, or more than a share `max_unreadable` of the rows, can't be read; if a
        file changes meanwhile; or if conversations are to be read from a file of text.
    """

    def __init__(
        self,
        paths: Sequence[Path],
        field: str | None,
        max_unreadable: float = 0.0,
        key: str = "path",
    ):
        self.field, self.key = field, key
        self.states = {path: _state_of(path) for path in paths}
        for path in paths:
            if field is None and _kind_of(path) in _TEXT:
                raise InputError(
                    f"data.{key}: {path} holds text; data.loss_on=completion needs records with "
                    "messages, or with prompt and completion, as .jsonl or .parquet"
                )
        chunks = (each for path in paths for each in _chunks_of(path, f"data.{key}: {path}"))
        self.chunks = list(_count_contents(chunks, field, max_unreadable))
        self.firsts = [0, *accumulate(chunk.documents for chunk in self.chunks)]
        self.characters = sum(chunk.characters for chunk in self.chunks)
        self.fingerprint = digest(file_digest(path).encode() + _reading_of(path) for path in paths)
        self.check_unchanged()  # since the counting and hashing began

    def check_unchanged(self) -> None:
        """Raises an InputError if a file is not what it was when its documents were counted."""
        for path, before in self.states.items():
            if _state_of(path) != before:
                raise InputError(
                    f"data.{self.key}: {path} was changed while it was read, so old and new text "
                    "would be mixed; run again when no program writes to it"
                )

    def __len__(self) -> int:
        return self.firsts[-1]

    def __getitem__(self, number: int) -> str:
        if not 0 <= number < len(self):
            raise IndexError(number)
        index = bisect_right(self.firsts, number) - 1
        return _read_recent_chunk(self.chunks[index], self.field)[number - self.firsts[index]]

    def character(self, number: int) -> tuple[int, int]:
        """The document that holds character `number` of all text, and the offset in it."""
        for chunk, first in zip(self.chunks, self.firsts, strict=False):
            if number < chunk.characters:
                for index, text in enumerate(_read_recent_chunk(chunk, self.field)):
                    if number < len(text):
                        return first + index, number
                    number -= len(text)
            number -= chunk.characters
        return len(self), 0  # past the last character


class DocumentRange(Documents):
    """The documents between two positions (document, character); no cut makes an empty document."""

    def __init__(self, documents: Documents, start: tuple[int, int], stop: tuple[int, int]):
        self.documents, self.start, self.stop = documents, start, stop

    def __len__(self) -> int:
        return self.stop[0] - self.start[0] + (self.stop[1] > 0)

    def __getitem__(self, number: int) -> str:
        if not 0 <= number < len(self):
            raise IndexError(number)
        number += self.start[0]
        text = self.documents[number]
        tail = self.stop[1] if number == self.stop[0] else len(text)
        head = self.start[1] if number == self.start[0] else 0
        return text[head:tail]


class ConcatenatedDocuments(Documents):
    """The concatenation of several sequences of documents."""

    def __init__(self, sequences: list[Documents]):
        self.sequences = sequences
        self.firsts = [0, *accumulate(map(len, sequences))]

    def __len__(self) -> int:
        return self.firsts[-1]

    def __getitem__(self, number: int) -> str:
        index = bisect_right(self.firsts, number) - 1
        return self.sequences[index][number - self.firsts[index]]


def _state_of(path: Path) -> tuple[int, ...]:
    """What changes with a file's content: its size and its times.

    `st_ctime` is needed because programs can set `st_mtime`. The inode is left out, because some
    mounted buckets give a file another inode later.
    """
    try:
        facts = path.stat()
    except OSError:
        return ()
    return facts.st_size, facts.st_mtime_ns, facts.st_ctime_ns


def _kind_of(path: Path) -> str:
    """The suffix that gives a file's type, ignoring compression: `.jsonl` for `a.jsonl.gz`."""
    return (path.with_suffix("") if path.suffix in DECOMPRESSORS else path).suffix


def _reading_of(path: Path) -> bytes:
    """What tells lines of JSON that are read as text from the same file, read as JSON."""
    if _kind_of(path) in (*_LINES, *_ROWS):
        return b""
    with path.open("rb") as file, DECOMPRESSORS.get(path.suffix, nullcontext)(file) as content:
        if not content.read(4).removeprefix(BOM_UTF8).startswith(b"{"):
            return b""
    log(f"note: {path} looks like JSON, and is read as text; lines of JSON are read from .jsonl")
    return b" as text"


def _chunks_of(path: Path, name: str) -> Iterator[Chunk]:
    if _kind_of(path) in _ROWS:
        groups = _open_parquet(path, name).num_row_groups
        yield from (Chunk(path, name, group, group + 1) for group in range(groups))
    elif path.suffix in _LINES:  # not compressed
        yield from _line_chunks(path, name)
    else:
        yield Chunk(path, name)


def _line_chunks(path: Path, name: str) -> Iterator[Chunk]:
    """Chunks of whole lines: each chunk ends with the line that reaches `CHUNK_BYTES`."""
    with path.open("rb") as file:
        size, start = path.stat().st_size, 0
        while start < size:
            file.seek(start + CHUNK_BYTES)
            file.readline()
            stop = min(file.tell(), size)
            yield Chunk(path, name, start, stop)
            start = stop


def _count_contents(
    chunks: Iterable[Chunk], field: str | None, max_unreadable: float
) -> Iterator[Chunk]:
    """The chunks with their numbers of documents and characters; checks that they can be read."""
    rows, skipped = 0, Skipped()
    for chunk in chunks:
        texts = _read_chunk(chunk, field)
        rows += len(texts)
        skipped.note(texts)
        skipped.check_so_far(rows, max_unreadable)
        yield replace(chunk, documents=len(texts), characters=sum(map(len, texts)))
    skipped.check(rows, max_unreadable)


def _read_chunk(chunk: Chunk, field: str | None) -> list[str]:
    """The documents of a chunk; a document that can't be read is `Unreadable`."""
    kind = _kind_of(chunk.path)
    if kind in _ROWS:
        return _read_rows(chunk, field)
    content, offset = _read_bytes(chunk), chunk.start
    if offset == 0 and content.startswith(BOM_UTF8):  # the mark is not part of the text
        content, offset = content.removeprefix(BOM_UTF8), len(BOM_UTF8)
    if kind not in _LINES:
        return [document_of_text(content, chunk.name)]
    texts = []
    for line in content.split(b"\n"):
        if line.strip():
            where = f"{chunk.name}, line at byte {offset}"
            texts.append(document_of_line(line, field, where))
        offset += len(line) + 1
    return texts


_read_recent_chunk = lru_cache(_RECENT_CHUNKS)(_read_chunk)


def _read_bytes(chunk: Chunk) -> bytes:
    limit = _most_bytes()
    try:
        with chunk.path.open("rb") as file:
            if decompress := DECOMPRESSORS.get(chunk.path.suffix):
                with decompress(file) as stream:
                    content = stream.read(limit + 1)
            else:
                file.seek(chunk.start)
                content = file.read(limit + 1 if chunk.stop is None else chunk.stop - chunk.start)
        if len(content) > limit:
            raise MemoryError
        return content
    except MemoryError as error:
        raise InputError(
            f"{chunk.name} is read as a whole and has more than {limit / 2**30:.1f} GiB "
            "of text, an eighth of this machine's memory; split it, or convert it to uncompressed "
            ".jsonl or to .parquet, which are read in parts"
        ) from error
    except (OSError, EOFError, zlib.error) as error:
        raise InputError(
            f"{chunk.name} can't be read: {getattr(error, 'strerror', None) or error}; "
            "restore it, or leave it out"
        ) from error


def _most_bytes() -> int:
    """The most bytes that are read at once; as texts, they take several times the memory."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    allowed, _ = resource.getrlimit(resource.RLIMIT_AS)
    return (memory if allowed == resource.RLIM_INFINITY else min(memory, allowed)) // 8


def _import_pyarrow() -> ModuleType:
    need_package("pyarrow", "a .parquet or .zst file")
    import pyarrow.parquet

    return pyarrow


DECOMPRESSORS: dict[str, Callable[[BinaryIO], Any]] = {
    ".gz": gzip.open,
    ".zst": lambda file: _import_pyarrow().CompressedInputStream(file, "zstd"),
}


def _open_parquet(path: Path, name: str) -> "pyarrow.parquet.ParquetFile":
    pyarrow = _import_pyarrow()
    try:
        return pyarrow.parquet.ParquetFile(path)
    except (OSError, pyarrow.ArrowException) as error:
        raise InputError(
            f"{name} is not a parquet file: {describe_error(error)}; restore it, or leave it out"
        ) from error


def _read_rows(chunk: Chunk, field: str | None) -> list[str]:
    file = _open_parquet(chunk.path, chunk.name)
    columns = fields_of(file.schema_arrow.names, field, chunk.name)
    try:
        table = file.read_row_group(chunk.start, columns=columns)
        rows = table.cast(text_as_bytes(table.schema)).to_pylist()
    except (OSError, _import_pyarrow().ArrowException) as error:
        raise InputError(f"{chunk.name}: row group {chunk.start} can't be read: {error}") from error
    place = f"{chunk.name}, row group {chunk.start}, row"
    return [document_of(row, field, f"{place} {number}") for number, row in enumerate(rows)]


def text_as_bytes(schema: "pyarrow.Schema") -> "pyarrow.Schema":
    """The schema with bytes for text; a table can be cast to it even if a text isn't UTF-8."""
    pyarrow = _import_pyarrow()
    bytes_of = {pyarrow.string(): pyarrow.binary(), pyarrow.large_string(): pyarrow.large_binary()}

    def cast(kind: Any) -> Any:  # a pyarrow.DataType
        if pyarrow.types.is_list(kind):
            return pyarrow.list_(cast(kind.value_type))
        if pyarrow.types.is_large_list(kind):
            return pyarrow.large_list(cast(kind.value_type))
        if pyarrow.types.is_struct(kind):
            return pyarrow.struct([(field.name, cast(field.type)) for field in kind])
        return bytes_of.get(kind, kind)

    return pyarrow.schema([(field.name, cast(field.type)) for field in schema])
