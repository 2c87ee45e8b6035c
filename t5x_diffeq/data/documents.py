"""Random access to the documents in files, with no more than a few chunks of them in memory.

A document is a whole file (txt, md), a line (jsonl) or a row (parquet). A chunk is what is read at
once: a file, about 16 MiB of lines, or a row group; a compressed file is one chunk.
"""

import gzip
import importlib
import zlib
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from t5x_diffeq.data.conversations import conversation_of, keys_of_conversations
from t5x_diffeq.data.lines import line_starts, read_line, read_line_documents
from t5x_diffeq.runtime.errors import InputError
from t5x_diffeq.runtime.files import digest, file_digest

if TYPE_CHECKING:
    import pyarrow.parquet

CHUNK_BYTES = 16 * 2**20
_RECENT_CHUNKS = 2  # whose texts are cached
_TEXT, _LINES, _ROWS = (".txt", ".md"), (".jsonl", ".json"), (".parquet",)
FILE_KINDS = (*_TEXT, ".jsonl", *_ROWS)


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
    start: int
    stop: int | None
    documents: int = 0
    characters: int = 0


class FileDocuments(Documents):
    """The documents in files, in the order of the files.

    Args:
      paths: the files.
      field: the field of a line or row that holds the text; None: each is a conversation, and its
        document is that of `conversations.conversation_of`.

    Attributes:
      one_by_one: whether a document can be read, in any order, by reading only its own bytes.

    Raises:
      InputError: if a file can't be read; names it, and where.
    """

    def __init__(self, paths: Sequence[Path], field: str | None):
        self.field = field
        if field is None:
            _check_records(paths)
        if len(paths) == 1 and _kind_of(paths[0]) in _TEXT:  # among several, such a file is skipped
            _check_text(paths[0])
        self.chunks = [_count_contents(c, field) for path in paths for c in _chunks_of(path)]
        self.firsts = [0, *accumulate(chunk.documents for chunk in self.chunks)]
        self.starts = [line_starts(read_bytes(c)) if _is_by_line(c) else None for c in self.chunks]
        self.expected = 0  # the next document if they are read in order
        whole = [c for c in self.chunks if not _is_by_line(c) and _kind_of(c.path) not in _TEXT]
        self.one_by_one = len(whole) <= _RECENT_CHUNKS
        self.characters = sum(chunk.characters for chunk in self.chunks)
        self.fingerprint = digest(file_digest(path).encode() for path in paths)

    def __len__(self) -> int:
        return self.firsts[-1]

    def __getitem__(self, number: int) -> str:
        """Document `number`."""
        if not 0 <= number < len(self):
            raise IndexError(number)
        index = bisect_right(self.firsts, number) - 1
        chunk, starts = self.chunks[index], self.starts[index]
        in_order, self.expected = number == self.expected, number + 1
        number -= self.firsts[index]
        if starts is None or in_order:
            return read_recent_chunk(chunk, self.field)[number]
        return read_line(chunk.path, chunk.start + int(starts[number]), self.field)

    def character(self, number: int) -> tuple[int, int]:
        """The document that holds character `number` of all text, and the offset in it."""
        for chunk, first in zip(self.chunks, self.firsts, strict=False):
            if number < chunk.characters:
                for offset, text in enumerate(read_recent_chunk(chunk, self.field)):
                    if number < len(text):
                        return first + offset, number
                    number -= len(text)
            number -= chunk.characters
        return len(self), 0


class DocumentRange(Documents):
    """Documents from one (number, character) to another; those that a cut empties are left out."""

    def __init__(self, documents: Documents, start: tuple[int, int], stop: tuple[int, int]):
        self.documents, self.start, self.stop = documents, start, stop

    def __len__(self) -> int:
        return self.stop[0] - self.start[0] + (self.stop[1] > 0)

    def __getitem__(self, number: int) -> str:
        """Document `number` of the part."""
        if not 0 <= number < len(self):
            raise IndexError(number)
        number += self.start[0]
        text = self.documents[number]
        tail = self.stop[1] if number == self.stop[0] else len(text)
        head = self.start[1] if number == self.start[0] else 0
        return text[head:tail]


def _kind_of(path: Path) -> str:
    """The suffix that gives a file's type, ignoring compression: `.jsonl` for `a.jsonl.gz`."""
    return (path.with_suffix("") if path.suffix in DECOMPRESSORS else path).suffix


def _is_by_line(chunk: Chunk) -> bool:
    """Whether each of its documents is a line of the file."""
    return _kind_of(chunk.path) in _LINES and chunk.path.suffix not in DECOMPRESSORS


def _chunks_of(path: Path) -> Iterator[Chunk]:
    if _kind_of(path) in _ROWS:
        groups = _open_parquet(path).num_row_groups
        yield from (Chunk(path, group, group + 1) for group in range(groups))
    elif _kind_of(path) in _LINES and path.suffix not in DECOMPRESSORS:
        yield from _line_chunks(path)
    else:
        yield Chunk(path, 0, None)


def _line_chunks(path: Path) -> Iterator[Chunk]:
    """Chunks of whole lines; a longer line is a chunk by itself."""
    with path.open("rb") as file:
        size, start = path.stat().st_size, 0
        while start < size:
            file.seek(start + CHUNK_BYTES)
            file.readline()
            stop = min(file.tell(), size)
            yield Chunk(path, start, stop)
            start = stop


