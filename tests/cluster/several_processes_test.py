"""Several processes are one run: same batches, same losses, stopped and continued together."""

import json
import os
import shutil
import signal

import numpy as np
import pytest
from helpers import metrics_of, run_to_end
from process_runs import command, read_reports, run, start, stop_at, write_text

from t5x_diffeq.cluster import processes
from t5x_diffeq.cluster.processes import Rank, cluster_in, rank_in
from t5x_diffeq.system.errors import InputError


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    return write_text(tmp_path_factory.mktemp("text"))


STEPS = ("--config.train.total_steps=30", "--config.train.eval_every=30")
LOOKS = (  # inside the model, and at the time that steps take
    "--config.train.watch_every=15",
    "--config.train.profile=6:7",
    "--config.train.profile_processes=(0, 1)",
)


@pytest.fixture(scope="module")
def undisturbed(text, tmp_path_factory):
    """The workdir of two processes of a device each that nothing happened to."""
    workdir = tmp_path_factory.mktemp("undisturbed")
    log = run(text, workdir, 2, 1, *STEPS, *LOOKS)
    assert "2 x cpu, 2 process(es)" in log
    assert log.count("training in") == 1  # only process 0 talks
    return workdir


@pytest.mark.slow
@pytest.mark.in_turns("whole programs")
def test_looks_of_two_processes(undisturbed):
    curves = [json.loads(line) for line in (undisturbed / "curves.jsonl").read_text().splitlines()]
    assert [line["step"] for line in curves] == [15, 30]
    traces = undisturbed.glob("profiles/plugins/profile/steps_6-7/*.xplane.pb")
    assert sorted(path.name.split("_process_")[1] for path in traces) == [
        "0.xplane.pb",
        "1.xplane.pb",
    ]


def assert_close_to(undisturbed, workdir):
    found, expected = read_reports(workdir), read_reports(undisturbed)
    assert len(found) == len(expected) == 30
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    np.testing.assert_allclose(found[0], expected[0], rtol=1e-6)  # the same batch


@pytest.mark.slow
@pytest.mark.in_turns("whole programs")
def test_begun_by_one_process_and_continued_by_several(undisturbed, text, tmp_path, whole):
    stop_at(10, text, tmp_path, 1, 2, *STEPS)
    run(text, tmp_path, 4 if whole else 2, 1, *STEPS)
    assert_close_to(undisturbed, tmp_path)


def children_of(process):
    """The process numbers of the processes that the launcher started, in order."""
    listed = run_to_end(["ps", "-o", "pid=", "--ppid", str(process.pid)], check=True)
    return sorted(map(int, listed.stdout.split()))


@pytest.fixture(scope="module")
def interrupted(text, tmp_path_factory):
    """The log and workdir of two processes: one was killed, and after a restart one was stopped."""
    workdir, log = tmp_path_factory.mktemp("interrupted"), ""
    launch, *train = command(text, workdir, 2, 1, *STEPS)
    process = start([launch, train[0], "--restarts=1", *train[1:]])
    for sign, number in (("training in", signal.SIGKILL), ("starting again", signal.SIGTERM)):
        is_there = False
        for line in process.stderr:
            log += line
            is_there = is_there or sign in line
            if is_there and line.startswith("step "):
                break
        os.kill(children_of(process)[1], number)
    log += process.stderr.read()
    assert process.wait() == 42, log
    return log, workdir


@pytest.mark.slow
def test_a_killed_process_is_named_and_the_run_started_again(interrupted):
    log, _ = interrupted
    assert [line for line in log.splitlines() if line.startswith("error: ")] == [
        "error: process 1 of 2 was lost: it was killed, or its machine or the link to it failed; "
        "the same command continues the run",
        "error: process 1 of 2 was killed by SIGKILL; the others were ended",
    ]
    assert "starting again (at most 1 times)" in log


@pytest.mark.slow
def test_sigterm_to_one_stops_both_after_the_same_step(interrupted):
    log, workdir = interrupted
    (saved,) = (line for line in log.splitlines() if "saved; the same command" in line)
    step = int(saved.split("after step ")[1].split(",")[0])
    assert (workdir / "checkpoints" / str(step)).is_dir()
    assert len(read_reports(workdir)) == step < 30


@pytest.mark.slow
def test_continued_equals_undisturbed(interrupted, undisturbed, text, tmp_path):
    workdir = shutil.copytree(interrupted[1], tmp_path / "run")
    run(text, workdir, 2, 1, *STEPS)
    assert metrics_of(workdir) == metrics_of(undisturbed)


@pytest.mark.slow
def test_continued_by_one_device(interrupted, undisturbed, text, tmp_path):
    workdir = shutil.copytree(interrupted[1], tmp_path / "run")
    run(text, workdir, 1, 1, *STEPS)
    assert_close_to(undisturbed, workdir)


@pytest.mark.slow
def test_a_process_that_does_not_arrive_is_named(text, tmp_path):
    _, *train = command(text, tmp_path, 1, 1)[4:]
    environment = {
        **os.environ,
        "JAX_COORDINATOR_ADDRESS": "localhost",
        "JAX_COORDINATOR_PORT": "18476",
        "JAX_NUM_PROCESSES": "3",
        "JAX_PROCESS_ID": "0",
        "T5X_DIFFEQ_ARRIVAL_SECONDS": "4",
    }
    ended = run_to_end(train, env=environment)
    assert ended.returncode == 175
    assert "of 3 processes, 1, 2 did not arrive within 4 s" in ended.stderr.splitlines()[-1]


