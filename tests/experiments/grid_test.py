"""The grid of a sweep: what its flags mean, which runs it has, and the table of their outcomes."""

import sys
from math import sqrt
from statistics import mean, stdev

import pytest
from helpers import ROOT, call

from t5x_diffeq.cli import sweep
from t5x_diffeq.experiments.commands import StoppedError
from t5x_diffeq.experiments.grid import parse_grid, points
from t5x_diffeq.experiments.grid_runs import GridSweep, best_of, check_same, format_table, summarise
from t5x_diffeq.experiments.runs import ExperimentRun, carry_out, finished, read_results
from t5x_diffeq.system.errors import InfrastructureError, InputError

TINY = "--config=configs/tiny.py"
RATES = "optimizer.learning_rate=1e-3,2e-3"


def axis(given):
    (found,) = parse_grid([given], {})
    return found


@pytest.mark.parametrize(
    ("given", "values"),
    [
        (RATES, (0.001, 0.002)),
        ("train.depths=(2,4),(2,4,8),()", ((2, 4), (2, 4, 8), ())),
        ("model.tied_head=True,false", (True, False)),
        ("model.num_kv_heads=None,2", (None, 2)),
        ("model.scheme=euler,mypackage.schemes:own(1,2)", ("euler", "mypackage.schemes:own(1,2)")),
        ("data.path=/a,b;/c", ("/a,b", "/c")),
    ],
)
def test_values_are_of_their_keys_types(given, values):
    found = axis(given).values
    assert found == values
    assert list(map(type, found)) == list(map(type, values))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("learning_rate", "--grid=learning_rate is not KEY=VALUE,VALUE"),
        ("optimizer.learning_rat=1", "'optimizer.learning_rat' does not exist; did you mean opt"),
        ("optimizer.learning_rate=1e-3,fast", "optimizer.learning_rate is 'fast'; it must be a nu"),
        ("optimizer.learning_rate=-1", "optimizer.learning_rate is -1.0; it must be greater than"),
        ("model.num_steps=6,,12", "a value is empty"),
        ("model.num_steps=6,06", "the value 6 is given twice"),
        ("seed=1,2", "--seeds=N runs every point with N seeds"),
    ],
)
def test_a_grid_that_cannot_be_is_refused(given, message):
    with pytest.raises(InputError) as refused:
        parse_grid([given], {})
    assert message in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_key_has_its_values_in_one_place():
    with pytest.raises(InputError, match=r"--grid=model.num_steps is given twice"):
        parse_grid(["model.num_steps=1", "model.num_steps=2"], {})
    with pytest.raises(InputError, match=r"contradict each other; leave one"):
        parse_grid([RATES], {"optimizer.learning_rate": 0.1})


def plan_of(*grid, file="configs/tiny.py", seeds=(0,), **overrides):
    return GridSweep(file, "train", overrides, parse_grid(grid, {}), seeds)


def test_runs_are_the_grid_with_every_seed():
    plan = plan_of(RATES, "train.depths=(2,4);()", "variant=ode,baseline", seeds=(5, 6), seed=5)
    runs = plan.runs()
    assert len(runs) == len({run.name for run in runs}) == 2 * 2 * 2 * 2
    assert runs[0].name == "learning_rate=0.001-depths=2+4-variant=ode-seed=5"
    assert runs[0].arguments == (
        "--config=configs/tiny.py:ode",
        "--config.optimizer.learning_rate=0.001",
        "--config.train.depths=(2, 4)",
        "--config.seed=5",
    )
    assert [run.labels["seed"] for run in runs] == [5] * 8 + [6] * 8
    assert len(points(plan.axes)) == 8
    with pytest.raises(InputError, match=r"both name variants; leave one out"):
        plan_of("variant=ode", file="configs/tiny.py:baseline")


OUTCOMES = {  # by rate and seed
    (0.001, 0): {"loss": 2.0, "lowest": 1.9, "bits_per_byte": 1.0, "tokens_per_second": 1000.0},
    (0.001, 1): {"loss": 2.2, "lowest": 2.2, "bits_per_byte": 1.1, "tokens_per_second": 1500.0},
    (0.002, 0): {"loss": 1.0, "lowest": 1.0, "bits_per_byte": 0.5, "tokens_per_second": 1200.0},
    (0.002, 1): {"diverged": "at step 3 loss is nan"},
}


