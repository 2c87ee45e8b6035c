"""Token shards: the same bytes however they were made, and never half of one."""

import json
import os
import resource
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
from helpers import ROOT, call, corpus_of
from row import BORDER

from t5x_diffeq.cli import prepare_data
from t5x_diffeq.config.config import DataKeys
from t5x_diffeq.data import encoding, preparation, shards
from t5x_diffeq.data.encoding import TextEncoder
from t5x_diffeq.data.named_source import load_source
from t5x_diffeq.data.packing import Windows
from t5x_diffeq.data.preparation import tokenise_documents
from t5x_diffeq.data.recipe import tokenizer_in
from t5x_diffeq.data.rows import Skipped
from t5x_diffeq.data.tokenizer import ByteTokenizer
from t5x_diffeq.system.errors import InputError, RunError


@pytest.fixture
def data(small, tmp_path):
    """Fifty documents and a sentencepiece tokenizer."""
    folder = tmp_path / "documents"
    folder.mkdir()
    for n in range(50):
        lines = (f"line {m} of document {n}, {m * n} in all.\n" for m in range(1, n % 7 + 3))
        (folder / f"{n:02}.txt").write_text("".join(lines))
    small.data.path = str(folder)
    small.data.tokenizer = "sentencepiece"
    small.data.tokenizer_vocab_size = 300
    return small.data


def prepare(data, folder, shards=3, workers=1, part=(0, 1)):
    data = DataKeys(**data)
    source = load_source(data)
    tokenizer = tokenizer_in(folder / "tokenizer", data, source.train)
    return preparation.prepare_shards(source, tokenizer, folder, shards, workers, part)


def contents(folder):
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and not path.name.startswith(".")
    }


@pytest.fixture
def shards_folder(data, tmp_path):
    prepare(data, tmp_path / "made", shards=3, workers=1, part=(0, 1))
    return tmp_path / "made"


def test_shards_of_another_number_are_not_left_behind(data, shards_folder):
    (shards_folder / "list-of-files.json").write_text("[]")  # of somebody else
    prepare(data, shards_folder, shards=3)
    there = contents(shards_folder)
    with pytest.raises(InputError, match=r"-of-00003, one of 3 shards, and 4 are to be made; "):
        prepare(data, shards_folder, shards=4)
    assert contents(shards_folder) == there


def test_any_number_of_workers_and_parts_gives_the_same_bytes(data, shards_folder, tmp_path):
    prepare(data, tmp_path / "workers", shards=3, workers=3, part=(0, 1))
    assert contents(tmp_path / "workers") == contents(shards_folder)
    for part in range(2):
        assert prepare(data, tmp_path / "parts", shards=3, workers=1, part=(part, 2)) is None
    prepare(data, tmp_path / "parts", shards=3, workers=1, part=(0, 1))
    assert contents(tmp_path / "parts") == contents(shards_folder)


def test_the_config_of_a_fine_tuning_will_do(data, tmp_path):
    """Its number of steps is unknown before the run is named."""
    file = tmp_path / "lora.py"
    values = {key: data[key] for key in ("source", "path")} | {"tokenizer": "bytes"}
    file.write_text(
        "from configs import finetune\n"
        "def get_config():\n"
        "    config = finetune.get_config('lora')\n"
        f"    config.data.update({values})\n"
        "    return config\n"
    )
    call(prepare_data, f"--config={file}", f"--output={tmp_path / 'made'}")
    assert (tmp_path / "made" / "tokenizer").is_dir()
    (tmp_path / "made" / "config.json").write_text('{"run_id": "a"}')
    with pytest.raises(InputError, match="made is the workdir of a run; name another folder"):
        call(prepare_data, f"--config={file}", f"--output={tmp_path / 'made'}")


def test_what_is_missing_is_made_again(data, shards_folder):
    before = contents(shards_folder)
    (shards_folder / "train-00001-of-00003.json").unlink()  # as if killed before the last write
    (shards_folder / "train-00001-of-00003.array_record").write_bytes(b"half")
    (shards_folder / ".train-00002-of-00003.1.partial").write_bytes(b"left over")
    prepare(data, shards_folder, shards=3, workers=1, part=(0, 1))
    assert contents(shards_folder) == before
    assert not list(shards_folder.glob(".*.partial"))


def test_training_reads_from_shards_what_it_reads_from_documents(data, shards_folder, tmp_path):
    direct = corpus_of(data, tmp_path / "direct", new=True)
    data.source, data.path = "tokens", str(shards_folder)
    sharded = corpus_of(data, tmp_path / "sharded", new=True)
    for split in ("train", "validation"):
        windows = [
            Windows(getattr(corpus.parts[0], split), 16, split, BORDER, ragged=True, seed=3)
            for corpus in (direct, sharded)
        ]
        assert len(windows[0]) == len(windows[1]) > 3
        for k in range(len(windows[0])):
            np.testing.assert_array_equal(windows[0][k]["inputs"], windows[1][k]["inputs"])
    assert sharded.tokenizer.fingerprint == direct.tokenizer.fingerprint