def test_places():
    """From the JAX_ variables, with or without a port, or from an indexed job."""
    given = {"JAX_COORDINATOR_ADDRESS": "host", "JAX_NUM_PROCESSES": "4", "JAX_PROCESS_ID": "3"}
    assert rank_in(given) == Rank("host:8476", 4, 3)
    assert rank_in({**given, "JAX_COORDINATOR_PORT": "99"}) == Rank("host:99", 4, 3)
    assert rank_in({**given, "JAX_COORDINATOR_ADDRESS": "host:77"}) == Rank("host:77", 4, 3)
    indexed = {**given, "JOB_COMPLETION_INDEX": "2"}
    del indexed["JAX_PROCESS_ID"]
    assert rank_in(indexed) == Rank("host:8476", 4, 2)
    assert rank_in({}) is None
    assert rank_in({**given, "JAX_COORDINATOR_ADDRESS": "[::1]"}) == Rank("[::1]:8476", 4, 3)
    for name, wrong in (("NUM_PROCESSES", ""), ("PROCESS_ID", "x"), ("PROCESS_ID", "4")):
        with pytest.raises(InputError, match=f"JAX_{name}={wrong or None}[ :]"):
            rank_in({**given, f"JAX_{name}": wrong})
    for wrong in ("host:99999", "host:0", "::1", ":80", "localhost:abc", "http://host:80", "a,b"):
        with pytest.raises(InputError, match=f"^JAX_COORDINATOR_ADDRESS={wrong}: give HOST, HOST:"):
            rank_in({**given, "JAX_COORDINATOR_ADDRESS": wrong})


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ("OMPI_COMM_WORLD_SIZE=2", "OMPI_COMM_WORLD_SIZE=2, but .* missing; .* mpirun, or unset"),
        ("SLURM_STEP_NUM_TASKS=4", "SLURM_STEP_NUM_TASKS=4, but .* with srun, or unset it"),
        ("SLURM_STEP_NUM_TASKS=4(x2)", r"SLURM_STEP_NUM_TASKS=4\(x2\): .* with srun, or unset it"),
        ("JAX_NUM_PROCESSES=2", "JAX_NUM_PROCESSES=2: this .* no JAX_COORDINATOR_ADDRESS; set it"),
        ("JAX_PROCESS_ID=1", "JAX_PROCESS_ID=1: this is one"),
        (
            "WORLD_SIZE=2 RANK=1 MASTER_ADDR=h",
            r"WORLD_SIZE=2 and RANK=1 \(of torchrun\): .*\$MASTER_ADDR",
        ),
        ("RANK=x", "RANK=x: torchrun sets it"),
        (
            "TPU_WORKER_HOSTNAMES=a,b,c TPU_WORKER_ID=1 JAX_NUM_PROCESSES=2",
            "JAX_NUM_PROCESSES=2 contradicts the cluster, which says 3",
        ),
        (
            "OMPI_COMM_WORLD_SIZE=2 JAX_COORDINATOR_PORT=abc",
            "JAX_COORDINATOR_PORT=abc: give a port",
        ),
    ],
)
def test_variables_that_tell_half_of_it(monkeypatch, variables, message):
    given = dict(each.split("=", 1) for each in variables.split())
    for name in given:
        monkeypatch.setenv(name, given[name])
    with pytest.raises(InputError, match=f"^{message}"):
        processes.find_rank(given)


def test_variables_of_a_process_alone():
    for alone in (
        "JAX_NUM_PROCESSES=1 JAX_PROCESS_ID=0",
        "WORLD_SIZE=1 RANK=0",
        "JOB_COMPLETION_INDEX=3",
    ):
        assert processes.find_rank(dict(each.split("=") for each in alone.split())) is None


def test_clusters():
    assert cluster_in({}) is None
    assert cluster_in({"SLURM_NTASKS": "8", "SLURM_PROCID": "0"}) is None  # not under srun
    assert cluster_in({"SLURM_STEP_NUM_TASKS": "8"}).name == "SLURM_STEP_NUM_TASKS"
    assert cluster_in({"OMPI_COMM_WORLD_SIZE": "2"}).name == "OMPI_COMM_WORLD_SIZE"
    assert cluster_in({"TPU_WORKER_HOSTNAMES": "a,b", "JAX_PLATFORMS": "cpu"}) is None


def test_the_devices_that_a_user_names_come_before_a_clusters(monkeypatch):
    slurm = {"STEP_NUM_TASKS": "4", "PROCID": "3", "LOCALID": "1", "JOB_ID": "1"}
    given = {f"SLURM_{name}": value for name, value in slurm.items()}
    given |= {"SLURM_NTASKS": "4", "SLURM_STEP_NODELIST": "a"}
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    assert list(processes.find_rank(given).devices) == [1]
    monkeypatch.setenv("JAX_LOCAL_DEVICE_IDS", "2,3")
    assert list(processes.find_rank(given).devices) == [2, 3]


def test_a_machine_whose_name_is_a_loopback_address():
    """As Debian's /etc/hosts has it; alone on its machine a run doesn't mind."""
    near, far = ["node1", "127.0.1.1"], ["node2", "10.0.0.2"]
    processes.check_machine_names([near, near])
    processes.check_machine_names([["node1", "10.0.0.1"], far])
    for names in ([near, far], [far, ["node1", "::1"]]):
        with pytest.raises(InputError, match=r"machine node1 has the address .* for its own name"):
            processes.check_machine_names(names)
