"""glibc keeps freed memory where XLA computes on CPUs, and nowhere else."""

import json
import sys

import pytest
from helpers import run_to_end

from t5x_diffeq.system import allocator

FAULTS = """
import os, resource, sys
from t5x_diffeq.system import allocator
kept = allocator.keep_freed_memory(os.environ)

def touch():
    bytearray(b"x") * (64 * 2**20)

touch()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(10):
    touch()
print([kept, resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before])
"""


@pytest.mark.skipif(not allocator.has_glibc(), reason="needs Linux with glibc")
def test_what_is_freed_is_not_faulted_in_again():
    def faults(**environment):
        ended = run_to_end([sys.executable, "-c", FAULTS], env=environment)
        return json.loads(ended.stdout.lower())

    kept, few = faults(JAX_PLATFORMS="cpu")
    left, many = faults(JAX_PLATFORMS="cpu", T5X_DIFFEQ_KEEP_MEMORY="0")
    assert (kept, left) == (True, False)
    assert few < 1000 < many  # of 64 MiB, 16,384 pages of 4 KiB, ten times; fewer if huge


@pytest.mark.parametrize(
    ("environment", "wanted"),
    [
        ({"JAX_PLATFORMS": "cpu"}, True),
        ({"JAX_PLATFORMS": "cpu,cuda"}, True),
        ({"JAX_PLATFORMS": "cuda,cpu"}, False),
        ({"JAX_PLATFORMS": "cpu", "T5X_DIFFEQ_KEEP_MEMORY": "0"}, False),
    ],
)
def test_where_it_is_wanted(environment, wanted, monkeypatch):
    monkeypatch.setattr(allocator, "has_glibc", lambda: True)
    assert allocator.is_wanted(environment) == wanted
    monkeypatch.setattr(allocator, "has_glibc", lambda: False)
    assert not allocator.is_wanted(environment)


def test_an_accelerator_is_found_without_jax(monkeypatch, tmp_path):
    monkeypatch.setattr(allocator, "ACCELERATORS", (str(tmp_path / "nvidia[0-9]*"),))
    assert allocator.computes_on_cpus("")
    (tmp_path / "nvidia0").touch()
    assert not allocator.computes_on_cpus("")
