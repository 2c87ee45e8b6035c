"""The warm Python is like `python`: arguments, folder, environment, files, status and signals."""

import os
import signal
import subprocess
import sys

import pytest
import warm_python

pytestmark = pytest.mark.slow
SAYS = """
import json, os, sys
print(json.dumps([sys.argv[1:], os.getcwd(), os.environ.get("GIVEN"), sys.stdin.read()]))
sys.stderr.write("told")
sys.exit(7)
"""
WAITS = "import time\nprint('begun', flush=True)\ntime.sleep(600)\n"


def start(program, *arguments, **options):
    return subprocess.Popen([warm_python.executable(), program, *arguments], text=True, **options)


@pytest.fixture
def waiting(tmp_path):
    """A program that waits."""
    (tmp_path / "waits.py").write_text(WAITS)
    process = start(tmp_path / "waits.py", stdout=subprocess.PIPE)
    assert process.stdout.readline() == "begun\n"
    return process


def test_the_same_as_python(tmp_path):
    (tmp_path / "says.py").write_text(SAYS)
    said = []
    for python in (warm_python.executable(), sys.executable):
        ended = subprocess.run(
            [python, "says.py", "two words", "é"],
            cwd=tmp_path,
            env={**os.environ, "GIVEN": "value"},
            input="read",
            capture_output=True,
            text=True,
        )
        said.append((ended.returncode, ended.stdout, ended.stderr))
    assert said[0] == said[1] and said[0][0] == 7


def test_a_signal_reaches_the_program(waiting):
    waiting.terminate()
    assert waiting.wait() == -signal.SIGTERM


def test_the_program_is_killed_with_it(waiting):
    waiting.kill()
    assert waiting.wait() == -signal.SIGKILL
    assert waiting.stdout.read() == ""  # ends once nobody holds the pipe
