"""A folder that is written whole or not at all, whatever became of earlier attempts."""

import fcntl
import os

import pytest

from t5x_diffeq.hf.folder import new_folder


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_what_a_killed_process_left_is_removed(tmp_path):
    """But neither what a living one writes, nor other folders, nor what a link leads to."""
    living, others = tmp_path / ".new.abcd1234.partial", tmp_path / ".newer.abcd1234.partial"
    for folder in (tmp_path / ".new.x_y01234.partial", living, others, tmp_path / "linked"):
        folder.mkdir()
        (folder / "file").touch()
    (tmp_path / ".new.link1234.partial").symlink_to(tmp_path / "linked")
    held = os.open(living, os.O_RDONLY)
    fcntl.flock(held, fcntl.LOCK_EX)
    with new_folder(tmp_path / "new", "workdir") as partial:
        with new_folder(tmp_path / "new", "workdir"):  # which writes at the same time
            pass
        assert partial.exists()
        (tmp_path / "new").rmdir()
    os.close(held)
    kept = {living.name, others.name, ".new.link1234.partial", "linked", "new"}
    assert set(names(tmp_path)) == kept
    assert names(tmp_path / "linked") == names(others) == ["file"]


def test_a_failed_attempt_leaves_nothing(tmp_path):
    with pytest.raises(ZeroDivisionError), new_folder(tmp_path / "new", "workdir"):
        raise ZeroDivisionError
    assert names(tmp_path) == []
