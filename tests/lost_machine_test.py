"""Two processes with local checkpoints: one is killed, then one loses its disk as well."""

import shutil
import signal
import time

import pytest
from fault_processes import FaultyRun, arguments, lose
from helpers import metrics_of, numbered_lines

LOCAL = 4  # steps between local checkpoints; the fault comes before the sixth


@pytest.mark.slow
@pytest.mark.in_turns("whole programs")
def test_resumed_from_either_tier(tmp_path):
    (tmp_path / "text.txt").write_text(numbered_lines(300))
    local, run = tmp_path / "local", tmp_path / "run"

    def start(name, victim=None):
        (tmp_path / name).mkdir()
        keys = [
            *("--config.train.total_steps=20", "--config.train.checkpoint_every=1000"),
            *(f"--config.train.local_checkpoints={local}", "--config.train.milestones=(1,)"),
            f"--config.train.local_checkpoint_every={LOCAL}",
        ]
        own = arguments(tmp_path / "text.txt", run) + keys
        return FaultyRun(own, tmp_path / name, victim, "loop", number=6, pause=300)

    first = start("killed", 1)
    first.wait_for_mark()
    # Other threads write both: a milestone that is lost here isn't saved again by the next run.
    milestone = run / "checkpoints" / "1"
    while not milestone.exists() or len([*local.glob(f"*/process_*/{LOCAL}")]) < 2:
        time.sleep(0.01)
    lose(first, 1, signal.SIGKILL, "loop")
    lose(again := start("killed again", 0), 0, signal.SIGKILL, "loop")
    assert f"checkpoint 4 is restored from {local}" in again.messages(0)

    (of_process,) = local.glob("*/process_1_of_2")
    shutil.rmtree(of_process)
    last = start("another machine")
    assert [last.end(index) for index in (0, 1)] == [0, 0], last.messages(0)
    assert "process 1 of 2 does not have it" in last.messages(0)
    assert "is restored from" not in last.messages(0)
    assert "continuing at step 1 " in last.messages(0)
    steps = [line["step"] for line in metrics_of(run) if "train/loss" in line]
    assert steps == [*range(1, 21)]
    assert (run / "checkpoints" / "1" / "MILESTONE").exists()
    assert not any(local.iterdir())  # its workdir has the last step
