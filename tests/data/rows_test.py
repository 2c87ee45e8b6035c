"""Rows that can't be read: every source skips, counts and names the same ones, up to a share."""

import json
import re

import pytest

from configs import default
from t5x_diffeq.config.config import DataKeys
from t5x_diffeq.data.corpus import prepare_corpus
from t5x_diffeq.data.encoding import encoder_of
from t5x_diffeq.data.named_source import load_source
from t5x_diffeq.data.rows import Skipped, Unreadable
from t5x_diffeq.data.stream import Lane, LanePosition
from t5x_diffeq.data.stream_files import open_stream
from t5x_diffeq.data.tokenizer import ByteTokenizer
from t5x_diffeq.system.errors import InputError

pyarrow = pytest.importorskip("pyarrow", reason="pyarrow isn't installed")
parquet = pytest.importorskip("pyarrow.parquet")
datasets = pytest.importorskip("datasets", reason="the Hugging Face library isn't installed")
datasets.disable_progress_bars()
ROWS, BAD = 1200, 1100
GOOD = [b"text %d" % n for n in range(ROWS)]
READERS = [
    ("text_files", "jsonl"),
    ("text_files", "parquet"),
    ("stream", "jsonl"),
    ("stream", "parquet"),
    ("huggingface", "parquet"),
]


def write(folder, kind, texts):
    """A file with a column of these bytes, and one of bytes that are no text."""
    path = folder / f"rows.{kind}"
    if kind == "jsonl":
        path.write_bytes(b"".join(b'{"text": "%s", "other": "\xff"}\n' % text for text in texts))
        return path
    columns = {"text": texts, "other": [b"\xff"] * len(texts)}
    arrays = {name: pyarrow.array(each, pyarrow.binary()) for name, each in columns.items()}
    unchecked = {name: each.view(pyarrow.string()) for name, each in arrays.items()}
    parquet.write_table(pyarrow.table(unchecked), path)
    return path


def keys_of(source, path, **keys):
    data = default.get_config().data
    data.update(source=source, path=str(path), **keys)
    if source == "huggingface":
        data.update(path=str(path.parent), validation_split="train")
    return DataKeys(**data)


def read(keys):
    """The text to train on, and what was skipped of it."""
    skipped = Skipped()
    if keys.source == "stream":
        documents = [text for _, _, text in open_stream(keys).train.documents()]
    else:
        source = load_source(keys)
        documents = [*source.train, *(source.validation if keys.source == "text_files" else [])]
    encoder = encoder_of(ByteTokenizer(), keys.loss_on == "completion")
    return "".join(piece for piece, _ in encoder.cut(documents, skipped)), skipped


@pytest.mark.parametrize(("source", "kind"), READERS)
def test_a_row_that_is_not_utf_8_is_skipped_and_named(source, kind, tmp_path, capsys):
    path = write(tmp_path, kind, [*GOOD[:BAD], b"caf\xe9", *GOOD[BAD:]])
    text, skipped = read(keys_of(source, path))
    assert text == b"".join(GOOD).decode()
    assert skipped == {"not UTF-8": 1}
    place = re.search(r"(record|row) (\d+)|byte (\d+)", skipped.faults["not UTF-8"])
    in_file = path.read_bytes().index(b'{"text": "caf\xe9') if kind == "jsonl" else None
    assert int(place[2] or place[3]) == (in_file if place[3] else BAD)
    told = capsys.readouterr().err
    assert told.count("warning: skipped: ") == 1
    assert "rows" in told or source == "huggingface"  # the file, which there has no name


LINES = {  # that are no documents, and why
    "not JSON": b"{broken",
    "not a JSON object": b"[1, 2]",
    "unreadable": b'{"body": "x"}',
    "with a NUL character": b'{"text": "\\u0000"}',
}


@pytest.mark.parametrize("source", ["text_files", "stream"])
def test_lines_of_all_kinds_are_skipped(source, tmp_path):
    path = write(tmp_path, "jsonl", GOOD)
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"\n".join([b"".join(lines[:9]), *LINES.values(), b"".join(lines[9:])]))
    text, skipped = read(keys_of(source, path, max_unreadable=0.01))
    assert text == b"".join(GOOD).decode()
    assert {name: skipped[name] for name in LINES} == dict.fromkeys(LINES, 1)
    assert "has no 'text', but body; set --config.data.text_field" in skipped.faults["unreadable"]


