"""Makes documents of rows, and counts the rows that can't be read.

A row is a line of JSON, a record of a table, or a whole file of text. If a row can't be read, an
`Unreadable` document stands in its place. Such documents are skipped, counted, and named in the
log; too many of them are an error (`data.max_unreadable`). All readers follow this rule.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from t5x_diffeq.data.conversations import conversation_of, fields_of, find_text_fault
from t5x_diffeq.system.console import log
from t5x_diffeq.system.errors import InputError
from t5x_diffeq.system.files import parse_json

_ONE_PER_LINE = "write one object per line, or delete it"
_ENOUGH_ROWS = 1000  # after so many, a source is refused if most of its rows can't be read
_ENOUGH_UNREADABLE = 100  # an endless source is judged once its limit allows so many of its rows
_UTF16 = "a text in UTF-16", "convert it: iconv -f UTF-16 -t UTF-8 FILE > NEW"
_OTHER_KINDS = (
    (
        b"\x1f\x8b",
        "compressed by gzip",
        "let its name end in .gz, or unpack it if it is an archive",
    ),
    (b"\x28\xb5\x2f\xfd", "compressed by zstd", "let its name end in .zst"),
    (b"\xff\xfe", *_UTF16),
    (b"\xfe\xff", *_UTF16),
    (b"PK\x03\x04", "an archive (zip, docx, xlsx, ...)", "unpack it, or save its text"),
    (b"%PDF-", "a PDF", "convert it, for example with pdftotext"),
    (b"PAR1", "a parquet file", "let its name end in .parquet"),
)
FAULTS = "unreadable"  # the key of faults in a shard's facts
_BYTE_ORDER_MARK = "\ufeff"  # at the start of a text it only says that UTF-8 follows


class Unreadable(str):
    """Stands for the document of a row that can't be read; an empty text.

    Such rows are counted by their `reason`. The `fault` names the row and what was found there.
    """

    reason: str
    fault: str

    def __new__(cls, reason: str, fault: str) -> "Unreadable":
        """The stand-in for a row."""
        text = super().__new__(cls)
        text.reason, text.fault = reason, fault
        return text

    def __getitem__(self, part: Any) -> "Unreadable":
        """A part of what can't be read can't be read either."""
        return self


def document_of(record: Mapping[str, Any], field: str | None, where: str) -> str:
    """The document of a record at `where`, or an `Unreadable` in its place.

    The text, which may be bytes or None, is in `field`. If `field` is None, the record is a
    conversation.
    """
    try:
        text = _text_in(record, field, where)
    except InputError as error:
        return Unreadable("unreadable", str(error))
    # What the escapes of a conversation's JSON hide is found later (`find_conversation_fault`).
    reason = find_text_fault(text)
    if reason in (None, "empty"):
        return text
    return Unreadable(reason, f"{where} is {reason}; convert the text, or delete it")


def document_of_line(line: bytes, field: str | None, where: str) -> str:
    """The document of a line, a JSON object, or an `Unreadable`; `field` as in `document_of`."""
    try:
        record = parse_json(line.decode("utf-8", "surrogateescape"))
    except ValueError as error:
        if (other := _other_kind(line, where)) is not None:  # an `Unreadable` is an empty text
            return other
        return Unreadable("not JSON", f"{where} is not JSON: {error}; {_ONE_PER_LINE}")
    if not isinstance(record, dict):
        fault = f"{where} is not a JSON object but {type(record).__name__}; {_ONE_PER_LINE}"
        return Unreadable("not a JSON object", fault)
    return document_of(record, field, where)


def document_of_text(content: bytes, where: str) -> str:
    """The document that is a whole file, or an `Unreadable` if its content is no text."""
    try:
        text = content.decode("utf-8")
        offset = content.find(b"\0")
    except UnicodeDecodeError as error:
        offset = error.start
    if offset < 0:
        return text
    if (other := _other_kind(content, where)) is not None:
        return other
    fault = (
        f"{where} is not text: byte 0x{content[offset]:02x} at offset {offset} is not UTF-8 or "
        "NUL; convert the file or leave it out"
    )
    return Unreadable("with a NUL character" if content[offset] == 0 else "not UTF-8", fault)


def _other_kind(content: bytes, where: str) -> Unreadable | None:
    """What content that is no text is, if it begins as a file of a common kind does."""
    for start, kind, way_out in _OTHER_KINDS:
        if content.startswith(start):
            return Unreadable("not UTF-8", f"{where} is {kind}; {way_out}")
    return None


def _text_in(record: Mapping[str, Any], field: str | None, where: str) -> str:
    if field is None:
        return conversation_of(record, where)
    fields_of(record, field, where)
    value = record[field]
    if isinstance(value, bytes):
        value = value.decode("utf-8", "surrogateescape")
    if not isinstance(value, str | None):
        way_out = "set --config.data.text_field"
        if field in ("messages", "conversations"):
            way_out = (
                "train on conversations: --config.data.loss_on=completion and "
                "--config.data.chat_template=plain, or FILE.jinja"
            )
        elif isinstance(value, dict | list):
            way_out += " to a field of text, or write one object with a text per line"
        raise InputError(f"{where}: its {field!r} is {value!r:.60}, not text; {way_out}")
    return (value or "").removeprefix(_BYTE_ORDER_MARK)


class Skipped(Counter[str]):
    """How many documents were left out, by reason.

    For each reason for which rows are unreadable, `faults` describes the first such row.
    """

    def __init__(self, counts: Mapping[str, int] = {}, faults: Mapping[str, str] = {}):
        super().__init__(counts)
        self.faults = dict(faults)

    def skip(self, text: str, reason: str) -> None:
        """Counts a document; names it in the log if it is the first unreadable for this reason."""
        self[reason] += 1
        if isinstance(text, Unreadable) and reason not in self.faults:
            self.faults[reason] = text.fault
            log(f"warning: skipped: {text.fault}")

    def note(self, documents: Iterable[str]) -> None:
        """Counts unreadable documents, which are skipped and logged when they are tokenised."""
        for each in documents:
            if isinstance(each, Unreadable):
                self[each.reason] += 1
                self.faults.setdefault(each.reason, each.fault)

    def add(self, counts: Mapping[str, int], faults: Mapping[str, str]) -> None:
        """Adds what was skipped elsewhere."""
        self.update(counts)
        self.faults = {**faults, **self.faults}

    @property
    def unreadable(self) -> int:
        """The number of unreadable rows."""
        return sum(self[reason] for reason in self.faults)

    def check(self, rows: int, limit: float) -> None:
        """Raises an InputError if the share of unreadable rows is larger than `limit`."""
        if self.unreadable > limit * rows:
            raise InputError(
                f"{next(iter(self.faults.values()))} ({self.unreadable} of {rows} rows can't be "
                f"read, more than the share data.max_unreadable={limit:g})"
            )

    def check_so_far(self, rows: int, limit: float) -> None:
        """Calls `check` before all rows are read, if most of many rows so far are unreadable."""
        if rows >= _ENOUGH_ROWS and self.unreadable > 0.5 * rows:
            self.check(rows, limit)

    def check_endless(self, rows: int, limit: float) -> None:
        """Calls `check` for the rows so far of a source without end, once they are enough."""
        self.check_so_far(rows, limit)
        if limit == 0 or limit * rows >= _ENOUGH_UNREADABLE:
            self.check(rows, limit)

    def as_json(self) -> dict[str, dict]:
        """The entries for a shard's facts or a manifest."""
        counts = {"skipped": dict(sorted(self.items()))}
        return {**counts, FAULTS: self.faults} if self.faults else counts

    def __str__(self) -> str:
        """`3 empty, 1 not UTF-8`."""
        return ", ".join(f"{number} {reason}" for reason, number in sorted(self.items())) or "none"