def outcomes_of(plan, outcomes):
    found = {}
    for run in plan.runs():
        outcome = outcomes.get((run.labels["optimizer.learning_rate"], run.labels["seed"]))
        if outcome:
            found[run.name] = {"run": run.name, "arguments": list(run.arguments), **outcome}
    return found


def test_the_table_has_means_and_errors_and_counts_what_diverged():
    plan = plan_of(RATES, seeds=(0, 1))
    summaries = summarise(plan.runs(), outcomes_of(plan, OUTCOMES), plan.axes)
    first, second = format_table(summaries, plan.axes).splitlines()[2:]
    error = stdev([2.0, 2.2]) / sqrt(2)
    assert f"| **{mean([2.0, 2.2]):.4f} ± {error:.4f}** |" in first  # of all seeds: the best
    assert "| **2.0500 ± 0.1500** | **1.0500 ± 0.0500** | **1,250 ± 250** | 2 of 2 |" in first
    assert second == "| 0.002 | 1.0000 | 1.0000 | 0.5000 | 1,200 | 1 of 2, 1 diverged |"
    assert best_of(summaries).labels == (0.001,)
    half = {key: value for key, value in OUTCOMES.items() if key[1] == 0}
    half[0.001, 1] = {"failed": "disk full"}
    summaries = summarise(plan.runs(), outcomes_of(plan, half), plan.axes)
    assert [each.state for each in summaries] == ["1 of 2, 1 failed", "1 of 2, 1 not run"]
    assert best_of(summaries) is None  # one seed each: nothing is known to be better
    assert "**" not in format_table(summaries, plan.axes)
    assert best_of(summarise(plan.runs(), {}, plan.axes)) is None
    no_bits = {
        key: {k: v for k, v in of.items() if k != "bits_per_byte"} for key, of in half.items()
    }
    table = format_table(summarise(plan.runs(), outcomes_of(plan, no_bits), plan.axes), plan.axes)
    assert "bits per byte" not in table


def test_runs_that_were_done_otherwise_are_refused():
    plan = plan_of(RATES)
    done = outcomes_of(plan, OUTCOMES)
    check_same(plan.runs(), done)
    changed = plan_of(RATES, **{"train.batch_size": 8})
    with pytest.raises(InputError, match=r"settings: --config.train.batch_size=8; choose another"):
        check_same(changed.runs(), done)


# ------------------------------------------------------------------------------- the runs


@pytest.fixture
def programs(monkeypatch):
    """Runs call Python with their arguments as a program."""
    monkeypatch.setattr(
        ExperimentRun, "command", lambda run, output: [sys.executable, "-c", *run.arguments]
    )


def run_of(name, program):
    return ExperimentRun(name, "evaluate", (program,))


GOOD = run_of("good", 'print(\'{"loss": 1, "first": 9}\')')


def test_a_run_that_diverges_is_marked_and_one_that_fails_is_tried_again(programs, tmp_path):
    diverging = run_of("nan", "raise SystemExit('error: at step 3 loss is nan and x is 1.0; try')")
    failing = run_of("bad", "raise SystemExit('error: the disk is full')")
    carry_out([diverging, failing, GOOD], tmp_path, go_on=True)
    found = read_results(tmp_path)
    assert found["nan"]["diverged"].startswith("at step 3 loss is nan")
    assert found["bad"]["failed"] == "the disk is full"
    assert finished(found).keys() == {"nan", "good"}
    mended = run_of("bad", GOOD.arguments[0])
    carry_out([diverging, mended, GOOD], tmp_path, "results-1.jsonl", go_on=True)
    found = read_results(tmp_path)  # though the file with the failure is read later
    assert "failed" not in found["bad"] and found["bad"]["loss"] == 1
    assert len((tmp_path / "nan.log").read_text().splitlines()) == 1  # it wasn't tried again


def test_infrastructure_failures_are_passed_on(programs, tmp_path):
    with pytest.raises(InfrastructureError, match="run lost: a link"):
        carry_out(
            [run_of("lost", "import sys; sys.stderr.write('error: a link\\n'); sys.exit(175)")],
            tmp_path,
            go_on=True,
        )
    assert read_results(tmp_path) == {}


