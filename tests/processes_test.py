"""Whole processes: killed at any moment and started again; the README's first command."""

import fcntl
import json
import os
import random
import signal
import subprocess
import sys
import time

import pytest
import warm_python
from compilation import flags_of_processes
from helpers import ROOT, metrics_of, numbered_lines
from process_runs import HEAR_CTRL_C, small_training


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
        "--config.train.eval_every=60",
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


@pytest.mark.slow
def test_killed_again_and_again_equals_undisturbed(text, tmp_path, whole):
    undisturbed, killed = tmp_path / "undisturbed", tmp_path / "killed"
    begun = time.monotonic()
    process = start(command(text, undisturbed))
    assert process.wait() == 0, process.stderr.read()
    duration = time.monotonic() - begun
    chance = random.Random(0)
    for _ in range(20 if whole else 4):
        process = start(command(text, killed))
        time.sleep(chance.uniform(0.2, 0.9) * duration)
        process.send_signal(signal.SIGKILL)
        process.communicate()
    last = subprocess.run(
        command(text, killed),
        cwd=ROOT,
        env={**os.environ, "XLA_FLAGS": flags_of_processes()},
        stderr=subprocess.PIPE,
        text=True,
    )
    assert last.returncode == 0, last.stderr
    assert metrics_of(killed) == metrics_of(undisturbed)


@pytest.mark.slow
def test_local_sh(tmp_path):
    """Trains, evaluates and prints a sample; the second time there is nothing to train."""
    arguments = [
        ROOT / "launch" / "local.sh",
        ROOT / "configs" / "tiny.py",
        "--workdir=run with space",  # relative to where one stands
        "--config.train.total_steps=20",
        "--config.model.num_steps=2",
        "--config.model.time_embed_dim=48",
    ]
    environment = {**os.environ, "XLA_FLAGS": "", "VENV": sys.prefix}
    for told in ("done in", "already finished: 20 of 20"):
        ended = subprocess.run(
            arguments, cwd=tmp_path, env=environment, capture_output=True, text=True
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
        env={**os.environ, "XLA_FLAGS": "", "VENV": sys.prefix},
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    for line in process.stderr:
        if line.startswith("step "):
            process.send_signal(number)
            break
    told = process.stderr.read()
    assert process.wait() == status, told
    assert "saved; the same command continues" in told.splitlines()[-1]
    with (workdir / ".lock").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
