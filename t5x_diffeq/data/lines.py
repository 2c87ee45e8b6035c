"""Reads documents from JSON lines: all those in a chunk of a file, or a single one."""

import json
from pathlib import Path

import numpy as np
from jaxtyping import Integer

from t5x_diffeq.data.conversations import conversation_of
from t5x_diffeq.runtime.errors import InputError


def read_line_documents(path: Path, start: int, content: bytes, field: str | None) -> list[str]:
    """One document per nonblank line; bytes that are not UTF-8 become lone surrogates.

    Args:
      path: the file, for messages.
      start: the offset of `content` in the file.
      content: whole lines.
      field: the key of the text; None: each line holds a conversation.

    Raises:
      InputError: if a line holds no text, or no conversation; names it.
    """
    texts, offset = [], start
    for line in content.split(b"\n"):
        if line.strip():
            texts.append(_text_of_line(line, field, f"{path}, line at byte {offset}"))
        offset += len(line) + 1
    return texts


def line_starts(content: bytes) -> Integer[np.ndarray, " lines"]:
    """The offsets of the nonblank lines."""
    starts, offset = [], 0
    for line in content.split(b"\n"):
        if line.strip():
            starts.append(offset)
        offset += len(line) + 1
    return np.array(starts, np.min_scalar_type(len(content)))


def read_line(path: Path, start: int, field: str | None) -> str:
    """The document whose line begins at byte `start`.

    Raises:
      InputError: if it can no longer be read, or holds no text.
    """
    try:
        with path.open("rb") as file:
            file.seek(start)
            line = file.readline()
    except OSError as error:
        raise InputError(f"data.path: {path} can't be read: {error.strerror}") from error
    return _text_of_line(line, field, f"{path}, line at byte {start}")


def _text_of_line(line: bytes, field: str | None, where: str) -> str:
    """The field of a JSON object, of which null is an empty text; or its conversation."""
    try:
        record = json.loads(line.decode("utf-8", "surrogateescape"))
    except (ValueError, RecursionError) as error:
        raise InputError(f"data.path: {where} is not JSON: {error}; mend or delete it") from error
    if field is None and isinstance(record, dict):
        return conversation_of(record, f"data.path: {where}")
    if not isinstance(record, dict) or field not in record:
        keys = ", ".join(record) if isinstance(record, dict) else type(record).__name__
        keys = keys or "nothing at all"
        wanted, way_out = (
            (repr(field), "set --config.data.text_field")
            if field is not None
            else ("object with messages, or with prompt and completion", "mend or delete it")
        )
        raise InputError(f"data.path: {where} has no {wanted}, but {keys[:200]}; {way_out}")
    if not isinstance(record[field], str | None):
        raise InputError(f"data.path: {where}: its {field!r} is {record[field]!r:.60}, not text")
    return record[field] or ""
