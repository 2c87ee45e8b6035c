import subprocess
import sys

import pytest
from helpers import ROOT


@pytest.mark.parametrize(
    ("limit", "message"),
    [("-n 20", "ulimit -Hn is 20, and"), ("-d 700000", "ulimit -d is 700000 KiB, and JAX")],
)
def test_a_limit_of_the_shell_that_is_too_low(limit, message, tmp_path):
    command = f"ulimit {limit}; {sys.executable} -m t5x_diffeq.train --workdir={tmp_path / 'run'}"
    command += " --config=configs/tiny.py"
    ended = subprocess.run(["bash", "-c", command], cwd=ROOT, capture_output=True, text=True)
    assert ended.returncode == 2, ended.stderr
    assert ended.stderr.startswith(f"error: {message}") and ended.stderr.count("\n") == 1
