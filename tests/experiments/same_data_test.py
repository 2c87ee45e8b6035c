"""Trainings whose losses are compared had the same data."""

import json
import sys
import time

import pytest

from t5x_diffeq.experiments.runs import ExperimentRun, carry_out, read_results
from t5x_diffeq.experiments.same_data import check_same_data, data_facts
from t5x_diffeq.system.errors import InputError

STDLIB = {"data": {"source": "stdlib", "tokenizer": "bytes"}, "init_from": None}


def store_data(workdir, fingerprint, config=STDLIB):
    """What a training writes of its data, and what its outcome has of it."""
    workdir.mkdir()
    parts = [{"source": "own", "fingerprint": fingerprint, "weight": 1, "shards": "data"}]
    (workdir / "data.json").write_text(json.dumps({"parts": parts}))
    (workdir / "config.json").write_text(json.dumps(config))
    return data_facts(workdir)


def test_other_data_of_the_same_name_is_refused(tmp_path):
    theirs, mine = (store_data(tmp_path / name, name) for name in ("before", "now"))
    with pytest.raises(InputError, match=r"run now: its data \(.*\) is not that of run before"):
        check_same_data(tmp_path / "now", {"before": theirs})
    check_same_data(tmp_path / "now", {"before": mine})
    check_same_data(tmp_path / "now", {"before": {"loss": 1.0}})  # of an earlier version


@pytest.mark.parametrize(
    "config",
    [
        {**STDLIB, "data": {"source": "stdlib", "tokenizer": "gpt2.json"}},
        {**STDLIB, "data": {"source": "text_files", "tokenizer": "bytes"}},
        {**STDLIB, "init_from": "DIR"},  # which has the tokenizer
    ],
)
def test_data_that_other_keys_name_may_differ(tmp_path, config):
    theirs = store_data(tmp_path / "before", "before")
    store_data(tmp_path / "now", "now", config)
    check_same_data(tmp_path / "now", {"before": theirs})


def test_nothing_is_checked_before_there_is_data(tmp_path):
    theirs = store_data(tmp_path / "before", "before")
    check_same_data(tmp_path / "now", {"before": theirs})
    (tmp_path / "now").mkdir()
    (tmp_path / "now" / "config.json").write_text(json.dumps(STDLIB))
    check_same_data(tmp_path / "now", {"before": theirs})


def test_a_training_on_other_data_is_ended_at_once(tmp_path, monkeypatch):
    theirs = store_data(tmp_path / "before", "before")
    code = f"""
import os, shutil, time
shutil.copytree({str(tmp_path / "made")!r}, {str(tmp_path / "now")!r})
time.sleep(60)
"""
    store_data(tmp_path / "made", "now")
    monkeypatch.setattr(ExperimentRun, "command", lambda *_: [sys.executable, "-c", code])
    losses = dict.fromkeys(("first", "loss", "perplexity", "lowest"), 1.0)
    before = {"run": "before", "verb": "train", "seconds": 1, **losses, **theirs}
    (tmp_path / "results.jsonl").write_text(json.dumps(before) + "\n")
    began = time.monotonic()
    with pytest.raises(InputError, match=r"run now: its data"):
        carry_out([ExperimentRun("now", "train", ())], tmp_path)
    assert time.monotonic() - began < 30
    assert list(read_results(tmp_path)) == ["before"]