def test_the_opening_of_a_text_is_whole_characters(data, tmp_path):
    for name, text in (("train.txt", "some text"), ("validation.txt", "né")):
        (tmp_path / name).write_text(text)
    paths = {"path": tmp_path / "train.txt", "validation_path": tmp_path / "validation.txt"}
    data.update({key: str(path) for key, path in paths.items()}, tokenizer="bytes")
    corpus = corpus_of(data, tmp_path / "run", new=True)
    assert [corpus.opening(count) for count in range(1, 5)] == ["n", "n", "né", "né"]


def test_folders_that_can_not_be_used(data, shards_folder, tmp_path):
    (tmp_path / "documents" / "00.txt").write_text("changed\n")
    with pytest.raises(InputError, match=r"holds shard train-00000-of-00003 of .* choose another"):
        prepare(data, shards_folder, shards=3, workers=1, part=(0, 1))
    data.source, data.path = "tokens", str(tmp_path / "documents")
    with pytest.raises(InputError, match=r"holds no manifest.json; data.source=tokens needs"):
        corpus_of(data, tmp_path / "run", new=True)


def test_long_documents_take_several_records(monkeypatch, data, tmp_path):
    monkeypatch.setattr(shards, "IN_MEMORY_TOKENS", 0)
    monkeypatch.setattr(preparation, "RECORD_TOKENS", 7)
    monkeypatch.setattr(shards, "RECORD_TOKENS", 7)
    prepare(data, tmp_path / "short")
    found = shards.ShardedDocuments(tmp_path / "short", "train")
    monkeypatch.undo()
    prepare(data, tmp_path / "long")
    expected = shards.ShardedDocuments(tmp_path / "long", "train")
    assert len(found.records) > len(found) == len(expected.records)
    for number in range(len(found)):
        np.testing.assert_array_equal(found[number], expected[number])
        for start, stop in ((0, 3), (5, 16), (6, 7), (13, 10_000)):
            part = found.slice(number, start, stop)
            np.testing.assert_array_equal(part, expected[number][start:stop])


def test_what_is_no_text_is_skipped_and_counted(data, tmp_path, capsys):
    path = tmp_path / "mixed.jsonl"
    good = [json.dumps({"text": f"document {n} of them"}).encode() for n in range(20)]
    bad = [b'{"text": " "}', b'{"text": null}', b'{"text": "\xff"}', b'{"text": "\\u0000"}']
    path.write_bytes(b"\n".join(good[:5] + bad + good[5:]))
    data.update(path=str(path), tokenizer="bytes", max_unreadable=1.0)
    manifest = prepare(data, tmp_path / "out")
    assert "mixed.jsonl, line at byte" in manifest["unreadable"]["not UTF-8"]
    assert manifest["skipped"] == {"empty": 2, "not UTF-8": 1, "with a NUL character": 1}
    assert "skipped documents: 2 empty, 1 not UTF-8, 1 with a NUL" in capsys.readouterr().err
    path.write_bytes(b"\n".join(bad))
    with pytest.raises(
        InputError, match=r"no document to train on \(skipped: 2 empty, 1 not UTF-8"
    ):
        prepare(data, tmp_path / "none")
    assert not (tmp_path / "none" / "manifest.json").exists()


def test_enormous_documents_are_tokenised_in_pieces(monkeypatch):
    monkeypatch.setattr(encoding, "PIECE_CHARACTERS", 10)
    monkeypatch.setattr(preparation, "BATCH_CHARACTERS", 25)
    texts = ["a line\nand words, more" * 3, "x" * 35, "short"]
    pieces = [piece for piece, _ in TextEncoder(ByteTokenizer()).cut(texts, Skipped())]
    assert "".join(pieces) == "".join(texts)
    assert max(map(len, pieces)) == 10
    assert pieces[:2] == ["a line\n", "and "]
    found = list(tokenise_documents(texts, TextEncoder(ByteTokenizer()), Skipped()))
    assert [bytes(tokens.astype(np.uint8)) for tokens in found] == [
        text.encode() + b"\0" for text in texts
    ]


def test_one_long_document_is_made_by_all_threads(data, tmp_path, monkeypatch):
    """A piece each; the progress counts characters, since there is one document for each split."""
    monkeypatch.setattr(encoding, "PIECE_CHARACTERS", 100)
    monkeypatch.setattr(preparation, "PIECE_CHARACTERS", 100)
    monkeypatch.setattr(preparation, "BATCH_CHARACTERS", 1)
    monkeypatch.setattr(preparation.os, "cpu_count", lambda: 3)
    (tmp_path / "long.txt").write_text("some words of a line\n" * 200)
    shown, batches, totals, init = [], [], [], preparation.Progress.__init__
    monkeypatch.setattr(preparation.Progress, "update", lambda self, done: shown.append(done))
    monkeypatch.setattr(
        preparation.Progress,
        "__init__",
        lambda self, title, total=None, unit="": totals.append((total, unit)) or init(self, title),
    )
    encode = TextEncoder.encode
    monkeypatch.setattr(
        TextEncoder,
        "encode",
        lambda self, pieces: batches.append(len(pieces)) or encode(self, pieces),
    )
    data.path, data.tokenizer = str(tmp_path / "long.txt"), "bytes"
    prepare(data, tmp_path / "made", shards=4, workers=3)
    assert totals[-1] == (4200, "characters") and shown[-1] == 4200
    assert sorted(shown) == shown and len(shown) > 5 and max(batches) >= 6


