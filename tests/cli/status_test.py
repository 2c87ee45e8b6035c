"""Goodput and status, from histories whose right answers are known."""

import json
import re
import resource
import time
from unittest.mock import create_autospec

import jax
import jax.numpy as jnp
import pytest
from helpers import call, config_with_train, setup_of, training_of

from t5x_diffeq.analysis import run_plots
from t5x_diffeq.cli import status
from t5x_diffeq.model.flops import step_flops
from t5x_diffeq.system.chips import Chip
from t5x_diffeq.system.errors import InputError, RunError
from t5x_diffeq.system.growing_file import GrowingFile
from t5x_diffeq.training import progress
from t5x_diffeq.training.goodput import COLUMNS, attempts_of, goodput, seconds_left, total_columns
from t5x_diffeq.training.history import FILE, Clock, History, Stopwatch, read_events
from t5x_diffeq.training.hooks import DoneStep, basic_hooks
from t5x_diffeq.training.hooks.basic_hooks import MetricsLog
from t5x_diffeq.training.run_status import RunStatus
from t5x_diffeq.training.setup import Setup


def event(kind, time, step, **facts):
    return {"event": kind, "time": time, "step": step, **facts}


def spent(steps, **others):
    return {"seconds": {"startup": 5.0, "compile": 5.0, "steps": steps, **others}}


CRASHED = [  # 100 s each: 10 to begin, then 1 s a step; killed at step 60, 40 after checkpoint 20
    event("start", 1010.0, 0, began=1000.0, total_steps=100),
    event("time", 1032.0, 20, **spent(20.0, checkpoint=2.0)),
    event("time", 1072.0, 60, **spent(60.0, checkpoint=2.0)),
    event("start", 1182.0, 20, began=1172.0, total_steps=100),
    event("time", 1262.0, 100, **spent(80.0)),
    event("end", 1262.0, 100, error=None),
]
ROLLED_BACK = [
    event("start", 1010.0, 0, began=1000.0, total_steps=100),
    event("time", 1030.0, 20, **spent(20.0)),
    event("time", 1036.0, 25, **spent(25.0, rollback=1.0)),
    event("rollback", 1036.0, 25, to=20, count=1),
    event("time", 1046.0, 30, **spent(35.0, rollback=1.0)),
]


DAMAGED = [
    "no JSON",
    json.dumps([1]),
    json.dumps({**CRASHED[0], "time": "now"}),
    json.dumps({**CRASHED[0], "began": None}),
    json.dumps({**CRASHED[1], "seconds": {"steps": "20"}}),
    json.dumps(event("rollback", 1036.0, 25, to=20)),
]


def test_events_that_are_damaged_are_left_out(tmp_path, capsys):
    lines = [*map(json.dumps, CRASHED[:2]), *DAMAGED, *map(json.dumps, CRASHED[2:])]
    (tmp_path / FILE).write_text("\n".join([*lines, ""]))
    assert read_events(tmp_path) == CRASHED
    said = capsys.readouterr().err
    assert f"{FILE}, line 3: Expecting value" in said and "and 5 others" in said


def test_steps_that_are_taken_again_are_lost():
    attempts = attempts_of(CRASHED)
    total = total_columns(attempts)
    assert (total["steps"], total["lost"], total["down"]) == (100.0, 40.0, 100.0)
    assert sum(total.values()) == pytest.approx(262.0)
    assert goodput(attempts) == pytest.approx(100 / 262)
    assert [(each.first, each.last, each.error) for each in attempts] == [
        (0, 20, "unknown"),
        (20, 100, None),
    ]


def test_a_rollback_loses_the_steps_since_the_checkpoint():
    (attempt,) = attempts_of(ROLLED_BACK)
    columns = attempt.columns()
    assert (columns["steps"], columns["lost"], columns["rollback"]) == (30.0, 5.0, 1.0)
    assert attempt.last == 30
    assert seconds_left(attempt) == pytest.approx(70 * 31 / 30)


def test_what_is_lost_twice_counts_once():
    """Restarts at 500, and then at 200, of 1000 steps: 800 are lost, not 1300."""
    events = [
        event("start", 1000.0, 0, began=1000.0, total_steps=2000),
        *(event("time", 1000.0 + n, n, seconds={"steps": float(n)}) for n in (200, 500, 1000)),
        event("start", 2100.0, 500, began=2100.0, total_steps=2000),
        event("start", 2200.0, 200, began=2200.0, total_steps=2000),
    ]
    total = total_columns(attempts_of(events))
    assert (total["steps"], total["lost"]) == (200.0, 800.0)


