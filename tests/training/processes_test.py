"""Whole processes: stopped or killed at any step and started again; the README's first command."""

import fcntl
import json
import os
import random
import signal
import subprocess

import pytest
import warm_python
from compilation import flags_of_processes
from helpers import ROOT, metrics_of, numbered_lines, run_to_end
from process_runs import HEAR_CTRL_C, small_training
from stand_ins import add_python, mark_installed


def command(text, workdir):
    return [
        warm_python.executable(),
        "-m",
        "t5x_diffeq.train",
        "--config=configs/shakespeare.py",
        f"--workdir={workdir}",
        f"--config.data.path={text}",
        *small_training(400),
        "--config.model.dropout_rate=0.1",
        "--config.train.log_every=7",
        "--config.train.eval_every=160",
        "--config.train.checkpoint_every=25",
    ]


def start(arguments):
    return subprocess.Popen(
        arguments,
        cwd=ROOT,
        env={**os.environ, "XLA_FLAGS": flags_of_processes()},
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text(numbered_lines(3000))
    return path


def wait_for_reports(process, count=1):
    """Returns when it has told of so many steps, or ended."""
    for line in process.stderr:
        count -= line.startswith("step ")
        if not count:
            return


@pytest.mark.slow
def test_stopped_and_killed_equals_undisturbed(text, tmp_path, whole):
    """By SIGTERM, then by SIGKILL at a step that the sample decides."""
    undisturbed, run = tmp_path / "undisturbed", tmp_path / "run"
    process = start(command(text, undisturbed))
    assert process.communicate() and process.returncode == 0
    process = start(command(text, run))
    wait_for_reports(process)
    process.send_signal(signal.SIGTERM)
    _, log = process.communicate()
    assert process.returncode == 42, log
    assert "saved; the same command continues" in log
    chance = random.Random(os.environ["T5X_DIFFEQ_SAMPLE"])
    for _ in range(20 if whole else 1):
        process = start(command(text, run))
        wait_for_reports(process, chance.randrange(1, 20))
        process.send_signal(signal.SIGKILL)
        process.communicate()
    last = start(command(text, run))
    _, log = last.communicate()
    assert last.returncode == 0, log
    assert metrics_of(run) == metrics_of(undisturbed)


def warm_venv(folder):
    """An environment for the scripts of launch/, whose Python has imported JAX already."""
    add_python(folder, f'exec {warm_python.executable()} "$@"\n')
    mark_installed(folder, ("analysis,explore,export",))  # which local.sh asks for
    return folder


@pytest.mark.slow
def test_local_sh(text, tmp_path):
    """Trains, evaluates and prints a sample; the second time there is nothing to train.

    With code of one's own, for which `evaluate` and `generate` ask anew.
    """
    arguments = [
        *(ROOT / "launch" / "local.sh", ROOT / "configs" / "tiny.py"),
        "--workdir=run with space",  # relative to where one stands
        *("--config.data.source=text_files", f"--config.data.path={text}"),
        *("--config.data.tokenizer=bytes", *small_training(20)),
        "--config.model.scheme=examples.own_scheme:ralston",
    ]
    venv = warm_venv(tmp_path / "venv")
    for told in ("done in", "already finished: 20 of 20"):
        ended = run_to_end(
            arguments,
            cwd=tmp_path,
            env={**os.environ, "XLA_FLAGS": flags_of_processes(), "VENV": venv},
        )
        assert ended.returncode == 0, ended.stderr
        assert told in ended.stderr
        assert "arning" not in ended.stderr
        evaluation, *sample = ended.stdout.splitlines()
        assert json.loads(evaluation)["step"] == 20
        assert "".join(sample).strip()


@pytest.mark.slow
@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 42), (signal.SIGINT, 130)])
def test_local_sh_hands_signals_on(text, tmp_path, number, status):
    """Its training saves, and holds the workdir no more."""
    workdir = tmp_path / "run"
    arguments = [ROOT / "launch" / "local.sh", *command(text, workdir)[3:]]
    arguments[1] = ROOT / "configs" / "shakespeare.py"
    process = subprocess.Popen(
        [*HEAR_CTRL_C, *arguments],
        env={**os.environ, "XLA_FLAGS": flags_of_processes(), "VENV": warm_venv(tmp_path / "venv")},
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    wait_for_reports(process)
    process.send_signal(number)
    told = process.stderr.read()
    assert process.wait() == status, told
    assert "saved; the same command continues" in told.splitlines()[-1]
    with (workdir / ".lock").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
