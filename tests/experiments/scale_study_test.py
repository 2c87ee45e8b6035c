"""The study of what grows with size measures a whole command, and says which one failed."""

import pytest
from helpers import call

from studies import scale
from t5x_diffeq.system.errors import InputError, RunError


def test_a_command_has_seconds_and_memory():
    used = scale.measure("sweep", "--help")
    assert 0.05 < used.seconds < 60 and 0.01 < used.memory < 8
    with pytest.raises(RunError, match=r"t5x_diffeq.sweep --quiet --seeds=no ended with status 2"):
        scale.measure("sweep", "--seeds=no")


def test_a_text_can_be_cut_anywhere():
    text = scale._text(20_000_000)
    assert len(text) == 20_000_000 and text.isascii()


def test_what_can_be_measured(tmp_path):
    with pytest.raises(
        InputError, match="--what=time must be steps, bytes, files, outcomes, saves, processes"
    ):
        call(scale, f"--output={tmp_path}", "--what=time")
    (tmp_path / "mine.txt").write_text("kept")
    with pytest.raises(InputError, match="--output"):
        call(scale, f"--output={tmp_path}", "--what=files")
    assert (tmp_path / "mine.txt").read_text() == "kept"


def test_a_state_is_saved_and_restored(tmp_path):
    saved, restored, memory = scale.save_and_restore(tmp_path, 0.003)
    assert (tmp_path / "checkpoints" / "1").is_dir()
    assert min(saved + restored) > 0 and memory == sorted(memory) and memory[0] > 0
