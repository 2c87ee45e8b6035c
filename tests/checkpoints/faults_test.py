"""A table of faults. Each must end in one clear line, and nothing may be lost.

Of lost processes CI tries a sample with every phase, every signal and either process; `--whole`
tries every combination.
"""

import itertools
import os
import random
import signal
import subprocess

import jax
import numpy as np
import pytest
from fault_checkpoints import SAID_NOTHING_OF, abstract, faults, restore_step, state_at
from fault_processes import PHASES, STEPS, FaultyRun, arguments, lose, signal_to
from fault_shards import CHECKED, NAMES, data_of, make_shards, shard_faults
from helpers import corpus_of, metrics_of, run_to_end
from patience import patience

from t5x_diffeq.checkpoints.checkpoint import Checkpoints
from t5x_diffeq.checkpoints.restoring import restore_params
from t5x_diffeq.cli.train import train_to_end
from t5x_diffeq.config.config import Config
from t5x_diffeq.system.errors import InputError, RunError
from t5x_diffeq.training import loop
from t5x_diffeq.training.history import Clock
from t5x_diffeq.training.hooks import basic_hooks

pytestmark = pytest.mark.in_turns


def newest(workdir):
    """The newest whole checkpoint; 0 if there is none."""
    folder = workdir / "checkpoints"
    return max((int(p.name) for p in folder.glob("*") if p.name.isdecimal()), default=0)


@pytest.fixture
def survivors(capsys, request):
    """Collects the faults that were survived, and prints how many."""
    found = []
    yield found
    with capsys.disabled():
        print(f"\n{len(found)} faults survived, nothing lost: {request.node.name}")


# ------------------------------------------------------------------------ damaged files


@pytest.mark.slow
def test_every_file_of_a_checkpoint(workdir, capsys, survivors):
    """A run goes on with what was saved, and the damaged checkpoint is kept apart."""
    for name, way in faults(workdir):
        capsys.readouterr()
        step = restore_step(workdir)
        told = capsys.readouterr().err
        if name.name in SAID_NOTHING_OF:
            assert step == 6, (name, way)
        else:
            assert step == 4, (name, way)
            assert told.count("\n") == 1 and "checkpoint 6 can't be read (" in told, (told, name)
            assert (workdir / "unreadable_checkpoints" / "6").is_dir()
        survivors.append((name, way))
    assert len(survivors) >= 60


@pytest.mark.slow
def test_every_file_of_a_checkpoint_for_its_parameters(workdir, survivors):
    """`generate --checkpoint=6` and the like: the right parameters, or one line."""
    params = abstract(state_at(0).params)
    for name, way in faults(workdir):
        if name.name in SAID_NOTHING_OF:
            found, _ = restore_params(workdir, params, 6)
            jax.tree.map(np.testing.assert_array_equal, found, state_at(6).params)
        else:
            with pytest.raises(InputError, match=r"checkpoint 6 of .* can't be read: .* of 2, 4$"):
                restore_params(workdir, params, 6)
        survivors.append((name, way))
    assert len(survivors) >= 60


@pytest.mark.slow
def test_every_file_of_token_shards(tmp_path, survivors):
    """A run that was begun on them refuses them by name; restored, they are what they were."""
    shards, run = make_shards(tmp_path), tmp_path / "run"
    data = data_of(shards)
    before = tokens_of(corpus_of(data, run, new=True))
    for name, way, must_be_found in shard_faults(shards):
        try:
            found = tokens_of(corpus_of(data, run, new=False))
        except InputError as error:
            told = str(error)
            assert str(shards) in told and "\n" not in told, (name, way, told)
            assert not name.endswith(CHECKED) or stem_of(name) in told, (name, way, told)
        else:
            assert not must_be_found, (name, way)
            assert found == before, (name, way)
        survivors.append((name, way))
    assert tokens_of(corpus_of(data, run, new=False)) == before
    assert len(survivors) >= 50


def stem_of(name):
    """Of two files that were swapped, the first is named."""
    return NAMES[0] if name in CHECKED else name.partition(".")[0]


def tokens_of(corpus):
    (part,) = corpus.parts
    splits = (part.train, part.validation)
    return [[each[number].tolist() for number in range(len(each))] for each in splits]


# ------------------------------------------------------------------------ full disks


