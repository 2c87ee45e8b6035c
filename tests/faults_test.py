"""A table of faults. Each must end in one clear line, and nothing may be lost."""

import json
import os
import signal

import pytest
from fault_processes import PHASES, Run

RATES = {"train/tokens_per_second"}
STEPS = 120
EVERY = 4  # steps from checkpoint to checkpoint


def arguments(text, workdir):
    """Of the smallest run that there is."""
    return [
        "--config=configs/shakespeare.py:baseline",
        f"--workdir={workdir}",
        f"--config.data.path={text}",
        *("--config.model.embed_dim=16", "--config.model.num_heads=2"),
        *("--config.model.mlp_dim=16", "--config.model.num_steps=1", "--config.model.remat=none"),
        *("--config.data.sequence_length=16", "--config.train.batch_size=4"),
        *("--config.train.eval_batches=1", "--config.train.eval_batch_size=4"),
        *(f"--config.train.total_steps={STEPS}", f"--config.train.checkpoint_every={EVERY}"),
        *("--config.train.log_every=1", "--config.train.eval_every=1000"),
    ]


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text("".join(f"line {n} of the text, {n * n} squared.\n" for n in range(300)))
    return path


def lines(workdir):
    reports = map(json.loads, (workdir / "metrics.jsonl").read_text().splitlines())
    return [{k: v for k, v in report.items() if k not in RATES} for report in reports]


def newest(workdir):
    """The newest whole checkpoint; 0 if there is none."""
    folder = workdir / "checkpoints"
    return max((int(p.name) for p in folder.glob("*") if p.name.isdecimal()), default=0)


def last_line(told):
    return told.strip().splitlines()[-1]


# ------------------------------------------------------------------------ lost processes


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1])
def test_lost_processes(text, tmp_path, victim):
    """Each phase x {SIGKILL, SIGSTOP, SIGTERM}: the other process ends in one line, and the same
    command goes on; after all of that the metrics are those of a run that nothing happened to."""
    (tmp_path / "logs").mkdir()
    whole, run = tmp_path / "whole", tmp_path / "run"
    undisturbed = Run(arguments(text, whole), tmp_path / "logs")
    assert [undisturbed.end(index) for index in (0, 1)] == [0, 0], undisturbed.told(0)
    survived = 0
    for phase in PHASES:
        for number in (signal.SIGKILL, signal.SIGSTOP, signal.SIGTERM):
            before = newest(run)
            logs = tmp_path / f"{phase}-{number.name}"
            logs.mkdir()
            lose(Run(arguments(text, run), logs, victim, phase), victim, number)
            assert newest(run) >= before
            survived += 1
    last = Run(arguments(text, run), tmp_path / "logs")
    assert [last.end(index) for index in (0, 1)] == [0, 0], last.told(0)
    assert lines(run) == lines(whole)
    print(f"survived {survived} of {survived} lost processes, nothing lost")


def lose(run, victim, number):
    """One fault: sends the signal to the victim, and looks how the two end."""
    other = 1 - victim
    run.wait_for_mark()
    signal_to(run, victim, number)
    if number == signal.SIGTERM:  # JAX's service hears it, and both save after the same step
        assert [run.end(index) for index in (0, 1)] == [42, 42], run.told(0)
        return
    assert run.end(other) == 175, run.told(other)
    told = run.told(other)
    how = "has not answered for 10 s" if number == signal.SIGSTOP else "was lost: it was killed"
    assert last_line(told).startswith(f"error: process {victim} of 2 {how}"), told
    assert told.count("error:") == 1 and "Traceback" not in told and "@ " not in told, told
    if number == signal.SIGSTOP:
        signal_to(run, victim, signal.SIGCONT)
        assert run.end(victim) == 175, run.told(victim)
    else:
        assert run.end(victim) == -number


def signal_to(run, index, number):
    os.kill(run.processes[index].pid, number)