def test_a_history_costs_no_run(tmp_path, capsys, monkeypatch):
    """A line that a crash has cut doesn't spoil the next; a full disk is a warning."""
    (tmp_path / FILE).write_text(f"{json.dumps(CRASHED[0])}\n" + '{"event": "ti')
    with History(tmp_path, Stopwatch()) as history:
        history.start(0, 20)
    assert [each["event"] for each in read_events(tmp_path)] == ["start", "start", "time", "end"]

    def fail(*_):
        raise RunError("history.jsonl can't be written: No space left on device")

    monkeypatch.setattr(GrowingFile, "write", fail)
    with (
        pytest.raises(ValueError, match="the run's own"),
        History(tmp_path, Stopwatch()) as history,
    ):
        history.start(0, 20)
        raise ValueError("the run's own")
    assert "warning: history.jsonl can't be written" in capsys.readouterr().err


def write_history(folder, events):
    folder.mkdir()
    (folder / FILE).write_text(
        "".join(f"{json.dumps(each)}\n" for each in events) + '{"event": "ti'
    )
    losses = [
        {"step": 0, "eval/loss": 7.5},
        {"step": 50, "eval/loss": 3.0, "eval/bits_per_byte": 1.5},
    ]
    (folder / "metrics.jsonl").write_text("".join(f"{json.dumps(x)}\n" for x in losses))


@pytest.mark.parametrize(
    ("events", "now", "state"),
    [
        (CRASHED, 2000.0, "done"),
        (CRASHED[:-1], 1300.0, "running"),
        (CRASHED[:-1], 1262.0 + 3700, "silent for 1:01:40"),
        ([*CRASHED[:3], event("end", 1080.0, 60, error="RunError")], 1300.0, "failed (RunError)"),
        ([*CRASHED[:3], event("end", 1080.0, 60, error=None)], 1300.0, "stopped"),
    ],
)
def test_states(tmp_path, events, now, state):
    write_history(tmp_path / "run", events)
    assert RunStatus(tmp_path / "run", now).state == state


def test_what_a_running_run_still_needs_and_its_spikes(tmp_path):
    spikes = [event("spike", 1036.0, 22, loss=9.0, count=n) for n in (1, 2, 2)]
    write_history(tmp_path / "run", ROLLED_BACK[:3] + spikes + ROLLED_BACK[3:])
    run = RunStatus(tmp_path / "run", 1050.0)
    assert (run.spikes, run.rollbacks) == (2, 1)
    assert run.seconds_left == pytest.approx(70 * 31 / 30)
    end = time.strftime("%Y-%m-%d %H:%M", time.localtime(1050 + 70 * 31 / 30))
    assert status._end_of(run) == f", 1:12 left, until {end}"


