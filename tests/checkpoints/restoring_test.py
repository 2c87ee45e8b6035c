"""Several processes restore together, and all have the same outcome."""

import json
import os

import pytest
import warm_python
from compilation import flags_of_processes
from helpers import SUPPORT, run_to_end
from process_runs import as_processes

SCRIPT = SUPPORT / "restore_processes.py"
KERNEL = 512 * 128 * 4  # bytes


def run_both(folder, *arguments, devices=2, flags=""):
    """What two processes found, and what they said."""
    command = as_processes(2, devices, [warm_python.executable(), SCRIPT, folder, *arguments])
    environment = {
        **os.environ,
        "XLA_FLAGS": f"{flags_of_processes()} {flags}",
        "JAX_PLATFORMS": "cpu",
    }
    ended = run_to_end(command, env=environment)
    assert ended.returncode == 0, ended.stderr
    return [json.loads((folder / f"{n}.json").read_text()) for n in (0, 1)], ended.stderr


@pytest.fixture(scope="module")
def both(tmp_path_factory):
    return run_both(tmp_path_factory.mktemp("restoring"))


@pytest.mark.slow
def test_each_process_reads_its_part(both):
    first, second = (found["unverified"] for found in both[0])
    assert first["right"] and second["right"]
    assert 0.4 * KERNEL < first["read"] < 0.6 * KERNEL
    assert 0.4 * KERNEL < second["read"] < 0.6 * KERNEL


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "process", "reason"),
    [
        ("0 lacks a file", 0, "is missing"),
        ("1 lacks a file", 1, "is missing"),
        ("0 lacks a file, unverified", 0, "Error reading"),
        ("1 sees nothing", 1, "is missing"),
        ("1 lacks a permission", 1, "Permission denied"),
    ],
)
def test_all_end_with_the_error_of_one(both, fault, process, reason):
    for found in both[0]:
        error = found[fault]["error"]
        assert error.startswith(f"process {process} of 2 can't read checkpoint ")
        assert reason in error
        assert error.endswith("once every process can read it, the same command continues")


@pytest.mark.slow
def test_all_go_on_from_an_older_one(both):
    for found in both[0]:
        assert found["damaged"]["step"] == 2 and found["damaged"]["right"] is True
    assert "has changed since it was written); moved to " in both[1]


@pytest.mark.slow
def test_data_may_take_longer_to_prepare_than_a_collective_may(tmp_path):
    """Each process takes seven seconds, and a collective of the devices fails after four."""
    limit = "--xla_cpu_collective_timeout_seconds=4"
    found, _ = run_both(tmp_path, "7", devices=1, flags=limit)
    assert found == [{"before": 2, "after": 2}] * 2
