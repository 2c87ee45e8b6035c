"""Documents of files: every format by number, and what is wrong named with its place."""

import gzip
import json
import os
import re

import pytest

from t5x_diffeq.data import documents
from t5x_diffeq.data.documents import DocumentRange, FileDocuments
from t5x_diffeq.system.errors import InputError

TEXTS = ["first\ndocument", "ünïcode 😀", "", "x" * 300, "last"]
LINES = "".join(json.dumps({"id": n, "text": t}) + "\n" for n, t in enumerate(TEXTS)).encode()


def write(folder, name):
    """A file of `TEXTS`, in the format that its name says."""
    path = folder / name
    if name.endswith(".parquet"):
        pyarrow = pytest.importorskip("pyarrow", reason="pyarrow isn't installed")
        parquet = pytest.importorskip("pyarrow.parquet")
        parquet.write_table(pyarrow.table({"text": TEXTS}), path, row_group_size=2)
    elif name.endswith(".zst"):
        pyarrow = pytest.importorskip("pyarrow", reason="pyarrow isn't installed")
        frames = (pyarrow.Codec("zstd").compress(part) for part in (LINES[:50], LINES[50:]))
        path.write_bytes(b"".join(frames))
    else:
        path.write_bytes(gzip.compress(LINES) if name.endswith(".gz") else LINES)
    return path


def test_lines_of_json_are_other_documents_as_text(tmp_path, capsys):
    """So a file that is renamed isn't taken for the data that it was."""
    lines = b'{"text": "one"}\n{"text": "two"}\n'
    found = {}
    for name in ("a.txt", "a.jsonl", "a.ndjson"):
        (tmp_path / name).write_bytes(lines)
        found[name] = FileDocuments([tmp_path / name], "text")
    assert "a.txt looks like JSON, and is read as text; lines of JSON" in capsys.readouterr().err
    assert list(found["a.jsonl"]) == list(found["a.ndjson"]) == ["one", "two"]
    prints = [each.fingerprint for each in found.values()]
    assert prints[0] != prints[1] == prints[2]
    for name in ("b.txt.gz", "b.jsonl.gz"):
        (tmp_path / name).write_bytes(gzip.compress(lines, mtime=0))
    text, rows = (FileDocuments([tmp_path / name], "text") for name in ("b.txt.gz", "b.jsonl.gz"))
    assert text.fingerprint != rows.fingerprint


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.json.gz", "a.jsonl.zst", "a.parquet"])
def test_every_format_gives_its_documents(tmp_path, name, monkeypatch):
    monkeypatch.setattr(documents, "CHUNK_BYTES", 40)
    found = FileDocuments([write(tmp_path, name)], "text")
    assert list(found) == TEXTS
    assert [found[n] for n in (4, 0, 3)] == ["last", TEXTS[0], TEXTS[3]]
    assert found.characters == sum(map(len, TEXTS))
    if name in ("a.jsonl", "a.parquet"):
        assert len(found.chunks) == 3  # never all of it at once
    with pytest.raises(IndexError):
        found[5]


def test_files_follow_one_another(tmp_path):
    (tmp_path / "b.txt").write_text("a whole file\n")
    (tmp_path / "c.md.gz").write_bytes(gzip.compress(b"# another"))
    paths = [write(tmp_path, "a.jsonl"), tmp_path / "b.txt", tmp_path / "c.md.gz"]
    found = FileDocuments(paths, "text")
    assert list(found) == [*TEXTS, "a whole file\n", "# another"]


@pytest.mark.parametrize(
    ("field", "message"),
    [
        ("messages", r"train on conversations: --config\.data\.loss_on=completion"),
        ("data.text", "a field within another can't be named: move the text to the top"),
        ("gone.text", "has no 'gone.text', but messages, data; set --config.data.text_field"),
    ],
)
def test_fields_that_hold_no_text(tmp_path, field, message):
    (tmp_path / "a.jsonl").write_text('{"messages": [{"role": "user"}], "data": {"text": "a"}}')
    (document,) = FileDocuments([tmp_path / "a.jsonl"], field, max_unreadable=1.0)
    assert re.search(message, document.fault)


def test_parts_meet_within_a_document(tmp_path):
    found = FileDocuments([write(tmp_path, "a.jsonl")], "text")
    for character in (0, 1, 14, 15, 200, found.characters):
        cut = found.character(character)
        head, tail = DocumentRange(found, (0, 0), cut), DocumentRange(found, cut, (len(found), 0))
        assert "".join(head) + "".join(tail) == "".join(TEXTS)
        assert sum(map(len, head)) == character


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b"{broken", r"a.jsonl, line at byte 15 is not JSON"),
        (b"[1, 2]", r"at byte 15 is not a JSON object but list; write one obj"),
        (b'{"body": "x"}', r"has no 'text', but body; set --config.data.text_field"),
        (b'{"text": ["a", "b"]}', r"not text; set .* or write one object with a text per line"),
        (b'{"text": 7}', r"its 'text' is 7, not text; set --config.data.text_field"),
    ],
)
def test_lines_that_are_no_documents(tmp_path, line, message):
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "ok"}\n' + line)
    with pytest.raises(InputError, match=message):
        FileDocuments([tmp_path / "a.jsonl"], "text")


@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.jsonl.zst", "a.parquet"])
def test_damaged_files_are_named(tmp_path, name):
    path = write(tmp_path, name)
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(InputError, match=rf"{name}.*; restore it, or leave it out"):
        FileDocuments([path], "text")


def test_other_columns_are_named(tmp_path):
    with pytest.raises(InputError, match=r"has no 'body', but text; set"):
        FileDocuments([write(tmp_path, "a.parquet")], "body")


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl.gz", "a.jsonl.zst"])
def test_more_text_than_memory_is_refused(tmp_path, name, monkeypatch):
    """A compressed file may hold a thousand times its size."""
    monkeypatch.setattr(documents, "_most_bytes", lambda: len(LINES) - 1)
    with pytest.raises(
        InputError, match=rf"{name} is read as a whole and has more than .* GiB .*; split it"
    ):
        FileDocuments([write(tmp_path, name)], "text")


def test_a_file_that_is_written_while_it_is_read(tmp_path):
    """Its size and its time may be what they were."""
    path = write(tmp_path, "a.jsonl")
    found = FileDocuments([path], "text")
    found.check_unchanged()
    facts = path.stat()
    path.write_bytes(LINES.replace(b"last", b"LAST"))
    os.utime(path, ns=(facts.st_atime_ns, facts.st_mtime_ns))
    with pytest.raises(InputError, match=r"a.jsonl was changed while it was read"):
        found.check_unchanged()


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl", "a.jsonl.gz"])
def test_a_byte_order_mark_is_no_text(tmp_path, name):
    content = b"\xef\xbb\xbf" + LINES
    (tmp_path / name).write_bytes(gzip.compress(content) if name.endswith("gz") else content)
    found = list(FileDocuments([tmp_path / name], "text"))
    assert found == ([LINES.decode()] if name == "a.txt" else TEXTS)