SAVES = """
import os, signal, sys, time
got = []
for number in (signal.SIGTERM, signal.SIGINT):
    signal.signal(number, lambda *given: got.append(given[0]))
os.kill(os.getppid(), signal.{signal})
deadline = time.monotonic() + 30
while not got and time.monotonic() < deadline:
    time.sleep(0.01)
time.sleep(0.3)
sys.stderr.write("signals: %d" % len(got))
sys.exit({status} if got == [signal.{signal}] else 1)
"""


@pytest.mark.parametrize(("signal", "status"), [("SIGTERM", 42), ("SIGINT", 130)])
def test_a_signal_reaches_the_run_once_and_ends_the_sweep(programs, tmp_path, signal, status):
    saving = run_of("saves", SAVES.format(signal=signal, status=status))
    with pytest.raises(StoppedError) as stopped:
        carry_out([saving, GOOD], tmp_path, go_on=True)
    assert stopped.value.status == status
    assert (tmp_path / "saves.log").read_text() == "signals: 1"
    assert read_results(tmp_path) == {}


def test_a_run_that_ends_in_spite_of_a_signal_counts_and_the_next_does_not_begin(
    programs, tmp_path
):
    ending = "import os, signal; signal.signal(15, signal.SIG_IGN); os.kill(os.getppid(), 15);"
    ending += f" import time; time.sleep(0.3); {GOOD.arguments[0]}"
    with pytest.raises(StoppedError) as stopped:
        carry_out([run_of("ends", ending), GOOD], tmp_path, go_on=True)
    assert stopped.value.status == 42
    assert read_results(tmp_path).keys() == {"ends"}
    assert not (tmp_path / "good.log").exists()


# ------------------------------------------------------------------------------- the verb


def call_sweep(monkeypatch, *arguments):
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(sys, "argv", ["sweep", *arguments])  # config_flags finds overrides there
    return call(sweep, *arguments)


def test_dry_run_lists_the_commands_of_a_part(monkeypatch, tmp_path, capsys):
    words = [TINY, f"--output={tmp_path}", "--grid", RATES, "--seeds=2"]
    more = ["--config.train.total_steps=7", "--config.seed=3", "--dry_run"]
    assert call_sweep(monkeypatch, *words, *more) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 4
    name = tmp_path / "learning_rate=0.001-seed=3"
    assert f"-m t5x_diffeq.train --workdir={name} --config=configs/tiny.py" in lines[0]
    assert lines[0].endswith(
        "--config.train.total_steps=7 --config.optimizer.learning_rate=0.001 --config.seed=3"
    )
    assert call_sweep(monkeypatch, *words, *more, "--part=1/3") == 0
    assert capsys.readouterr().out.splitlines() == lines[1::3]
    assert list(tmp_path.iterdir()) == []


def test_a_sweep_of_a_tuning_calls_finetune(monkeypatch, tmp_path, capsys):
    words = ["--config=configs/finetune.py:lora", "--config.init_from=/run", f"--output={tmp_path}"]
    assert call_sweep(monkeypatch, *words, "--grid", RATES, "--dry_run") == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2
    assert f"-m t5x_diffeq.finetune --workdir={tmp_path}/learning_rate=0.001-seed=0 " in lines[0]
    assert "--config=configs/finetune.py:lora --config.init_from=/run" in lines[0]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--grid=model.num_heads=2,3"], r"model.embed_dim=128 .*num_heads=3|num_heads"),
        (["--grid=variant=ode,odd"], r"odd"),
        (["--grid=model.scan_unroll=1,9"], r"scan_unroll=9 is more than model.num_steps=6"),
        ([], r"sweep needs --grid=KEY=V1,V2, or --seeds=N"),
        (["--grid=model.num_steps=1", "--part=3/3"], r"--part=3/3 is not i/n"),
        (["--grid=model.num_steps=1", "--table_only"], r"no run is done there yet"),
        (["--seeds=2", "--config.seed=4294967295"], "with config.seed=4294967295, seeds go beyond"),
    ],
)
def test_a_sweep_that_cannot_be_is_refused_before_anything_runs(
    monkeypatch, tmp_path, arguments, message
):
    with pytest.raises(InputError, match=message):
        call_sweep(monkeypatch, TINY, f"--output={tmp_path / 'o'}", *arguments)
    assert not (tmp_path / "o").exists()
