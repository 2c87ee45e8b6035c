"""Experiments: runs done once, in parts, stopped and continued; results where they should stand."""

import json
import re
import runpy
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from absl import flags
from helpers import ROOT, call

from studies import (
    budgets,
    compression,
    controls,
    equal_time,
    gpu_quarter,
    grown_depth,
    hypotheses,
    ladder,
    many_depths,
    more_text,
    own_tasks,
    read_twice,
    repeated_text,
    structures,
    two_kernels,
)
from studies.make_tasks import documents, passage
from t5x_diffeq.cli import reproduce
from t5x_diffeq.config import plugins
from t5x_diffeq.config.config import Config
from t5x_diffeq.config.mistakes import check_arguments
from t5x_diffeq.data.tokenizer import ByteTokenizer
from t5x_diffeq.experiments.experiment import Experiment
from t5x_diffeq.experiments.paper import LAPTOP, PAPER
from t5x_diffeq.experiments.present import TableSpec
from t5x_diffeq.experiments.runs import (
    ExperimentRun,
    add_outcome,
    carry_out,
    part_of,
    read_numbers,
    read_results,
    training_seconds,
)
from t5x_diffeq.system.errors import InputError, RunError

STUDIES = (
    *(budgets, compression, controls, equal_time, gpu_quarter, grown_depth, hypotheses, ladder),
    *(many_depths, more_text, own_tasks, read_twice, repeated_text, structures, two_kernels),
)
EVERY = {
    "laptop": [*LAPTOP.values(), *(study.LAPTOP for study in STUDIES)],
    "paper": [*PAPER.values(), *(study.PAPER for study in STUDIES)],
}
SEEDS = range(3)
TEXTS = {"one": {"data.path": "/a"}, "two": {"data.path": "/b"}}


@pytest.fixture
def commands(monkeypatch):
    """Runs call Python with their arguments as a program, and what they call is recorded."""
    called = []

    def command(run, output):
        called.append(run.name)
        return [sys.executable, "-c", *run.arguments]

    monkeypatch.setattr(ExperimentRun, "command", command)
    return called


def make_printing_run(name, value, **labels):
    return ExperimentRun(name, "evaluate", (f"print('{{\"loss\": {value}}}')",), labels)


def test_each_run_is_done_once(commands, tmp_path):
    runs = [make_printing_run("a", 1, model="x"), make_printing_run("b", 2, model="y")]
    carry_out(runs[:1], tmp_path)
    carry_out(runs, tmp_path)
    assert commands == ["a", "b"]
    found = read_results(tmp_path)
    assert (found["b"]["loss"], found["b"]["model"]) == (2, "y")
    assert found["a"]["seconds"] > 0


def line_of(name, **facts):
    return json.dumps({"run": name, "verb": "evaluate", "seconds": 1, "loss": 0, **facts}) + "\n"


@pytest.mark.parametrize(
    ("line", "fault"),
    [
        ("{", "Expecting property name .*; delete the line"),
        ('{"run": "b", "ve\n', "Invalid control character"),
        ("\x00\x01\xff\n", "can't decode|invalid start byte|Expecting value"),
        ("[1]\n", "it is not a JSON object; delete the line, and the same command"),
        ('{"loss": 1}\n', "it lacks 'run'"),
        ('{"run": "b"}\n', "it lacks 'verb'"),
        (line_of(3), "its 'run' is 3"),
        (line_of("b", loss="low"), "its 'loss' is 'low'"),
        (line_of("b", failed=None), "its 'failed' is None"),
        (line_of("b", seconds=True), "its 'seconds' is True"),
        (line_of("b", arguments="--x"), "its 'arguments' is '--x'"),
        (line_of("b", seed={}), "its 'seed' is {}"),
        (line_of("b", verb="train"), "it lacks 'first'"),
        (line_of("b", **{"tasks/piqa/acc": "0.5"}), "its 'tasks/piqa/acc' is '0.5'"),
        (line_of("a"), "run a was done before, see .*results.jsonl, line 1; delete one"),
    ],
)
def test_a_damaged_line_is_named(commands, tmp_path, line, fault):
    damaged = line.encode("latin-1") + b"\n" * (not line.endswith("\n"))
    path = tmp_path / "results.jsonl"
    path.write_bytes(line_of("a").encode() + damaged + line_of("c").encode())
    with pytest.raises(InputError, match=rf"^{re.escape(str(path))}, line 2: .*({fault})"):
        carry_out([make_printing_run("d", 1)], tmp_path)
    assert commands == []


