"""Two processes with local checkpoints: one is killed, then one loses its disk as well."""

import shutil
import signal
import time

import pytest
from fault_processes import FaultyRun, arguments, lose
from helpers import metrics_of, numbered_lines

LOCAL = 4  # steps between local checkpoints; the fault comes before the sixth


@pytest.mark.slow
def test_resumed_from_either_tier_equals_undisturbed(tmp_path):
    (tmp_path / "text.txt").write_text(numbered_lines(300))
    local, run, whole = (tmp_path / name for name in ("local", "run", "whole"))

    def start(workdir, name, victim=None, every=LOCAL):
        (tmp_path / name).mkdir()
        keys = [
            *("--config.train.total_steps=20", "--config.train.checkpoint_every=1000"),
            *(f"--config.train.local_checkpoints={local}", "--config.train.milestones=(1,)"),
            f"--config.train.local_checkpoint_every={every}",
        ]
        own = arguments(tmp_path / "text.txt", workdir) + keys
        return FaultyRun(own, tmp_path / name, victim, "loop", number=6, pause=300)

    def end(process):
        assert [process.end(index) for index in (0, 1)] == [0, 0], process.messages(0)

    end(start(whole, "undisturbed"))
    assert not any(local.iterdir())  # its workdir has the last step

    first = start(run, "killed", 1)
    first.wait_for_mark()
    # Other threads write both: a milestone that is lost here isn't saved again by the next run.
    milestone = run / "checkpoints" / "1"
    while not milestone.exists() or len([*local.glob(f"*/process_*/{LOCAL}")]) < 2:
        time.sleep(0.01)
    lose(first, 1, signal.SIGKILL, "loop")
    lose(again := start(run, "killed again", 0), 0, signal.SIGKILL, "loop")
    assert f"checkpoint 4 is restored from {local}" in again.messages(0)

    (of_process,) = local.glob("*/process_1_of_2")
    shutil.rmtree(of_process)
    end(last := start(run, "another machine"))
    assert "process 1 of 2 does not have it" in last.messages(0)
    assert "is restored from" not in last.messages(0)
    assert "continuing at step 1 " in last.messages(0)
    assert metrics_of(run) == metrics_of(whole)
    assert (run / "checkpoints" / "1" / "MILESTONE").exists()
    assert not any(local.iterdir())