def test_the_verb_on_a_run_and_on_a_folder_of_runs(tmp_path, capsys):
    write_history(tmp_path / "one", CRASHED)
    write_history(tmp_path / "two", ROLLED_BACK)
    (tmp_path / "three").mkdir()
    (tmp_path / "three" / "config.json").write_text("{}")  # older than histories
    (tmp_path / "four" / "checkpoints" / "0").mkdir(parents=True)
    (tmp_path / "four" / "config.json").write_text("{}")
    call(status, f"--workdir={tmp_path / 'one'}")
    first, losses, *table, last = capsys.readouterr().out.splitlines()
    assert first == f"{tmp_path / 'one'}: done at step 100 of 100"
    assert losses == (
        "validation loss 7.5000 -> 3.0000, lowest 3.0000 at step 50; 1.5000 bits per byte"
    )
    began = [time.strftime("%Y-%m-%d %H:%M", time.localtime(at)) for at in (1000, 1172)]
    assert [re.split("  +", line) for line in table] == [
        ["began", "steps", "startup", "compile", "steps", "checkpoint", "lost", "down", "ended"],
        [began[0], "0 to 20", "0:05", "0:05", "0:20", "0:02", "0:40", "1:40", "unknown"],
        [began[1], "20 to 100", "0:05", "0:05", "1:20", "0:00", "0:00", "0:00", "normally"],
        ["all", "0 to 100", "0:10", "0:10", "1:40", "0:02", "0:40", "1:40"],
    ]
    assert last == "goodput 38.2% of 4:22"
    call(status, f"--workdir={tmp_path / 'one'}", "--json")
    facts = json.loads(capsys.readouterr().out)
    first, second = facts.pop("attempts")
    nothing = dict.fromkeys(COLUMNS, 0.0)
    began = nothing | {"startup": 5.0, "compile": 5.0}
    assert first == began | {"steps": 20.0, "checkpoint": 2.0, "lost": 40.0, "down": 100.0}
    assert second == began | {"steps": 80.0}
    assert facts.pop("seconds") == {name: first[name] + second[name] for name in COLUMNS}
    assert facts == {
        **{"workdir": str(tmp_path / "one"), "state": "done", "step": 100, "total_steps": 100},
        **{"loss": 3.0, "lowest": 3.0, "bits_per_byte": 1.5},
        **{"goodput": pytest.approx(100 / 262), "spikes": 0, "rollbacks": 0, "seconds_left": None},
    }
    call(status, f"--workdir={tmp_path / 'four'}")
    assert capsys.readouterr().out == f"{tmp_path / 'four'}: converted, and not trained since\n"
    call(status, f"--workdir={tmp_path}")
    head, four, one, *_ = capsys.readouterr().out.splitlines()
    assert " ".join(head.split()) == "run state step loss lowest bits/byte goodput time left"
    assert " ".join(four.split()) == "four converted 0 - - - - - -"
    assert " ".join(one.split()) == "one done 100/100 3.0000 3.0000 1.5000 38.2% 4:22 -"
    call(status, f"--workdir={tmp_path}", "--json")
    facts = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(each["state"].partition(" ")[0], each["step"]) for each in facts] == [
        ("converted", 0),
        ("done", 100),
        ("unknown", 0),
        ("silent", 30),
    ]
    with pytest.raises(InputError, match="neither it nor a folder in it holds a run"):
        call(status, f"--workdir={tmp_path / 'nothing'}")


def test_the_losses_of_several_runs_in_one_figure(tmp_path, capsys, monkeypatch):
    write_history(tmp_path / "one", CRASHED)
    (tmp_path / "more").mkdir()
    write_history(tmp_path / "more" / "two", ROLLED_BACK)
    workdirs = [f"--workdir={tmp_path / name}" for name in ("one", "more", "one")]
    drawn = []
    draw = run_plots.losses_over_steps
    monkeypatch.setattr(
        run_plots, "losses_over_steps", lambda runs: drawn.append(draw(runs)) or drawn[-1]
    )
    for name, start in (("a.png", b"\x89PNG"), ("a.svg", b"<?xml"), ("a.pdf", b"%PDF")):
        call(status, *workdirs, f"--plot={tmp_path / name}")
        assert (tmp_path / name).read_bytes().startswith(start)
    out, err = capsys.readouterr()
    assert [line.split()[0] for line in out.splitlines()[:3]] == ["run", "one", "two"]
    assert f"figure in {tmp_path / 'a.pdf'}" in err
    lines = drawn[0].axes[0].lines
    assert [line.get_label() for line in lines] == ["one, validation", "two, validation"]
    assert [list(line.get_ydata()) for line in lines] == [[7.5, 3.0]] * 2
    (tmp_path / "one" / "metrics.jsonl").unlink()
    with pytest.raises(InputError, match="one: no loss has been reported yet"):
        call(status, workdirs[0], f"--plot={tmp_path / 'a.png'}")
    with pytest.raises(InputError, match=r"--plot=a.gif must end in"):
        call(status, workdirs[0], "--plot=a.gif")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(InputError, match="--plot needs the package matplotlib; "):
        call(status, workdirs[0], "--plot=a.png")


def test_a_history_grows_over_attempts(tmp_path):
    for step in (0, 10):
        with History(tmp_path, Stopwatch()) as history:
            history.start(step, 20)
            with history.stopwatch.during("steps"):
                pass
            history.write_time(step + 10, at_once=True)
            history.write("spike", step + 10, loss=1.0, count=1)
    kinds = [each["event"] for each in read_events(tmp_path)]
    assert kinds == ["start", "time", "spike", "time", "end"] * 2
    with pytest.raises(ValueError), History(tmp_path, Stopwatch()) as history:
        history.start(20, 30)
        raise ValueError
    assert read_events(tmp_path)[-1]["error"] == "ValueError"


def test_compilation_counts_as_such_whatever_goes_on():
    watch = Stopwatch("other")
    with watch.counting_compilation():
        jax.jit(lambda x: x * 3.25 - 1.125)(jnp.ones(7))
    before = watch.seconds()
    assert before["compile"] > 0
    jax.jit(lambda x: x * 4.25 - 1.125)(jnp.ones(7))
    after = watch.seconds()
    assert after["compile"] == before["compile"]
    assert sum(after.values()) == pytest.approx(time.time() - watch.began, abs=0.5)