def test_a_line_half_written_counts_for_nothing(commands, tmp_path):
    (tmp_path / "results.jsonl").write_text(line_of("z") + '{"run": "a", "lo')
    carry_out([make_printing_run("a", 1)], tmp_path)
    assert {name: line["loss"] for name, line in read_results(tmp_path).items()} == {"z": 0, "a": 1}


def test_two_experiments_add_to_one_file(tmp_path):
    """No line is lost, although each addition writes the file anew."""

    def add(experiment):
        for number in range(20):
            outcome = json.loads(line_of(f"{experiment}-{number}"))
            add_outcome(tmp_path / "results.jsonl", outcome)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(add, range(4)))
    assert len(read_results(tmp_path)) == 80


def test_a_run_that_fails_ends_the_experiment(commands, tmp_path):
    failing = ExperimentRun("bad", "evaluate", ("import sys; sys.exit('error: no such thing')",))
    with pytest.raises(RunError, match="run bad failed with status 1: error: no such thing"):
        carry_out([failing, make_printing_run("a", 1)], tmp_path)
    assert read_results(tmp_path) == {}


def test_a_run_that_is_refused_is_bad_input(commands, tmp_path):
    code = "import sys; print('error: no such key', file=sys.stderr); sys.exit(2)"
    refused = ExperimentRun("bad", "evaluate", (code,))
    with pytest.raises(InputError, match=r"^run bad: no such key$"):
        carry_out([refused], tmp_path)
    carry_out([refused], tmp_path, go_on=True)
    assert read_results(tmp_path)["bad"]["failed"] == "no such key"


def test_parts_keep_together_what_needs_each_other():
    runs = LAPTOP["figure5"].runs(TEXTS, SEEDS, {})
    parts = [part_of(runs, i, 3) for i in range(3)]
    assert sorted(run.name for part in parts for run in part) == sorted(run.name for run in runs)
    for part in parts:
        names = {run.name for run in part}
        assert all(run.needs is None or run.needs in names for run in part)


@pytest.mark.parametrize("scale", ["laptop", "paper"])
def test_every_run_comes_after_what_it_needs(scale):
    for experiment in EVERY[scale]:
        check_order(experiment)


def check_order(experiment):
    runs = experiment.runs(TEXTS, SEEDS, {})
    names = [run.name for run in runs]
    assert len(set(names)) == len(names)
    for n, run in enumerate(runs):
        assert run.needs is None or run.needs in names[:n]
    for table in experiment.tables:
        labels = {*table.row, table.column, table.best_of} - {None, "task"}
        assert all(run.labels.keys() >= labels for run in runs if run.labels)
    for run in runs:  # every key of the config exists
        check_arguments(run.command(Path("out"))[2:], flags.FlagValues())


def lowest_at(sweep, best):
    """Rounds of a sweep whose loss is lowest at a learning rate of each variant."""
    done, rounds = {}, []
    while new := [run for run in sweep.runs(TEXTS, SEEDS, done) if run.name not in done]:
        rounds.append(new)
        for run in new:
            labels = run.labels
            done[run.name] = {"loss": abs(labels["learning_rate"] - best[labels["model"]])}
    return rounds


def rates(runs, seed=0, **labels):
    return [
        run.labels["learning_rate"]
        for run in runs
        if run.labels.items() >= {"seed": seed, "text": "two", **labels}.items()
    ]


def test_a_sweep_goes_on_until_its_best_is_interior():
    best = {"baseline": 3.1e-2, "euler": 5e-3, "ode": 6e-4, "shared": 4e-3}
    rounds = lowest_at(LAPTOP["table1"], best)
    first = [2e-3, 4e-3, 8e-3]
    assert [rates(new, model="shared") for new in rounds] == [first, [], [], [], []]
    assert [rates(new, model="ode") for new in rounds] == [first, [1e-3], [5e-4], [2.5e-4], []]
    assert [rates(new, model="baseline") for new in rounds] == [
        [4e-3, 8e-3],
        [1.6e-2],
        [3.2e-2],
        [6.4e-2],
        [],
    ]
    for seed in (1, 2):
        assert all(rates(new, seed) == [] for new in rounds[:-1])
        assert sorted(rates(rounds[-1], seed)) == [5e-4, 4e-3, 4e-3, 3.2e-2]


def test_what_follows_a_training_decides_its_rate():
    def evaluate(run):
        return [replace(run, name=f"{run.name}-evaluated", verb="evaluate")]

    sweep = replace(LAPTOP["table1"], follow_up=evaluate)
    first = sweep.runs(TEXTS, SEEDS, {})
    assert [run.verb for run in first[:4]] == ["train", "evaluate"] * 2
    # A training's own loss, which falls with its rate, counts for nothing.
    done = {
        run.name: {"loss": run.labels.get("learning_rate", -number)}
        for number, run in enumerate(first)
    }
    further = sweep.runs(TEXTS, SEEDS, done)[len(first) :]
    assert rates(further, model="shared") == [1e-3]


