"""launch/gpu_slurm.sh, its batch job, launch/gpu_nodes.sh: with stand-ins for what they call."""

import os
import signal
import subprocess
import sys
import time

import pytest
from conftest import ROOT
from stand_ins import ODD, assert_one_error, stand_ins_fixture  # noqa: F401

SLURM = ("configs/llama1b.py", "--workdir=/shared/run")
NODES = ("configs/llama1b.py", "--workdir=/shared/run", "--hosts=a,b")


# ---------------------------------------------------------------- SLURM


def test_submits(stand_ins):
    stand_ins.rules({"call": "^sbatch", "out": "77;cluster\n"})
    ended = stand_ins.run("gpu_slurm.sh", *SLURM, "--nodes=4", "--account=me", ODD)
    assert ended.returncode == 0, ended.stderr
    assert "job 77 is in the queue" in ended.stderr
    (call,) = stand_ins.calls()
    assert call == [
        *("sbatch", "--parsable", "--job-name=llama1b", "--nodes=4", "--ntasks-per-node=8"),
        *("--gpus-per-node=8", "--time=24:00:00", "--requeue", "--open-mode=append"),
        *("--signal=B:USR1@300", "--output=llama1b-%j.log", "--account=me"),
        *(str(ROOT / "launch" / "slurm_job.sh"), str(ROOT), "100", "train"),
        *("--config=configs/llama1b.py", "--workdir=/shared/run", ODD),
    ]


def test_sbatch_refuses(stand_ins):
    stand_ins.rules({"call": "^sbatch", "status": 1, "error": "Invalid account\n"})
    assert_one_error(stand_ins.run("gpu_slurm.sh", *SLURM), 1, "sbatch did not take the job")


@pytest.mark.parametrize("script", ["gpu_slurm.sh", "gpu_nodes.sh", "gke.sh"])
def test_bad_arguments(stand_ins, script):
    for arguments, message in (
        ([], "give a config"),
        (["configs/tiny.py"], "give --workdir=DIR"),
        (["configs/tiny.py", "--what=1"], "--what is no option of this script"),
        (["configs/tiny.py", "--restarts=0"], "--restarts=0 must be a number, at least 1"),
    ):
        ended = stand_ins.run(script, *arguments)
        assert_one_error(ended, 2, message.replace("DIR", "") if script == "gke.sh" else message)
    assert stand_ins.calls() == []


