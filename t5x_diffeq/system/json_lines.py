"""Files of JSON objects, one a line (`.jsonl`), to which lines are appended."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from io import BytesIO
from typing import IO, Any

from t5x_diffeq.system.console import log
from t5x_diffeq.system.errors import InputError
from t5x_diffeq.system.files import AnyPath, describe_error, parse_json_object
from t5x_diffeq.system.foreign_files import open_inside

_BLOCK = 2**20  # bytes that are read at a time from the end
NUMBER = (int, float)  # for `check_types`, which compares types exactly, so not a bool


def check_types(content: Any, types: Mapping[str, tuple[type, ...]]) -> None:
    """Raises a ValueError if `content` is no object, lacks a key or has a value of another type."""
    if not isinstance(content, dict):
        raise ValueError(f"{content!r:.60} is not a JSON object")
    for key, allowed in types.items():
        if key not in content:
            raise ValueError(f"it lacks {key!r}")
        if type(content[key]) not in allowed:
            raise ValueError(f"its {key!r} is {content[key]!r:.60}")


def read_json_lines(
    path: AnyPath,
    check: Callable[[dict[str, Any]], None],
    way_out: str | None = None,
    key: str = "",
) -> Iterator[tuple[int, dict[str, Any]]]:
    """The objects of a file, each with the number of its line, from 1; none if there is no file.

    One line at a time is in memory. An incomplete last line is left out: a process is writing it,
    or was killed while it wrote.

    Args:
      check: raises a ValueError, which says what is wrong, for an object that can't be used.
      way_out: what to do about a line that holds no object, or an object that can't be used.
        Without it, such lines are left out, with a warning at the end.
      key: if it is given, objects without this key are skipped, most of them without parsing.

    Raises:
      InputError: if the file can't be read; if a line can't be used and there is a `way_out`.
    """
    quoted, faults = f'"{key}"'.encode() if key else b"", []
    with _open(path) as file:
        for number, line in enumerate(file, 1):
            if quoted not in line or not line.endswith(b"\n"):
                continue
            try:
                content = parse_json_object(line)
                check(content)
            except ValueError as error:
                fault = f"{path}, line {number}: {describe_error(error)}"
                if way_out is not None:
                    raise InputError(f"{fault}; {way_out}") from error
                faults.append(fault)
            else:
                if not key or key in content:
                    yield number, content
    if faults:
        lines = "this line" if len(faults) == 1 else f"this line and {len(faults) - 1} others"
        log(f"warning: {faults[0]}; left out: {lines}")


def last_lines(path: AnyPath) -> Iterator[tuple[int, bytes]]:
    """The lines of a file from its end, each with the position of its end.

    An incomplete last line is among them; it has no newline. A missing file has no lines.

    Raises:
      InputError: if the file can't be read.
    """
    with _open(path) as file:
        start, rest = file.seek(0, 2), b""  # what begins at `start` and isn't yielded yet
        while start:
            size = min(_BLOCK, start)
            start = file.seek(start - size)
            block = file.read(size) + rest
            end = len(block)
            while (newline := block.rfind(b"\n", 0, end - 1)) >= 0:
                yield start + end, block[newline + 1 : end]
                end = newline + 1
            rest = block[:end]
        if rest:
            yield len(rest), rest


def end_of_whole_lines(path: AnyPath) -> int:
    """The number of bytes of a file without an incomplete last line; 0 if there is no file."""
    return next((end for end, line in last_lines(path) if line.endswith(b"\n")), 0)


@contextmanager
def _open(path: AnyPath) -> Iterator[IO[bytes]]:
    """A context with the file to read, or an empty one if there is none; raises an InputError."""
    try:
        with open_inside(path) if path.exists() else BytesIO() as file:
            yield file
    except OSError as error:
        raise InputError(f"{path} can't be read: {describe_error(error)}; move it away") from error
