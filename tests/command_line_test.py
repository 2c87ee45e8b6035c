"""Every verb's bad arguments end in one line and exit status 2; help in 0."""

import subprocess
import sys

import pytest
from conftest import ROOT

from t5x_diffeq.command_line import check_keys, explain
from t5x_diffeq.errors import InputError


def run(*arguments):
    return subprocess.run(
        [sys.executable, "-m", *arguments], capture_output=True, text=True, cwd=ROOT, timeout=60
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["train"], "train needs --config=FILE and --workdir=DIR"),
        (["train", "--config=configs/none.py"], "--config=configs/none.py: there is no such file"),
        (["train", "--config=configs/tiny.py:ode"], "this file has no variants"),
        (["train", "--config=configs/shakespeare.py:odd"], "variant 'odd' is unknown; there are"),
        (["train", "--wrkdir=x"], "--wrkdir is no flag of this verb; did you mean --workdir?"),
        (["train", "workdir"], "argument 'workdir' is not understood"),
        (
            ["train", "--config=configs/tiny.py", "--config.model.num_steps=many"],
            "config.model.num_steps=many can't be used; it takes a value like its default, 12",
        ),
        (["evaluate", "--workdir=/none"], "workdir /none holds no run"),
        (["evaluate", "--workdir=x", "--num_steps=4,0"], "--num_steps='0' is not a number"),
        (["analyze", "spectrum"], "takes spectra, lyapunov, clustering or all, not 'spectrum'"),
        (["analyze", "all"], "analyze needs --workdir=DIR"),
        (["generate", "--workdir=x", "--temperature=-1"], "--temperature=-1.0 must be 0, or"),
    ],
)
def test_bad_arguments(arguments, message):
    verb, *rest = arguments
    ended = run(f"t5x_diffeq.{verb}", *rest)
    assert ended.returncode == 2
    assert ended.stderr.startswith("error: ")
    assert message in ended.stderr
    assert ended.stderr.count("\n") == 1
    assert ended.stdout == ""


VERBS = [
    "train",
    "finetune",
    "evaluate",
    "generate",
    "prepare_data",
    "benchmark",
    "plan",
    "analyze",
    "export",
    "convert",
    "reproduce",
    "make_tasks",
]


@pytest.mark.parametrize("verb", VERBS)
def test_help(verb):
    ended = run(f"t5x_diffeq.{verb}", "--help")
    assert ended.returncode == 0
    assert "  --" in ended.stdout


def test_verbs_are_listed():
    ended = run("t5x_diffeq")
    assert ended.returncode == 0
    assert [line.split()[0] for line in ended.stdout.splitlines()[1:]] == VERBS
    assert run("t5x_diffeq", "trian").returncode == 2


@pytest.mark.parametrize(
    ("key", "near"),
    [
        ("modle.num_steps", "model.num_steps"),
        ("train.batchsize", "train.batch_size"),
        ("model.learning_rate", "optimizer.learning_rate"),
    ],
)
def test_nearest_key(key, near):
    with pytest.raises(InputError, match=f"config key '{key}' does not exist; did you mean {near}"):
        check_keys(["train", f"--config.{key}=3"])


def test_keys_that_exist_pass():
    check_keys(["train", "--config.model.num_steps=3", "-config.train.batch_size", "3"])


def test_library_messages_become_one_line():
    assert explain("flag --config=a.py: Traceback\n  line\nValueError: no good") == (
        "--config=a.py: no good"
    )


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("--processes=0", "--processes=0 must be at least 1"),
        ("--restarts=x", "argument --restarts: invalid int value: 'x'"),
        ("--process=2", "unrecognized arguments: --process=2"),
    ],
)
def test_several_processes_of_this_machine(argument, message):
    script = ROOT / "launch" / "local_processes.py"
    command = [sys.executable, script, argument, "--", "true"]
    ended = subprocess.run(command, capture_output=True, text=True)
    assert (ended.returncode, ended.stderr) == (2, f"error: {message}\n")
