"""Experiments: runs done once, in parts, stopped and continued; results where they should stand."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest

from t5x_diffeq import command_line
from t5x_diffeq.data.tokenizer import ByteTokenizer
from t5x_diffeq.errors import InputError, RunError
from t5x_diffeq.experiments.paper import EXPERIMENTS
from t5x_diffeq.experiments.present import Layout, cells, markdown, scores
from t5x_diffeq.experiments.runs import Run, StoppedError, carry_out, part_of, read_results
from t5x_diffeq.make_tasks import documents, passage

TEXTS = {"one": {"data.path": "/a"}, "two": {"data.path": "/b"}}


@pytest.fixture
def commands(monkeypatch):
    """Runs call Python with their arguments as a program, and what they call is recorded."""
    called = []

    def command(run, output):
        called.append(run.name)
        return [sys.executable, "-c", *run.arguments]

    monkeypatch.setattr(Run, "command", command)
    return called


def printing(name, value, **labels):
    return Run(name, "evaluate", (f'print(\'{{"loss": {value}, "first": 9}}\')',), labels)


def test_each_run_is_done_once(commands, tmp_path):
    runs = [printing("a", 1, model="x"), printing("b", 2, model="y")]
    carry_out(runs[:1], tmp_path)
    carry_out(runs, tmp_path)
    assert commands == ["a", "b"]
    found = read_results(tmp_path)
    assert (found["b"]["loss"], found["b"]["model"]) == (2, "y")
    assert found["a"]["seconds"] > 0


def test_a_line_half_written_counts_for_nothing(commands, tmp_path):
    (tmp_path / "results.jsonl").write_text('{"run": "z", "loss": 0}\n{"run": "a", "lo')
    carry_out([printing("a", 1)], tmp_path)
    assert {name: line["loss"] for name, line in read_results(tmp_path).items()} == {"z": 0, "a": 1}


def test_failed_and_stopped(commands, tmp_path):
    failing = Run("bad", "evaluate", ("import sys; sys.exit('error: no such thing')",))
    with pytest.raises(RunError, match="run bad failed with status 1: error: no such thing"):
        carry_out([failing, printing("a", 1)], tmp_path)
    with pytest.raises(StoppedError) as stopped:
        carry_out([Run("s", "evaluate", ("raise SystemExit(42)",))], tmp_path)
    assert stopped.value.status == 42
    assert read_results(tmp_path) == {}


def test_parts_keep_together_what_needs_each_other():
    runs = EXPERIMENTS["figure5"].runs("laptop", TEXTS)
    parts = [part_of(runs, i, 3) for i in range(3)]
    assert sorted(run.name for part in parts for run in part) == sorted(run.name for run in runs)
    for part in parts:
        names = {run.name for run in part}
        assert all(run.needs is None or run.needs in names for run in part)


@pytest.mark.parametrize("scale", ["laptop", "paper"])
@pytest.mark.parametrize("name", EXPERIMENTS)
def test_every_run_comes_after_what_it_needs(name, scale):
    experiment = EXPERIMENTS[name]
    runs = experiment.runs(scale, TEXTS)
    names = [run.name for run in runs]
    assert len(set(names)) == len(names)
    for n, run in enumerate(runs):
        assert run.needs is None or run.needs in names[:n]
    for layout in experiment.layouts:
        labels = {*layout.row, layout.column, layout.best_of} - {None, "task"}
        assert all(run.labels.keys() >= labels for run in runs if run.labels)
    for run in runs:  # every key of the config exists
        command_line.check_keys(run.command(Path("out"))[2:])


def test_a_table_of_means_at_their_best():
    outcomes = [
        {"model": model, "text": "t", "rate": rate, "seed": seed, "loss": loss + seed / 100}
        for model, rate, loss in (
            ("a", 1, 3.0),
            ("a", 2, 1.0),
            ("a", 4, 2.0),
            ("b", 1, 5.0),
            ("b", 2, 6),
        )
        for seed in (0, 2)
    ]
    layout = Layout(row=("model",), column="text", value="loss", best_of="rate")
    found = cells([*outcomes, {"other": 1}], layout)
    a, b = found["a",]["t"], found["b",]["t"]
    assert (a.at, a.interior, b.at, b.interior) == (2, True, 1, False)
    assert a.mean == pytest.approx(1.01)
    assert a.error == pytest.approx(0.01)
    table = markdown(outcomes, layout).splitlines()
    assert table[2] == "| a | 1.0100 ± 0.0100 (2) |"
    assert table[3] == "| b | 5.0100 ± 0.0100 (1, at the edge) |"


def test_figure5_takes_two_texts():
    with pytest.raises(InputError, match="needs two texts"):
        EXPERIMENTS["figure5"].runs("laptop", {})
    laptop = EXPERIMENTS["figure5"].runs("laptop", {"shakespeare": {"data.path": "/s"}})
    assert {run.labels["trained on"] for run in laptop if run.labels} == {"stdlib", "shakespeare"}
    assert json.dumps([run.labels for run in laptop])


def test_tasks_become_rows():
    outcomes = [
        {"model": model, "tasks/a/acc": score, "tasks/b/acc": 1, "tasks/b/perplexity": 9}
        for model, score in (("x", 0.25), ("y", 0.5))
    ]
    table = markdown(scores(outcomes), Layout(("task",), "model", "score")).splitlines()
    assert table[2:] == ["| a | 0.25 | 0.5 |", "| b | 1 | 1 |"]


def test_own_tasks_ask_for_what_stands_in_the_text():
    text = " ".join(f"word{n}" for n in range(300)).encode()
    windows = [np.frombuffer(text[n : n + 90], np.uint8).astype(int) for n in range(0, 2000, 90)]
    passages = [words for window in windows if (words := passage(window, ByteTokenizer()))]
    assert len(passages) == len(windows)
    asked = documents(passages)
    for document in asked:
        own = document["beginning"] + document["endings"][document["label"]]
        assert own == document["before"] + document["last"]
        assert own in text.decode()
        others = [e for e in document["endings"] if document["beginning"] + e in text.decode()]
        assert others == [document["endings"][document["label"]]]
    assert {document["label"] for document in asked} == {0, 1, 2, 3}
    assert passage(np.frombuffer(b"too few words", np.uint8), ByteTokenizer()) is None
