"""The scripts of t5x_diffeq/examples run as they stand."""

import os
import re
import subprocess

import pytest
import warm_python
from compilation import flags_of_processes
from helpers import ROOT

FOLDER = ROOT / "t5x_diffeq" / "examples"
SCRIPTS = sorted(path.stem for path in FOLDER.glob("*.py") if path.stem != "__init__")
PRINTED = {  # what the last lines of each say
    "analysis_of_a_run": r"':': largest exponent -?\d",
    "ode_from_pretrained": r"8 steps: \d",
    "own_block": r"ode .*loss(.|\n)*baseline .*loss",
    "own_hook": r"'step': 10, 'parameter_norm/all': \d",
    "own_scheme": r"own_scheme:ralston: errors .* order (1\.[89]|2\.[01])(.|\n)*'loss'",
    "train_and_look_inside": r"Heun: .*perplexity(.|\n)*'def main\(\):",
}


def test_each_script_is_known():
    assert list(PRINTED) == SCRIPTS
    for name in SCRIPTS:
        assert f"python -m t5x_diffeq.examples.{name}\n" in (FOLDER / f"{name}.py").read_text()


@pytest.mark.slow
@pytest.mark.every_case
@pytest.mark.parametrize("script", SCRIPTS)
def test_script(script, tmp_path):
    found = {**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    found["XLA_FLAGS"] = flags_of_processes()  # one device, as on a laptop
    command = [warm_python.executable(), "-m", f"t5x_diffeq.examples.{script}"]
    ended = subprocess.run(command, cwd=tmp_path, env=found, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr[-2000:]
    assert re.search(PRINTED[script], ended.stdout), ended.stdout