@pytest.fixture
def disk(tmp_path):
    """A small disk."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=6m", "tmpfs", str(folder)]
    mounted = run_to_end(mount)
    if mounted.returncode:
        pytest.skip(f"no small disk can be mounted here: {mounted.stderr.strip()}")
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


def fill(disk):
    """Writes a file until there is no room."""
    with (disk / "filler").open("ab", buffering=0) as file:
        for size in (2**16, 2**12):
            try:
                while True:
                    file.write(bytes(size))
            except OSError:
                pass


@pytest.mark.slow
def test_full_disks(disk, finished, monkeypatch, survivors):
    """In each phase: one line, and with room again the same command goes on."""
    config, run = Config.of(finished[0]), disk / "run"
    phases = [
        (loop, "check_config"),  # start-up: the data, or the config
        (loop, "open_writer"),  # metrics.jsonl is begun
        (basic_hooks, "evaluate_loss"),  # the evaluation's line
        (Clock, "rates"),  # a step's line
        (Checkpoints, "save"),
    ]
    for owner, name in phases:
        function = getattr(owner, name)

        def fill_then_call(*args, function=function, **kwargs):
            fill(disk)
            return function(*args, **kwargs)

        with monkeypatch.context() as patch:
            patch.setattr(owner, name, fill_then_call)
            with pytest.raises(RunError, match="No space left on device"):
                train_to_end(config, run)
        (disk / "filler").unlink()
        survivors.append(name)
    assert train_to_end(config, run) == 0
    assert metrics_of(run) == metrics_of(finished[1])


# ------------------------------------------------------------------------ lost processes


SIGNALS = (signal.SIGKILL, signal.SIGSTOP, signal.SIGTERM)


def losses_of(whole):
    """(phase, signal, victim) of every fault. Of a sample, each phase has one signal, for one of
    the two processes: others every day."""
    chance = random.Random(os.environ["T5X_DIFFEQ_SAMPLE"])
    first, victims = chance.randrange(len(SIGNALS)), chance.sample([0, 1, 0, 1, 0], len(PHASES))
    for number, phase in enumerate(PHASES):
        if whole:
            yield from itertools.product([phase], SIGNALS, (0, 1))
        else:
            yield phase, SIGNALS[(number + first) % len(SIGNALS)], victims[number]


@pytest.mark.slow
def test_lost_processes(text, tmp_path, survivors, whole):
    """The other process ends in one line, and the same command goes on; after all of that every
    step was reported once."""
    (tmp_path / "logs").mkdir()
    run = tmp_path / "run"
    for phase, number, victim in losses_of(whole):
        before = newest(run)
        logs = tmp_path / f"{phase}-{number.name}-{victim}"
        logs.mkdir()
        lose(FaultyRun(arguments(text, run), logs, victim, phase), victim, number, phase)
        assert newest(run) >= before
        survivors.append((phase, number, victim))
    last = FaultyRun(arguments(text, run), tmp_path / "logs")
    assert [last.end(index) for index in (0, 1)] == [0, 0], last.messages(0)
    steps = [line["step"] for line in metrics_of(run) if "train/loss" in line]
    assert steps == [*range(1, STEPS + 1)]


@pytest.mark.slow
def test_a_hang(text, tmp_path, survivors):
    """A peer that is stopped, and whose silence is allowed: the watchdog finds it, with stacks."""
    limit = min(round(patience(8)), 20)  # a device's collective gives up after 30 s
    words = [*arguments(text, tmp_path / "run"), f"--config.train.hang_timeout={limit}"]
    run = FaultyRun(words, tmp_path, 1, "loop", silence=1000)
    run.wait_for_mark()
    signal_to(run, 1, signal.SIGSTOP)
    assert run.end(0) == 175, run.messages(0)
    told = run.messages(0)
    assert f"was not done within {limit} s: a process, a link or a device hangs; the stacks" in told
    assert told.count("error:") == 1 and "Traceback" not in told, told
    assert "fault_processes.py" in (tmp_path / "run" / "stacks" / "process_0.txt").read_text()
    signal_to(run, 1, signal.SIGCONT)
    assert run.end(1) == 175, run.messages(1)
    assert "fault_processes.py" in (tmp_path / "run" / "stacks" / "process_1.txt").read_text()
    survivors.append("hang")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("phase", "key", "what"),
    [
        ("restore", "save_timeout", "restoring the train state"),
        ("compile", "compile_timeout", "compiling the step"),
    ],
)
def test_a_hang_before_the_loop(text, tmp_path, survivors, phase, key, what):
    """One process doesn't get on; the watchdog ends both, and stacks say where it was."""
    limit = round(patience(8))
    words = [*arguments(text, tmp_path / "run"), f"--config.train.{key}={limit}"]
    run = FaultyRun(words, tmp_path, 1, phase, silence=1000, pause=1000)
    assert [run.end(index) for index in (0, 1)] == [175, 175], run.messages(0)
    assert f"{what} was not done within {limit} s: a process, a link" in run.messages(1)
    assert "stop_then_call" in (tmp_path / "run" / "stacks" / "process_1.txt").read_text()
    survivors.append(f"hang in {phase}")


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1])
def test_one_process_refuses_its_input(text, tmp_path, victim, survivors):
    """The other ends with the same line and status, and no stack of C++."""
    run = FaultyRun(
        arguments(text, tmp_path / "run"), tmp_path, victim, more=["--config.train.batch=3"]
    )
    assert [run.end(index) for index in (0, 1)] == [2, 2]
    refusal = "config key 'train.batch' does not exist; did you mean train.batch_size?"
    prefix = "error: process 1: " if victim else "error: "
    for index in (0, 1):
        assert run.messages(index).strip() == prefix + refusal, run.messages(index)
    survivors.append("refusal")