def _count_contents(chunk: Chunk, field: str | None) -> Chunk:
    texts = _read_chunk(chunk, field)
    return Chunk(chunk.path, chunk.start, chunk.stop, len(texts), sum(map(len, texts)))


@lru_cache(_RECENT_CHUNKS)
def read_recent_chunk(chunk: Chunk, field: str | None) -> list[str]:
    """`_read_chunk`, cached for the documents that are read next."""
    return _read_chunk(chunk, field)


def _read_chunk(chunk: Chunk, field: str | None) -> list[str]:
    """The documents of a chunk.

    Bytes that are not UTF-8 become lone surrogates: such a document is skipped, and counted, when
    it is tokenised.
    """
    kind = _kind_of(chunk.path)
    if kind in _ROWS:
        return _read_rows(chunk, field)
    content = read_bytes(chunk)
    if kind in _LINES:
        return read_line_documents(chunk.path, chunk.start, content, field)
    return [content.decode("utf-8", "surrogateescape")]


def read_bytes(chunk: Chunk) -> bytes:
    """The chunk's bytes, decompressed.

    Raises:
      InputError: if the file can't be read, or is damaged.
    """
    try:
        with chunk.path.open("rb") as file:
            file.seek(chunk.start)
            content = file.read(-1 if chunk.stop is None else chunk.stop - chunk.start)
        return DECOMPRESSORS.get(chunk.path.suffix, bytes)(content)
    except (OSError, EOFError, zlib.error) as error:
        raise InputError(
            f"data.path: {chunk.path} can't be read: {getattr(error, 'strerror', None) or error}"
        ) from error


def _decompress_zstd(content: bytes) -> bytes:
    """The content of all frames; a truncated one, which the library ignores, is an EOFError."""
    zstandard = _import_optional("zstandard", ".zst files")
    parts = []
    while content:
        frame = zstandard.ZstdDecompressor().decompressobj()
        try:
            parts.append(frame.decompress(content))
        except zstandard.ZstdError as error:
            raise EOFError(str(error)) from error
        if not frame.eof:
            raise EOFError("it is cut off")
        content = frame.unused_data
    return b"".join(parts)


DECOMPRESSORS = {".gz": gzip.decompress, ".zst": _decompress_zstd}


def _import_optional(package: str, kind: str) -> ModuleType:
    try:
        return importlib.import_module(package)
    except ImportError as error:
        raise InputError(
            f'data.path: {kind} need the package {package}; pip install "t5x_diffeq[data]"'
        ) from error


def _check_records(paths: Sequence[Path]) -> None:
    """Checks that no file is a text without records."""
    for path in paths:
        if _kind_of(path) not in (*_LINES, *_ROWS):
            raise InputError(
                f"data.path: {path} holds text; data.loss_on=completion needs records with "
                "messages, or with prompt and completion, as .jsonl or .parquet"
            )


def _check_text(path: Path) -> None:
    content = read_bytes(Chunk(path, 0, None))
    try:
        content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise InputError(
            f"data.path: {path} is not text: byte 0x{content[error.start]:02x} at offset "
            f"{error.start} is not UTF-8; convert the file or leave it out"
        ) from error
    if b"\0" in content:
        raise InputError(
            f"data.path: {path} is not text: byte 0x00 at offset {content.index(0)}; leave the "
            "file out"
        )


def _open_parquet(path: Path) -> "pyarrow.parquet.ParquetFile":
    _import_optional("pyarrow", ".parquet files")
    import pyarrow.parquet

    try:
        return pyarrow.parquet.ParquetFile(path)
    except (OSError, pyarrow.ArrowException) as error:
        raise InputError(f"data.path: {path} is not a parquet file: {error}") from error


def _read_rows(chunk: Chunk, field: str | None) -> list[str]:
    """One document per row of a row group; null is an empty text."""
    file = _open_parquet(chunk.path)
    if field is None:
        return _read_conversations(file, chunk)
    if field not in file.schema_arrow.names:
        raise InputError(
            f"data.path: {chunk.path} has no column {field!r}, but "
            f"{', '.join(file.schema_arrow.names)}; set --config.data.text_field"
        )
    column = [row[field] for row in _row_group(file, chunk, [field])]
    if any(not isinstance(text, str | None) for text in column):
        raise InputError(f"data.path: {chunk.path}: its column {field!r} is not text")
    return [text or "" for text in column]


def _row_group(file: "pyarrow.parquet.ParquetFile", chunk: Chunk, columns: list[str]) -> list[dict]:
    """The rows of a row group, as mappings of these columns."""
    try:
        return file.read_row_group(chunk.start, columns=columns).to_pylist()
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(
            f"data.path: {chunk.path}: row group {chunk.start} can't be read: {error}"
        ) from error


def _read_conversations(file: "pyarrow.parquet.ParquetFile", chunk: Chunk) -> list[str]:
    """One conversation per row of a row group."""
    columns = keys_of_conversations(file.schema_arrow.names, f"data.path: {chunk.path}")
    where = f"data.path: {chunk.path}, row group {chunk.start}, row"
    rows = enumerate(_row_group(file, chunk, columns))
    return [conversation_of(row, f"{where} {number}") for number, row in rows]
