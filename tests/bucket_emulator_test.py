"""Files, locks, copies and shards in a bucket of a server that others wrote: see emulator.py.

The clients remember the server that they found first, so each test has a process of its own.
"""

import os
import subprocess
import sys

import emulator
import pytest
from emulator import needs_emulator
from helpers import ROOT
from patience import patience

FILES = """
import pytest
from t5x_diffeq.runtime import files, locks, staging
from t5x_diffeq.runtime.errors import InputError
from t5x_diffeq.runtime.files import parse_path
from t5x_diffeq.tracking.jsonl import read_metrics
from t5x_diffeq.tracking.trackers import open_writer

root = parse_path("gs://bucket/run", "it")
for content in (b"good", b"better", bytes(6 * 2**20)):  # the last is sent in parts
    files.write_whole(root / "x", content)
    assert (root / "x").read_bytes() == content
for name in ("from/a", "from/b/c"):
    files.write_whole(root / name, name.encode())
assert [path.name for path in files.files_in(root)] == ["a", "c", "x"]
assert files.files_matching(root / "**" / "c") == [root / "from/b/c"]
with open_writer(root, 0, ("tensorboard",)) as writer:
    writer.write_scalars(1, {"train/loss": 1.0})
assert [line["step"] for line in read_metrics(root)] == [1]
with locks.hold_lock(root / ".lock", "it"):
    assert (root / ".lock").exists()
assert not (root / ".lock").exists()
(copy,) = staging.stage([root / "x"])
assert copy.read_bytes() == bytes(6 * 2**20)
with pytest.raises(InputError, match="is damaged"):
    staging.stage([root / "from/a"], ["0" * 64])
with pytest.raises(InputError, match="there is no such object"):
    staging.stage([root / "none"])
"""
LEASES = """
import os, threading
from t5x_diffeq.runtime import locks
from t5x_diffeq.runtime.errors import InputError
from t5x_diffeq.runtime.files import parse_path

lock, told, ended = parse_path("gs://bucket/run/.lock", "it"), [], threading.Event()

def take():
    try:
        with locks.hold_lock(lock, "it"):
            told.append("held")
            ended.wait(10 * float(os.environ["T5X_DIFFEQ_LEASE_SECONDS"]))
    except InputError:
        told.append("refused")
        if told.count("refused") == 7:
            ended.set()

threads = [threading.Thread(target=take) for _ in range(8)]  # the others see it beat
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
assert sorted(told) == ["held"] + 7 * ["refused"], told
"""
SHARDS = """
import os, sys
from dataclasses import replace
import numpy as np
from t5x_diffeq.runtime import files
from t5x_diffeq.runtime.config import Config
from t5x_diffeq.data.corpus import prepare_corpus
from t5x_diffeq.runtime.files import parse_path

data = Config().data
data = replace(data, source="text_files", path="gs://bucket/texts", tokenizer="bytes")
made = prepare_corpus(data, parse_path("gs://bucket/run", "it"), new=True).parts[0].train
data = replace(data, source="tokens", path="gs://bucket/run/data/0")
for gib in ("1", "0"):  # copied; read by ArrayRecord where they are
    os.environ["T5X_DIFFEQ_CACHE_GIB"] = gib
    found = prepare_corpus(data, parse_path(f"gs://bucket/run{gib}", "it"), new=True).parts[0].train
    assert files.is_in_bucket(found.paths[0]) == (gib == "0")
    np.testing.assert_array_equal(found[0], made[0])
"""


@needs_emulator
@pytest.mark.slow
@pytest.mark.parametrize("code", [FILES, LEASES, SHARDS], ids=["files", "leases", "shards"])
def test_in_the_bucket_of_another_server(code, tmp_path):
    with emulator.serve() as (store, environment):
        text = "".join(f"line {n} of the text.\n" for n in range(3000))
        store.put("bucket", "texts/a.txt", text.encode())
        given = {**os.environ, **environment, "T5X_DIFFEQ_CACHE": str(tmp_path / "cache")}
        given["T5X_DIFFEQ_LEASE_SECONDS"] = f"{patience(1):.0f}"
        command = [sys.executable, "-W", "ignore", "-c", code]
        ended = subprocess.run(command, env=given, cwd=ROOT, capture_output=True, text=True)
        assert ended.returncode == 0, ended.stderr
