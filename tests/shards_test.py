"""Token shards: the same bytes however they were made, and never half of one."""

import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
from conftest import ROOT

from t5x_diffeq.data.corpus import prepare_corpus
from t5x_diffeq.data.packing import Windows
from t5x_diffeq.errors import InputError
from t5x_diffeq.prepare_data import parse_part, prepare


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


def contents(folder):
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and not path.name.startswith(".")
    }


@pytest.fixture
def made(data, tmp_path):
    prepare(data, tmp_path / "made", shards=3, workers=1, part=(0, 1))
    return tmp_path / "made"


def test_any_number_of_workers_and_parts_gives_the_same_bytes(data, made, tmp_path):
    prepare(data, tmp_path / "workers", shards=3, workers=3, part=(0, 1))
    assert contents(tmp_path / "workers") == contents(made)
    for part in range(2):
        assert prepare(data, tmp_path / "parts", shards=3, workers=1, part=(part, 2)) is None
    prepare(data, tmp_path / "parts", shards=3, workers=1, part=(0, 1))
    assert contents(tmp_path / "parts") == contents(made)


def test_what_is_missing_is_made_again(data, made):
    before = contents(made)
    (made / "train-00001-of-00003.json").unlink()  # as if killed before the last write
    (made / "train-00001-of-00003.array_record").write_bytes(b"half")
    (made / ".train-00002-of-00003.1.partial").write_bytes(b"left over")
    prepare(data, made, shards=3, workers=1, part=(0, 1))
    assert contents(made) == before
    assert not list(made.glob(".*.partial"))


def test_training_reads_from_shards_what_it_reads_from_documents(data, made, tmp_path):
    direct = prepare_corpus(data, tmp_path / "direct", new=True)
    data.source, data.path = "tokens", str(made)
    sharded = prepare_corpus(data, tmp_path / "sharded", new=True)
    for split in ("train", "validation"):
        windows = [
            Windows(getattr(corpus, split), 16, split, ragged=True, seed=3)
            for corpus in (direct, sharded)
        ]
        assert len(windows[0]) == len(windows[1]) > 3
        for k in range(len(windows[0])):
            np.testing.assert_array_equal(windows[0][k]["inputs"], windows[1][k]["inputs"])
    assert sharded.tokenizer.fingerprint == direct.tokenizer.fingerprint


def test_damaged_shards_are_named(data, made, tmp_path):
    shard = made / "train-00001-of-00003.array_record"
    content = bytearray(shard.read_bytes())
    content[200] ^= 0xFF  # within the first records
    shard.write_bytes(content)
    with pytest.raises(InputError, match=r"shard train-00001-of-00003 of .* is damaged"):
        prepare(data, made, shards=3, workers=1, part=(0, 1))
    data.source, data.path = "tokens", str(made)
    corpus = prepare_corpus(data, tmp_path / "run", new=True)
    with pytest.raises(InputError, match=r"train-00001-of-00003.array_record: document \d+ can't"):
        for number in range(len(corpus.train)):
            corpus.train[number]
    shard.write_bytes(content[:100])
    with pytest.raises(InputError, match=r"shard .*train-00001-of-00003.array_record can't be"):
        prepare_corpus(data, tmp_path / "again", new=True)


def test_folders_that_can_not_be_used(data, made, tmp_path):
    (tmp_path / "documents" / "00.txt").write_text("changed\n")
    with pytest.raises(InputError, match=r"holds shard train-00000-of-00003 of .* choose another"):
        prepare(data, made, shards=3, workers=1, part=(0, 1))
    data.source, data.path = "tokens", str(tmp_path / "documents")
    with pytest.raises(InputError, match=r"holds no manifest.json; data.source=tokens needs"):
        prepare_corpus(data, tmp_path / "run", new=True)
    for value in ("3", "2/2", "a/b", "-1/2"):
        with pytest.raises(InputError, match="is not i/n"):
            parse_part(value)


@pytest.mark.slow
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
