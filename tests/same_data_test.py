"""Trainings whose losses are compared had the same data."""

import json
import sys
import time

import pytest

from t5x_diffeq.data.corpus import stored_fingerprint
from t5x_diffeq.experiments.runs import ExperimentRun, carry_out, read_results
from t5x_diffeq.experiments.same_data import FINGERPRINT, check_same_data
from t5x_diffeq.system.errors import InputError

STDLIB = "--config.data.source=stdlib"
ODE = ("--config=configs/ladder.py:ode-32", STDLIB, "--config.seed=1")
BASELINE = ("--config=configs/ladder.py:baseline-32", STDLIB)


def store_data(workdir, fingerprint):
    workdir.mkdir()
    parts = [{"fingerprint": fingerprint, "weight": 1}]
    (workdir / "data.json").write_text(json.dumps({"parts": parts}))
    return stored_fingerprint(workdir)


def test_other_data_of_the_same_name_is_refused(tmp_path):
    theirs, _ = (store_data(tmp_path / name, name) for name in ("before", "now"))
    done = {"before": {"arguments": BASELINE, FINGERPRINT: theirs}}
    with pytest.raises(InputError, match=r"run now: its data \(.*\) is not that of run before"):
        check_same_data(ODE, tmp_path / "now", done)
    check_same_data(ODE, tmp_path / "before", done)  # the same data


@pytest.mark.parametrize(
    "arguments",
    [
        (*ODE, "--config.data.tokenizer=gpt2.json"),
        (*ODE, "--config.init_from=DIR"),  # which has the tokenizer
        ("--config=configs/laptop.py:ode", STDLIB),
        ("--config=configs/ladder.py:ode-32", "--config.data.source=text_files"),
    ],
)
def test_data_that_other_keys_name_may_differ(tmp_path, arguments):
    store_data(tmp_path / "now", "now")
    check_same_data(arguments, tmp_path / "now", {"before": {"arguments": ODE, FINGERPRINT: "x"}})


def test_a_variant_of_a_config_may_name_other_data(tmp_path):
    file = tmp_path / "own.py"
    file.write_text(
        "import configs.tiny\n"
        "def get_config(variant):\n"
        "    config = configs.tiny.get_config()\n"
        "    config.data.source, config.data.path = 'text_files', variant\n"
        "    return config\n"
    )
    store_data(tmp_path / "now", "now")
    english, german = ((f"--config={file}:{name}",) for name in ("english", "german"))
    done = {"before": {"arguments": english, FINGERPRINT: "x"}}
    check_same_data(german, tmp_path / "now", done)
    with pytest.raises(InputError, match=r"run now: its data"):
        check_same_data(english, tmp_path / "now", done)


def test_nothing_is_checked_before_there_is_data(tmp_path):
    check_same_data(ODE, tmp_path / "now", {"before": {"arguments": ODE, FINGERPRINT: "x"}})


def test_a_training_on_other_data_is_ended_at_once(tmp_path, monkeypatch):
    workdir = tmp_path / "now"
    code = f"""
import json, os, time
os.mkdir({str(workdir)!r})
parts = [{{"fingerprint": "now", "weight": 1}}]
open({str(workdir / "data.json")!r}, "w").write(json.dumps({{"parts": parts}}))
time.sleep(60)
"""
    monkeypatch.setattr(ExperimentRun, "command", lambda *_: [sys.executable, "-c", code])
    before = {"run": "before", "verb": "train", "seconds": 1, "arguments": ODE, FINGERPRINT: "x"}
    (tmp_path / "results.jsonl").write_text(json.dumps(before) + "\n")
    began = time.monotonic()
    with pytest.raises(InputError, match=r"run now: its data"):
        carry_out([ExperimentRun("now", "train", ODE)], tmp_path)
    assert time.monotonic() - began < 30
    assert list(read_results(tmp_path)) == ["before"]