def test_a_round_leaves_the_runs_before_where_they_are():
    """So that jobs of an array agree, whenever they look."""
    sweep = LAPTOP["table1"]
    first = sweep.runs(TEXTS, SEEDS, {})
    some = {run.name: {"loss": 1.0} for run in first[1:]}
    assert sweep.runs(TEXTS, SEEDS, some) == first
    every = {run.name: {"loss": run.labels["learning_rate"]} for run in first}
    assert sweep.runs(TEXTS, SEEDS, every)[: len(first)] == first


def test_what_follows_a_training_that_diverged_has_diverged_too(commands, tmp_path):
    diverging = ExperimentRun(
        "nan", "train", ("import sys; sys.exit('error: at step 3 loss is nan')",)
    )
    following = [
        replace(make_printing_run(f"after {run.name}", 1, seed=3), needs=run.name)
        for run in (diverging, make_printing_run("a", 1))
    ]
    carry_out([diverging, make_printing_run("a", 1), *following], tmp_path)
    assert commands == ["nan", "a", "after a"]
    found = read_results(tmp_path)
    assert found["nan"]["diverged"] == "at step 3 loss is nan" and found["after a"]["loss"] == 1
    assert found["after nan"].items() >= {"seed": 3, "diverged": "nan diverged"}.items()
    assert "loss" not in found["after nan"]


def test_a_rate_that_diverges_is_the_worst():
    sweep = LAPTOP["table1"]
    first = sweep.runs(TEXTS, SEEDS, {})
    done = {
        run.name: {"loss": 1.0}
        if run.labels["learning_rate"] == 4e-3
        else {"diverged": "loss is nan"}
        for run in first
    }
    further = sweep.runs(TEXTS, SEEDS, done)[len(first) :]
    assert rates(further, model="baseline") == [2e-3]  # 8e-3 is not better, and 4e-3 is at an end


@pytest.mark.parametrize("outcome", [{"diverged": "loss is nan"}, {"loss": float("nan")}])
def test_a_sweep_whose_rates_all_diverge_ends(outcome):
    """Smaller rates are tried first, in whatever order the rates are listed."""
    ode = replace(LAPTOP["table1"].trainings[0], model="hot", rates=(1.6e-2, 8e-3, 3.2e-2))
    sweep = replace(LAPTOP["table1"], trainings=(ode,))
    done = {run.name: outcome for run in sweep.runs(TEXTS, SEEDS, {})}
    halved = []
    with pytest.raises(InputError, match=r"one, hot: .* optimizer.learning_rate .*, 0.000125, "):
        for _ in range(9):
            new = [run for run in sweep.runs(TEXTS, SEEDS, done) if run.name not in done]
            halved += rates(new)
            done |= {run.name: outcome for run in new}
    assert halved == [8e-3 / 2**n for n in range(1, 7)]


def test_the_outcome_of_a_model_with_a_plug_in(monkeypatch, small, tmp_path):
    """Its training was given the plug-in by whoever began it, so reading its config may load it."""
    monkeypatch.setattr(plugins, "_trusted", set())
    small.model.weights = "examples.own_source:OwnEnds"
    workdir = tmp_path / "own"
    workdir.mkdir()
    (workdir / "config.json").write_text(json.dumps(Config.of(small).as_json()))
    evaluation = {"step": 6, "eval/loss": 2.0, "eval/perplexity": 7.4}
    step = {"step": 6, "train/loss": 2.1, "train/tokens_per_second": 1e3}
    lines = map(json.dumps, (evaluation, step))
    (workdir / "metrics.jsonl").write_text("\n".join([*lines, ""]))
    parts = [{"source": "own", "fingerprint": "abc", "weight": 1, "shards": "data/0"}]
    (workdir / "data.json").write_text(json.dumps({"parts": parts}))
    outcome = read_numbers(ExperimentRun("own", "train", ()), tmp_path, "")
    assert outcome["loss"] == 2.0 and outcome["tokens_per_second"] == 1e3
    assert len(outcome["data_fingerprint"]) == 64