def test_what_is_compiled_while_a_batch_is_waited_for_counts_once():
    clock = Clock(10, 1, 0, Stopwatch("steps"))
    with clock.stopwatch.counting_compilation(), clock.waiting_for_data({}):
        jax.jit(lambda x: x * 5.25 - 1.125)(jnp.ones(7))
    seconds = clock.stopwatch.seconds()
    assert seconds["compile"] > 0 and seconds["steps"] > -1e-6


def test_every_figure_of_a_step(small, tmp_path, monkeypatch, capsys):
    """Four steps of 2000 tokens took 3 s, and the wait for their batches 1 s more."""
    small.train.update(total_steps=300, log_every=8)
    training = training_of(setup_of(small), tmp_path)  # on eight devices
    seconds = {"startup": 9.0, "steps": 100.0, "data": 10.0}
    watch = create_autospec(Stopwatch, instance=True)
    watch.seconds.side_effect = lambda: dict(seconds)
    training.clock = Clock(300, 2000, 196, watch)
    training.history.goodput.return_value = 0.9
    seconds |= {"steps": 103.0, "data": 11.0, "evaluation": 50.0}
    stats = [{"bytes_in_use": 2**30, "peak_bytes_in_use": 2**32}, {"bytes_in_use": 2**31}]
    devices = [create_autospec(jax.Device, instance=True) for _ in stats]
    for device, each in zip(devices, stats, strict=True):
        device.memory_stats.return_value = each
    (tmp_path / "statm").write_text(f"9 {2**30 // resource.getpagesize()} 3")
    monkeypatch.setattr(basic_hooks, "_STATM", tmp_path / "statm")
    monkeypatch.setattr(basic_hooks.jax, "local_devices", lambda: devices)
    monkeypatch.setattr(progress, "chip", lambda kind: Chip(1e9, 1, 1, 1, 1, 1))
    values = {"loss": 3.5, "grad_norm": 0.25, "learning_rate": 1e-3, "targets": 2000.0}
    done = create_autospec(DoneStep, instance=True, step=200)
    MetricsLog(training).report(done, dict(values))
    _, written = training.writer.write_scalars.call_args.args
    model_flops = step_flops(training.setup.model.config, 1).model / 16  # per token
    figures = {
        **{"tokens_per_second": 2000.0, "step_seconds": 1.0, "data_wait": 0.25, "goodput": 0.9},
        **{"mfu": pytest.approx(model_flops * 2000 / (8 * 1e9)), "host_memory_gib": 1.0},
        **{"device_memory_gib": 2.0, "device_memory_peak_gib": 4.0},
    }
    assert written == {f"train/{name}": x for name, x in (values | figures).items()}
    assert capsys.readouterr().err == (
        "step 200/300   67%  loss 3.5000  gradient 0.25  lr 1.0e-03  2.0k tokens/s  1:40 left\n"
    )


def test_a_batch_without_targets_measures_nothing(tmp_path):
    """Its loss and its gradient are 0, which are no loss and no gradient of the model."""
    setup = create_autospec(Setup, instance=True, config=config_with_train(log_every=1))
    training = training_of(setup, tmp_path)
    training.clock.line.return_value = "a line"
    training.clock.rates.return_value = {"tokens_per_second": 1.0, "step_seconds": 1.0}
    training.history.goodput.return_value = 1.0
    for targets, names in ((8.0, {"loss", "grad_norm", "z_loss"}), (0.0, set())):
        values = {"loss": 0.0, "grad_norm": 0.0, "z_loss": 0.0}
        values |= {"learning_rate": 0.1, "targets": targets}
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(basic_hooks, "utilisation", lambda setup, rate: {})
            done = create_autospec(DoneStep, instance=True, step=7)
            MetricsLog(training).report(done, values)
        _, written = training.writer.write_scalars.call_args.args
        assert written.keys() >= {"train/learning_rate", "train/targets"}
        measured = {"train/loss", "train/grad_norm", "train/z_loss"} & written.keys()
        assert measured == {f"train/{name}" for name in names}
    line = Clock(300, 2000, 0, Stopwatch()).line(7, training.clock.line.call_args.args[1])
    assert "loss none  gradient none  lr 1.0e-01" in line
