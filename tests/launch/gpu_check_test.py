"""The first check on a new GPU runs here too, with sizes for a CPU; what is wrong ends with 1."""

import importlib.util
import os
import sys

import pytest
from compilation import flags_of_processes
from helpers import ROOT, run_to_end
from patience import patience

SCRIPT = ROOT / "launch" / "gpu_check.py"


@pytest.mark.slow
@pytest.mark.in_turns("images and compilers")
def test_the_table(tmp_path):
    """Every part says what it found, and nothing is wrong."""
    given = {**os.environ, "VENV": sys.prefix, "XLA_FLAGS": flags_of_processes()}
    ended = run_to_end(
        [ROOT / "launch" / "gpu_check.sh", "--small", f"--minutes={patience(10)}"],
        cwd=tmp_path,
        env=given,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr[-2000:]
    assert (tmp_path / "gpu_check.md").read_text() == ended.stdout
    assert "wrong" not in ended.stdout
    rows = [line.split(" | ") for line in ended.stdout.splitlines()[2:]]
    marks = [row[2].strip(" |") for row in rows]
    assert marks == ["", *["right"] * 7, *[""] * 6]
    assert [row[0] for row in rows if "GPT-small" in row[0]] == [
        "| GPT-small, baseline, 512 tokens",
        "| GPT-small, ode, 512 tokens",
    ]
    assert [row[1].split()[1] for row in rows if "steps, width" in row[0]] == ["ms,"] * 2


def test_a_part_that_fails():
    """It is a line of the table, and the other parts go on."""
    specification = importlib.util.spec_from_file_location("gpu_check", SCRIPT)
    gpu_check = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(gpu_check)
    (row,) = gpu_check.run_part("kernels", True, 0.1)
    assert (row.what, row.fine) == ("kernels", False)
    assert "not done in" in row.value
    (row,) = gpu_check.run_part("no part of it", True, 60)
    assert not row.fine and "invalid choice" in row.value


@pytest.mark.parametrize(
    ("argument", "said"),
    [
        ("--minutes=0", "--minutes=0 must be more than 0"),
        ("--output=/none/a.md", "--output=/none/a.md must be a file in a folder that is there"),
    ],
)
def test_what_is_refused_before_anything_is_checked(argument, said):
    ended = run_to_end([sys.executable, SCRIPT, argument])
    assert ended.returncode == 2 and said in ended.stderr