@pytest.mark.slow
def test_models_in_the_time_of_the_baseline():
    """Those whose step takes longer take fewer steps at their best rate, with every seed."""
    experiment = equal_time.LAPTOP

    def outcome(run):
        if run.verb == "benchmark":
            ratio = 1.25 if run.name.endswith("ode") else 0.8
            return {"model / baseline: step_ms": ratio}
        return {"loss": abs(run.labels["learning_rate"] - 3.9e-3)}

    done = {}
    while new := [run for run in experiment.runs(TEXTS, SEEDS, done) if run.name not in done]:
        done |= {run.name: outcome(run) for run in new}
    shorter = [
        r for r in experiment.runs(TEXTS, SEEDS, done) if r.labels.get("budget") == "equal time"
    ]
    assert {(run.labels["text"], run.labels["model"], run.labels["seed"]) for run in shorter} == {
        (text, "ode", seed) for text in TEXTS for seed in SEEDS
    }
    assert {run.labels["total_steps"] for run in shorter} == {160}
    assert {run.labels["learning_rate"] for run in shorter} == {4e-3}


def test_experiments_share_runs():
    """What the config's file says anyhow is no other run."""
    texts = {"shakespeare": {"data.path": "/s"}}
    runs = {
        name: {run.name: run.arguments for run in experiment.runs(texts, SEEDS, {})}
        for name, experiment in {
            **LAPTOP,
            "budgets": budgets.LAPTOP,
            "own_tasks": own_tasks.LAPTOP,
        }.items()
        if name in ("table1", "figure14", "figure18", "budgets", "own_tasks")
    }
    own = {f"shakespeare-ode-seed={seed}" for seed in range(3)}
    assert "shakespeare-ode-seed=0" in runs["table1"]
    for name in ("figure14", "budgets", "own_tasks"):
        assert own < runs[name].keys()
    assert len(runs["figure14"].keys() & runs["figure18"].keys()) == 2 * 3
    every = [item for of in runs.values() for item in of.items()]
    assert len(dict(every)) == len(set(every))  # one name, one command


def test_labels_are_those_of_the_experiment_that_shows_them(commands, tmp_path, capsys):
    carry_out([make_printing_run("a", 2, model="x"), make_printing_run("b", 3)], tmp_path)
    shown = Experiment(tables=(TableSpec(("model",), "rate", "loss"),))
    runs = [make_printing_run("a", 2, model="y", rate=7), make_printing_run("b", 3)]
    reproduce.present(shown, runs, tmp_path, tmp_path / "own", ["A caveat."])
    assert "| y | 2 |" in capsys.readouterr().out
    assert "| y | 2 |" in (tmp_path / "own" / "tables.md").read_text()
    assert (tmp_path / "own" / "tables.md").read_text().endswith("A caveat.\n\n")
    assert (tmp_path / "own" / "figure1.png").read_bytes()[1:4] == b"PNG"


def test_training_takes_what_its_steps_took():
    assert training_seconds({10: 100.0, 15: 25.0}, tokens=20) == 10 * 20 / 100 + 5 * 20 / 25


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


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--experiment=table9"], "--experiment=table9 must be table1, table2"),
        (["--experiment=table1", "--scale=phone"], "--scale=phone must be laptop or paper"),
        (["--experiment=table1"], "needs a text"),
        (["--experiment=table1", "--text=a=/x", "--text=a=/y"], "the name a is used twice"),
        (["--experiment=table1", "--text=a=/x"], "--text=a=/x: there is no such file or folder"),
        (["--experiment=table1", "--text=stdlib", "--part=2/2"], "--part=2/2 is not i/n"),
    ],
)
def test_what_reproduce_refuses(arguments, message, tmp_path):
    with pytest.raises(InputError, match=message):
        call(reproduce, f"--output={tmp_path}", *arguments)
    assert list(tmp_path.iterdir()) == []


def test_runs_write_no_results_to_a_bucket():
    with pytest.raises(InputError, match=r"^--output=gs://b/x is in a bucket; name a folder"):
        call(reproduce, "--experiment=table1", "--text=stdlib", "--output=gs://b/x")


def test_reproduce_refuses_an_empty_text_before_the_first_run(tmp_path):
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "empty.txt").touch()
    with pytest.raises(InputError, match=r"--text=a=.*/text has no text; name another"):
        call(
            reproduce,
            f"--output={tmp_path / 'output'}",
            "--experiment=table1",
            f"--text=a={tmp_path / 'text'}",
        )


@pytest.mark.filterwarnings("ignore:.*found in sys.modules")
@pytest.mark.parametrize("study", STUDIES, ids=lambda study: study.__name__)
def test_a_study_is_started_by_its_name(study, monkeypatch, capsys):
    """As `python -m` does it, in this process."""
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(sys, "argv", ["study", "--text=stdlib", "--dry_run"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_module(study.__name__, run_name="__main__")
    out, err = capsys.readouterr()
    starts = (f"train --workdir={ROOT / 'reproduced'}/", "benchmark --config=")
    assert not ended.value.code and any(f"-m t5x_diffeq.{each}" in out for each in starts), err
    assert f"python -m {study.__name__} " in (ROOT / "studies" / "README.md").read_text()
