"""Commands end with the process that started them."""

import os
import signal
import subprocess
import sys
from contextlib import suppress

import psutil
import pytest
from patience import wait_for

from t5x_diffeq.system.parent import end_with_parent

CHILD = """
import os, pathlib, time
from absl import flags
from t5x_diffeq.cli import command_line

def verb():
    assert "T5X_DIFFEQ_PARENT" not in os.environ  # of its own children
    written = pathlib.Path({file!r} + ".part")
    written.write_text(str(os.getpid()))
    written.rename({file!r})
    time.sleep(60)

command_line.run(verb, "A verb.", flags.FlagValues())
"""
PARENT = """
import pathlib, sys
from t5x_diffeq.experiments.commands import Commands
with Commands() as commands:
    commands.run([sys.executable, "-c", {child!r}], pathlib.Path({file!r} + ".log"))
"""


only_linux = pytest.mark.skipif(
    sys.platform != "linux", reason="only Linux tells a process of its parent's end"
)


def has_ended(process):
    with suppress(psutil.NoSuchProcess):
        return process.status() == psutil.STATUS_ZOMBIE
    return True


@only_linux
def test_a_run_ends_with_an_experiment_that_is_killed(tmp_path):
    file = tmp_path / "child"
    child = CHILD.format(file=str(file))
    parent = subprocess.Popen([sys.executable, "-c", PARENT.format(child=child, file=str(file))])
    wait_for(file.exists, seconds=60)
    process = psutil.Process(int(file.read_text()))
    assert not has_ended(process)
    parent.kill()
    parent.wait()
    wait_for(lambda: has_ended(process), seconds=60)


@only_linux
def test_a_run_whose_experiment_was_killed_before_it_started_ends(tmp_path):
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    environment = {**os.environ, "T5X_DIFFEQ_PARENT": str(gone.pid)}
    command = [sys.executable, "-c", CHILD.format(file=str(tmp_path / "child"))]
    assert subprocess.run(command, env=environment).returncode == -signal.SIGTERM
    assert not (tmp_path / "child").exists()


def test_a_command_of_a_person_goes_on():
    end_with_parent({})
