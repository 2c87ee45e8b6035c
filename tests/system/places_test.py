"""Folders and names at the edge of what a file system allows: one line, and nothing is lost."""

import os
import shlex
import sys
from unittest.mock import create_autospec

import pytest
from absl import flags

from t5x_diffeq.cli.flag_values import parse_folder
from t5x_diffeq.system.errors import InputError
from t5x_diffeq.system.extras import python_command
from t5x_diffeq.system.files import parse_path


@pytest.fixture
def deleted(tmp_path, monkeypatch):
    """A current folder that was deleted."""
    folder = tmp_path / "deleted"
    folder.mkdir()
    monkeypatch.chdir(folder)
    folder.rmdir()


def test_the_current_folder_was_deleted(deleted):
    assert python_command() == shlex.quote(sys.executable)
    with pytest.raises(InputError, match="--workdir=run: the current folder was deleted"):
        parse_path("run", "--workdir")


def test_a_name_that_is_not_utf8(tmp_path):
    name = os.fsdecode(os.fsencode(tmp_path / "run") + b"\xff")
    with pytest.raises(InputError, match=r"run\\udcff': its name isn't UTF-8"):
        parse_path(name, "--workdir")
    assert parse_path(str(tmp_path / "Läufe"), "--workdir").name == "Läufe"


def test_a_link_that_leads_nowhere(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "gone")
    flag = create_autospec(flags.FlagHolder, instance=True)
    flag.name, flag.value = "workdir", str(tmp_path / "link")
    with pytest.raises(InputError, match=r"--workdir=.*link is a link to .*gone, which doesn't"):
        parse_folder(flag, "train")
