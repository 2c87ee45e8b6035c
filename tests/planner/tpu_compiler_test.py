"""The TPU's compiler, which needs no TPU, in the newest version that installs.

The tests' own Python may be older than those that the newest libtpu is for.
"""

import json
import os
import sys

import pytest
from environments import make_environment
from helpers import ROOT, run_to_end

from t5x_diffeq.system.chips import CHIPS

pytestmark = pytest.mark.slow
V5P = CHIPS["TPU v5p"]


@pytest.fixture(scope="module")
def python(tmp_path_factory):
    """A Python with the project and the TPU's compiler."""
    folder = tmp_path_factory.mktemp("tpu") / "venv"
    newer = os.environ.get("PYTHON_OF_IMAGES", sys.executable)
    return make_environment(folder, f"{ROOT}[tpu]", python=newer)


@pytest.mark.in_turns("images and compilers")
def test_an_estimate_is_what_flops_and_bytes_allow(python):
    """Of a step whose embedding is a gather, of which libtpu 0.0.50 says that it takes for ever."""
    # Of a smaller step, the estimate is mostly what each operation costs to start.
    sizes = ("--config.data.sequence_length=512", "--config.train.batch_size=64")
    keys = ("--config.model.dtype=bfloat16", *sizes)
    verb = ("-m", "t5x_diffeq.plan", "--config=configs/tiny.py:baseline", "--topology=v5p:2x2x1")
    # JAX has set TPU_LIBRARY_PATH to the library of this Python's environment.
    environment = {name: x for name, x in os.environ.items() if not name.startswith("TPU_")}
    environment |= {"XLA_FLAGS": "", "JAX_PLATFORMS": "cpu"}
    ended = run_to_end([python, *verb, *keys], env=environment)
    assert ended.returncode == 0, ended.stderr
    (plan,) = map(json.loads, ended.stdout.splitlines())
    assert plan["compiled_by"] == "tpu" and plan["fits"]
    at_peak = plan["flops"]["total"] / 4 / V5P.peak_flops
    moved = plan["memory_traffic"] / V5P.memory_bandwidth
    low, high = plan["seconds"]["low"], plan["seconds"]["high"]
    assert max(at_peak, moved / 4) < low < 10 * (at_peak + moved)
    assert low < high < 10 * low