def job(stand_ins, *arguments, **more):
    """The batch job, as SLURM runs it: a copy of the script, elsewhere."""
    spooled = stand_ins.folder / "slurm_script"
    spooled.write_text((ROOT / "launch" / "slurm_job.sh").read_text())
    return subprocess.Popen(
        ["bash", spooled, ROOT, "3", *arguments],
        env=stand_ins.environment(SLURM_JOB_ID="77", **more),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.parametrize(
    ("status", "restarts", "requeued", "exit_status"),
    [(0, 0, False, 0), (42, 0, True, 0), (42, 2, True, 0), (42, 3, False, 1), (1, 0, False, 1)],
)
def test_job_requeues_what_saved(stand_ins, status, restarts, requeued, exit_status):
    stand_ins.rules({"call": "^srun", "status": status})
    process = job(stand_ins, "train", ODD, SLURM_RESTART_COUNT=str(restarts))
    _, log = process.communicate()
    assert process.returncode == exit_status, log
    assert ("error:" in log) == (exit_status != 0)
    python = str(stand_ins.installed() / "bin" / "python")
    srun = ["srun", "--kill-on-bad-exit=1", python, "-m", "t5x_diffeq.train", ODD]
    requeue = [["scontrol", "requeue", "77"]] if requeued else []
    assert stand_ins.calls("s") == [srun, *requeue]


def test_job_hands_the_signal_on_and_requeues(stand_ins):
    """USR1 ahead of the limit: SIGTERM for srun, which ends with 42 a little later."""
    (stand_ins.folder / "bin" / "srun").write_text(
        "#!/usr/bin/env bash\ntrap 'sleep 0.5; exit 42' TERM\ntouch $STAND_INS/runs\n"
        "while :; do sleep 0.1; done\n"
    )
    process = job(stand_ins, "train")
    while not (stand_ins.folder / "runs").exists():
        time.sleep(0.05)
    process.send_signal(signal.SIGUSR1)
    _, log = process.communicate(timeout=30)
    assert process.returncode == 0, log
    assert stand_ins.calls("s") == [["scontrol", "requeue", "77"]]


def test_data_as_an_array(stand_ins):
    stand_ins.rules({"call": "--array", "out": "5\n"}, {"call": "^sbatch", "out": "6\n"})
    arguments = ("slurm", "configs/tiny.py", "--output=/shards", "--parts=4", ODD)
    ended = stand_ins.run("prepare_data.sh", *arguments)
    assert ended.returncode == 0, ended.stderr
    first, last = stand_ins.calls("sbatch")
    assert "--array=0-3" in first
    assert "--dependency=afterok:5" in last
    told = ["--config=configs/tiny.py", "--output=/shards", "--shards=4", "--workers=8", ODD]
    assert first[-6:] == last[-6:] == ["prepare_data", *told]
    array = {"SLURM_ARRAY_TASK_ID": "3", "SLURM_ARRAY_TASK_COUNT": "4"}
    for variables, part in ((array, ["--shard=3/4"]), ({}, [])):
        assert job(stand_ins, *first[-6:], **variables).wait() == 0
        assert stand_ins.calls("python")[-1][1:] == ["-m", "t5x_diffeq.prepare_data", *told, *part]


# ---------------------------------------------------------------- ssh, or any launcher


def hosts(stand_ins, *rules):
    """ssh that runs its command; rules for ssh and for the trainings come first."""
    stand_ins.rules(*rules, {"call": "^ssh", "homes": [str(stand_ins.folder / "home")]})


def trainings(stand_ins):
    return [call for call in stand_ins.calls("python") if "t5x_diffeq.train" in call]


def test_over_ssh(stand_ins):
    hosts(stand_ins)
    ended = stand_ins.run("gpu_nodes.sh", *NODES, "--processes-per-host=2", ODD)
    assert ended.returncode == 0, ended.stderr
    assert len(stand_ins.calls("ssh")) == 4
    told = ["--config=configs/llama1b.py", "--workdir=/shared/run", ODD]
    assert [call[1:] for call in trainings(stand_ins)] == [["-m", "t5x_diffeq.train", *told]] * 4
    assert not list(stand_ins.folder.rglob("pwned"))


def test_one_host_is_not_reachable(stand_ins):
    """The others are ended; after so many tries, so is all."""
    hosts(stand_ins, {"call": r"^ssh .* b ", "status": 255})
    ended = stand_ins.run("gpu_nodes.sh", *NODES, "--restarts=2")
    assert_one_error(ended, 1, "started again 2 times (--restarts), last status 255")
    assert ended.stderr.count("process 1: ssh to b failed") == 3
    assert len(stand_ins.calls("ssh")) == 6


def test_preempted_and_connection_dropped(stand_ins):
    once = {"call": "python -m t5x_diffeq.train", "status": 42, "times": 2}
    hosts(stand_ins, once, {"call": "^ssh .* a ", "status": 255, "times": 1})
    ended = stand_ins.run("gpu_nodes.sh", *NODES)
    assert ended.returncode == 0, ended.stderr
    assert "starting again (1 of at most 100)" in ended.stderr


@pytest.mark.parametrize("status", [1, 2])
def test_a_failed_run_is_not_started_again(stand_ins, status):
    hosts(stand_ins, {"call": "python -m t5x_diffeq.train", "status": status})
    ended = stand_ins.run("gpu_nodes.sh", *NODES)
    assert ended.returncode == 1
    assert f"error: the run ended with status {status}" in ended.stderr
    assert len(stand_ins.calls("ssh")) == 2


def test_dropped_connection_ends_the_process_saved(stand_ins):
    """gpu_rank.sh hears the end of its input, and sends SIGTERM."""
    python = stand_ins.installed() / "bin" / "python"
    python.write_text(
        "#!/usr/bin/env bash\n[ \"$1\" = -m ] || exit 0\ntrap 'exit 42' TERM\n"
        "touch $STAND_INS/runs\nwhile :; do sleep 0.1; done\n"
    )
    rank = [ROOT / "launch" / "gpu_rank.sh", "0", "1", "here:1", "all", "stdin"]
    process = subprocess.Popen(rank, env=stand_ins.environment(), stdin=subprocess.PIPE)
    while not (stand_ins.folder / "runs").exists():
        time.sleep(0.05)
    process.stdin.close()
    assert process.wait(timeout=30) == 42


def test_one_process_under_a_launcher(stand_ins):
    (stand_ins.installed() / "bin" / "python").write_text(
        '#!/usr/bin/env bash\n[ "$1" = -m ] && env | grep ^JAX_ | sort || true\n'
    )
    place = ("--rank=1", "--size=2", "--coordinator=head", "--local-rank=3")
    ended = stand_ins.run("gpu_nodes.sh", *SLURM, *place)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.split() == [
        "JAX_COORDINATOR_ADDRESS=head:8476",
        "JAX_LOCAL_DEVICE_IDS=3",
        "JAX_NUM_PROCESSES=2",
        "JAX_PROCESS_ID=1",
    ]
    assert_one_error(stand_ins.run("gpu_nodes.sh", *SLURM), 2, "give --hosts=a,b, or --rank")


@pytest.mark.parametrize("arguments", [("gpu_slurm.sh", *SLURM), ("gpu_nodes.sh", *NODES)])
def test_dry_run_calls_nothing(stand_ins, arguments):
    script, *rest = arguments
    ended = stand_ins.run(script, *rest, ODD, "--dry-run")
    assert ended.returncode == 0, ended.stderr
    assert stand_ins.calls() == []
    assert all(line.startswith("+ ") for line in ended.stdout.splitlines())


# ---------------------------------------------------------------- XLA's flags


def flags(given):
    environment = {**os.environ, "XLA_FLAGS": given, "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, ROOT / "launch" / "xla_flags.py"]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=True)


def test_flags_that_jaxlib_does_not_know_are_left_out():
    ended = flags("--xla_gone=1 --xla_gpu_enable_pipelined_all_gather=false")
    assert ended.stderr == (
        "warning: --xla_gone=1 is unknown to the installed jaxlib, and left out\n"
    )
    taken = ended.stdout.split()
    assert "--xla_gpu_enable_latency_hiding_scheduler=true" in taken
    assert taken[-1] == "--xla_gpu_enable_pipelined_all_gather=false"  # the user's wins
    assert "--xla_gpu_enable_pipelined_all_gather=true" not in taken


def test_flags_that_cannot_be_read_are_not_fatal():
    ended = flags("--xla_gpu_enable_pipelined_all_gather=perhaps")
    assert ended.stdout.split() == ["--xla_gpu_enable_pipelined_all_gather=perhaps"]
    assert ended.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("given", "taken"),
    [
        ({}, "0.92"),
        ({"XLA_CLIENT_MEM_FRACTION": "0.5"}, "0.5"),
        ({"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.6"}, ""),  # jaxlib refuses both at once
    ],
)
def test_jax_takes_most_of_a_gpus_memory(given, taken):
    script = f'source {ROOT}/launch/setup.sh; gpu_memory; echo "${{XLA_CLIENT_MEM_FRACTION:-}}"'
    environment = {k: v for k, v in os.environ.items() if "MEM_FRACTION" not in k} | given
    done = subprocess.run(["bash", "-euc", script], env=environment, capture_output=True, text=True)
    assert (done.stdout.strip(), done.returncode) == (taken, 0)