@pytest.mark.parametrize("source", ["text_files", "stream"])
def test_chats_of_mixed_types(source, tmp_path):
    """A content that is a list is one row's fault, not its file's."""
    good = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}
    bad = {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}]}]}
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(each) + "\n" for each in [good, bad, good]))
    keys = keys_of(source, path, max_unreadable=0.5, loss_on="completion")
    opened = open_stream(keys).train.documents() if source == "stream" else load_source(keys).train
    texts = [each[-1] if source == "stream" else each for each in opened]
    assert [isinstance(text, Unreadable) for text in texts][:2] == [False, True]
    assert json.loads(texts[0]) == good and "message 0" in texts[1].fault


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_more_than_the_share_are_an_error(kind, tmp_path):
    path = write(tmp_path, kind, [*GOOD[: BAD + 1], b"\xe9", b"\xe9", *GOOD[BAD + 1 :]])
    with pytest.raises(InputError, match=r"rows.* not UTF-8.* \(2 of 1202 rows can't be read"):
        load_source(keys_of("text_files", path))
    load_source(keys_of("text_files", path, max_unreadable=0.002))
    keys = keys_of("stream", path, tokenizer="bytes")
    prepare_corpus(keys, tmp_path / "run", new=True)  # of so few rows, nothing is said yet
    with pytest.raises(InputError, match=r"\(2 of 1081 rows can't be read, .*=0.001\)"):
        read_through(open_stream(keys))
    read_through(open_stream(keys_of("stream", path, max_unreadable=0.002)))


@pytest.mark.parametrize("source", ["text_files", "stream"])
def test_rows_to_validate_on_are_named_by_their_key(source, tmp_path):
    (tmp_path / "other").mkdir()
    other = write(tmp_path / "other", "jsonl", [*GOOD[:9], b"\xe9"])
    path = write(tmp_path, "jsonl", GOOD[:9])
    keys = {"validation_path": str(other), "max_unreadable": 0.0, "tokenizer": "bytes"}
    with pytest.raises(InputError, match=rf"^data.validation_path: {other}.* is not UTF-8"):
        prepare_corpus(keys_of(source, path, **keys), tmp_path / "run", new=True)


def read_through(stream, *position):
    """The positions of a lane, from one on, in two passes over its file."""
    lane = Lane(stream, encoder_of(ByteTokenizer(), False), 64, 0, 1, 3, LanePosition(*position))
    positions = []
    while lane.position.place < 2:
        lane.window()
        positions.append(lane.position)
    return positions


def test_the_share_of_a_stream_is_that_of_all_its_starts(tmp_path, monkeypatch):
    monkeypatch.setattr("t5x_diffeq.data.stream.BLOCK_DOCUMENTS", 100)
    path = write(tmp_path, "jsonl", [*GOOD[:301], b"\xe9", *GOOD[301:BAD], b"\xe9", *GOOD[BAD:]])
    keys = keys_of("stream", path, max_unreadable=0.002)
    positions = read_through(open_stream(keys))
    middle = json.loads(json.dumps(positions[len(positions) // 4]))
    again = read_through(open_stream(keys), *middle)
    assert again == positions[len(positions) // 4 + 1 :]
    assert again[-1].rows == 1081 and again[-1].skipped[0] == {"not UTF-8": 4}  # in two passes
    strict = open_stream(keys_of("stream", path, max_unreadable=0.001))
    with pytest.raises(InputError, match="2 of 1081 rows"):
        read_through(strict, *middle)


@pytest.mark.parametrize("source", ["text_files", "stream", "huggingface"])
def test_a_column_that_holds_no_text_ends_the_preparation(source, tmp_path):
    path = tmp_path / "rows.parquet"
    parquet.write_table(pyarrow.table({"text": list(range(5000))}), path)
    keys = keys_of(source, path, tokenizer="bytes")
    with pytest.raises(
        InputError,
        match=r"(row|record) [01]: its 'text' is [01], not text; set .*text_field \(\d+ of",
    ):
        prepare_corpus(keys, tmp_path / "run", new=True)