def test_another_tokenizer_needs_another_folder(data, shards_folder):
    data.tokenizer_vocab_size = 310
    with pytest.raises(InputError, match=r"made with data.tokenizer_vocab_size 300, not 310"):
        prepare(data, shards_folder)


def test_a_full_disk_loses_nothing(data, shards_folder, monkeypatch):
    """The limit on a file's size stands for the end of the disk."""
    monkeypatch.setattr(preparation, "log", lambda *_: None)  # pytest has it in a file
    before = contents(shards_folder)
    (shards_folder / "train-00001-of-00003.json").unlink()
    previous = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, previous[1]))
        with pytest.raises(RunError, match=r"train-00001-of-00003 of .* can't be written: .*large"):
            prepare(data, shards_folder)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, previous)
        signal.signal(signal.SIGXFSZ, handler)
    prepare(data, shards_folder)
    assert contents(shards_folder) == before
    assert not list(shards_folder.glob(".*.partial"))


def test_a_mixture_of_shards_and_documents(data, shards_folder, tmp_path):
    text = tmp_path / "notes.txt"
    text.write_text("notes of another kind.\n" * 50)
    mixed = data.copy_and_resolve_references()
    parts = ((0.25, "text_files", str(text)), (0.75, "tokens", str(shards_folder)))
    mixed.update(source="mixture", path=None, mixture=parts)
    corpus = corpus_of(mixed, tmp_path / "run", new=True)
    again = corpus_of(mixed, tmp_path / "run", new=False)
    assert corpus.fingerprint == again.fingerprint
    assert corpus.name == f"0.25 x {text}, 0.75 x {data.path}"
    decoded = corpus.tokenizer.decode(corpus.parts[0].train[0][:-1])
    assert decoded == text.read_text()[: len(decoded)]
    text.write_text("changed")
    with pytest.raises(InputError, match=r"started on .*notes.txt"):
        corpus_of(mixed, tmp_path / "run", new=False)
    invalid = ((0, "stdlib", None),), ((1, "mixture", "a"),), ("stdlib",), ()
    for wrong in (*invalid, ((1, "text_files", "nowhere"),), ((1, "textfiles", "a"),)):
        mixed.mixture = wrong
        with pytest.raises(InputError, match=r"data.mixture"):
            corpus_of(mixed, tmp_path / "wrong", new=True)
    data.mixture = parts
    with pytest.raises(InputError, match=r"set data.source=mixture"):
        corpus_of(data, tmp_path / "wrong", new=True)


@pytest.mark.parametrize(("change", "workers"), [("edited", 1), ("cut off", 2)])
def test_text_that_changes_meanwhile_is_not_certified(data, tmp_path, workers, change):
    """It would be a mixture of old and new text; or a document would be missing."""
    path, folder = tmp_path / "lines.jsonl", tmp_path / "shards"
    text = "".join(json.dumps({"text": f"line {n}, {n * n} squared"}) + "\n" for n in range(60))
    path.write_text(text)
    data.update(path=str(path), tokenizer="bytes")
    source = load_source(DataKeys(**data))
    tokenizer = tokenizer_in(folder / "tokenizer", DataKeys(**data), source.train, "text")
    facts = path.stat()
    path.write_text(text.replace("line", "LINE") if change == "edited" else text[:100])
    os.utime(path, ns=(facts.st_atime_ns, facts.st_mtime_ns))
    with pytest.raises(InputError, match="was changed while it was read"):
        preparation.prepare_shards(source, tokenizer, folder, 2, workers)
    assert not (folder / "manifest.json").exists()


@pytest.mark.slow
@pytest.mark.in_turns("trainings")
def test_killed_and_begun_again_gives_the_same_bytes(tmp_path):
    def command(name):
        arguments = ["--config=configs/tiny.py", f"--output={tmp_path / name}", "--workers=2"]
        return [sys.executable, "-m", "t5x_diffeq.prepare_data", *arguments]

    subprocess.run(command("undisturbed"), cwd=ROOT, check=True)
    for seconds in (2, 4, 6, 8):
        process = subprocess.Popen(command("killed"), cwd=ROOT, start_new_session=True)
        time.sleep(seconds)
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    subprocess.run(command("killed"), cwd=ROOT, check=True)
    assert contents(tmp_path / "killed") == contents(tmp_path / "undisturbed")
