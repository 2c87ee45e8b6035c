"""launch/gpu_slurm.sh and launch/gpu_nodes.sh: what they refuse, and what --dry-run shows where
`slurm_test.py` and `ssh_test.py`, on a real SLURM and a real sshd, can't; and gpu_quarter.sh."""

import os
import re
import signal
import subprocess
from pathlib import Path

import pytest
from helpers import ROOT, run_to_end
from patience import patience, wait_for
from process_runs import HEAR_CTRL_C
from stand_ins import ODD, assert_one_error

# `check_run_test.py` checks configs; here Python is a stand-in.
RUN = ("configs/llama1b.py", "--workdir=/shared/run", "--unchecked")
NODES = (*RUN, "--hosts=a,b")
DATA = ("configs/llama1b.py", "--output=/out")
SWEEP = ("configs/llama1b.py", "--output=/out", "--grid=model.num_steps=6,12", "--unchecked")


def dry_run_commands(stand_ins, script, *arguments, **more):
    """The commands that --dry-run prints, as words; nothing is called but Python's checks."""
    ended = stand_ins.run(script, *arguments, "--dry-run", **more)
    assert ended.returncode == 0, ended.stderr
    assert {call[0] for call in stand_ins.calls()} <= {"python"}
    # A word with a line's end in it is quoted over lines.
    commands = re.split(r"^\+ ", ended.stdout, flags=re.MULTILINE)[1:]
    return [words_in(command) for command in commands]


def words_in(command):
    """The words that a bash reads: `printf %q` writes $'...' too."""
    script = f"printf '%s\\0' {command.rstrip()}"
    words = run_to_end(["bash", "-c", script], check=True)
    return words.stdout.split("\0")[:-1]


def test_jobs_that_make_token_shards_have_the_users_variables(stand_ins):
    words = ("slurm", *DATA, "--env=A=1", "--env=HERE")
    _, *calls = dry_run_commands(stand_ins, "prepare_data.sh", *words, HERE="hidden")
    assert [call.count("--export=ALL,A,HERE") for call in calls] == [1, 1]


def test_container(stand_ins):
    words = (*RUN, "--container=IMAGE", "--container_mounts=/data:/data", "--env=A=1")
    _, folder, call = dry_run_commands(stand_ins, "gpu_slurm.sh", *words)
    assert folder == ["mkdir", "-p", "/shared/run"]
    configs = ROOT / "configs"
    assert call[call.index("train") + 1 : call.index("--")] == [
        "--container-image=IMAGE",
        f"--container-mounts={configs}:{configs},/data:/data,/shared/run:/shared/run",
        "--container-env=A",
    ]


def test_a_config_may_be_a_flag_and_a_workdir_begin_with_a_tilde(stand_ins):
    """As for a verb: no shell fills in the ~ of --workdir=~/run."""
    words = (f"--config={RUN[0]}", "--workdir=~/run", "--unchecked")
    *_, call = dry_run_commands(stand_ins, "gpu_slurm.sh", *words, HOME="/home/me")
    assert call[-2:] == [f"--config={ROOT / RUN[0]}", "--workdir=/home/me/run"]


def slurm_step(stand_ins, *options, **more):
    """The call of `srun` by the job script, for a training in a node with four GPUs."""
    job = {"SLURM_JOB_ID": "1", "SLURM_CPUS_ON_NODE": "8", "SLURM_GPUS_ON_NODE": "4"}
    words = (ROOT, "3", "train", *options, "--", f"--workdir={stand_ins.folder}/run")
    ended = stand_ins.run("slurm_job.sh", *words, **job, **more)
    assert ended.returncode == 0, ended.stderr
    (call,) = stand_ins.calls("srun")
    return call


@pytest.mark.parametrize("chosen", ["", "/own"])
def test_a_container_has_the_cache_beside_the_workdir(stand_ins, chosen):
    """Not one that the user has chosen, who mounts it, too."""
    options = ("--container-image=IMAGE", "--container-mounts=/a:/a")
    call = slurm_step(stand_ins, *options, JAX_COMPILATION_CACHE_DIR=chosen)
    cache = stand_ins.folder / "compilation_cache"
    assert f"--container-mounts=/a:/a{'' if chosen else f',{cache}:{cache}'}" in call
    assert cache.exists() != bool(chosen)


@pytest.mark.parametrize(("tasks", "told"), [(4, [""] * 4), (2, ["0,1", "2,3"]), (1, ["0,1,2,3"])])
def test_tasks_share_the_gpus_of_a_node(stand_ins, tasks, told):
    """JAX gives a task the one GPU of its local number, unless it is told."""
    call = slurm_step(stand_ins, SLURM_NTASKS_PER_NODE=str(tasks))
    program = 'echo "${JAX_LOCAL_DEVICE_IDS:-}"'
    step = [*call[call.index("bash") : call.index("task") + 2], "bash", "-c", program]
    given = [{**os.environ, "SLURM_LOCALID": str(number)} for number in range(tasks)]
    assert [run_to_end(step, env=each, check=True).stdout.strip() for each in given] == told


THREE = [(name, rank, 3, "a:8476", "all") for rank, name in enumerate("abc")]


@pytest.mark.parametrize(
    ("place", "told"),
    [
        (  # an ssh for each process
            ["--hosts=me@a,b", "--processes-per-host=2"],
            [(("me@a", "b")[rank // 2], rank, 4, "a:8476", rank % 2) for rank in range(4)],
        ),
        *((["--hosts=" + pasted], THREE) for pasted in ("a b c", "a\nb\nc\n", "a, b,\n c")),
        (["--hosts=fe80::1"], [("fe80::1", 0, 1, "[fe80::1]:8476", "all")]),
        (["--hosts=a", "--coordinator=[::1]", "--port=80"], [("a", 0, 1, "[::1]:80", "all")]),
        (["--hosts=a", "--coordinator=c:77"], [("a", 0, 1, "c:77", "all")]),
    ],
)
def test_what_each_host_is_told(stand_ins, place, told):
    """Hosts may be pasted from `scontrol show hostnames`. No secret is on the command line."""
    words = (*RUN, *place, "--env=KEY=secret", ODD)
    _, *calls = dry_run_commands(stand_ins, "gpu_nodes.sh", *words)
    for call, (host, *facts) in zip(calls, told, strict=True):
        assert call[-2] == host and "secret" not in call[-1]
        rest = ["stdin", "--workdir=/shared/run", ODD]
        assert words_in(call[-1])[2:] == [*map(str, facts), *rest]


def test_one_process_under_a_launcher(stand_ins):
    (stand_ins.install() / "bin" / "python").write_text(
        '#!/usr/bin/env bash\n[ "$1" = -m ] && env | grep ^JAX_ | sort || true\n'
    )
    place = ("--rank=1", "--size=2", "--coordinator=head", "--local-rank=3")
    run = (RUN[0], f"--workdir={stand_ins.folder}/runs/a", RUN[2])
    ended = stand_ins.run("gpu_nodes.sh", *run, *place)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.split() == [
        f"JAX_COMPILATION_CACHE_DIR={stand_ins.folder}/runs/compilation_cache",
        "JAX_COORDINATOR_ADDRESS=head:8476",
        "JAX_LOCAL_DEVICE_IDS=3",
        "JAX_NUM_PROCESSES=2",
        "JAX_PROCESS_ID=1",
    ]


SSH = """#!/usr/bin/env bash
cd /
[ -z "${GONE:-}" ] || rmdir "$GONE"
exec bash -c "${@: -1}"
"""


@pytest.mark.parametrize("there", [True, False], ids=["there", "not there"])
def test_a_host_trains_where_the_user_stands(stand_ins, there):
    """For relative paths among the arguments; in the project, if the host has no such folder."""
    (stand_ins.folder / "bin" / "ssh").write_text(SSH)
    python = stand_ins.install() / "bin" / "python"
    python.write_text('#!/usr/bin/env bash\n[ "$1" != -m ] || pwd\n')
    here = stand_ins.folder / "my folder"
    here.mkdir()
    command = [ROOT / "launch" / "gpu_nodes.sh", *RUN, f"--workdir={stand_ins.folder}/run"]
    given = stand_ins.environment(GONE="" if there else str(here))
    ended = run_to_end([*command, "--hosts=a"], cwd=here, env=given)
    assert ended.stdout == f"{here if there else ROOT}\n", ended.stderr


@pytest.mark.parametrize(
    ("script", "arguments", "message"),
    [
        ("gpu_slurm.sh", [*RUN, "--what=1"], "--what is not an option of this script; see --help"),
        ("gpu_slurm.sh", [*RUN, "--gpus=8"], "of this script; did you mean --gpus_per_node?"),
        ("gpu_slurm.sh", ["configs/no.py", *RUN[1:]], "configs/no.py: there is no such"),
        ("gpu_slurm.sh", [*RUN, "--time=5"], "--time=5 leaves nothing to train in"),
        ("gpu_slurm.sh", [*RUN, "--tasks_per_node=3"], "can't share --gpus_per_node=8 evenly"),
        ("gpu_slurm.sh", [*RUN, "--env=NOT_SET"], "there is no variable NOT_SET here"),
        ("gpu_slurm.sh", [*SWEEP, "--nodes=2"], "--nodes=2: each run of a sweep has one node"),
        ("gpu_slurm.sh", [*SWEEP, "--output=gs://b/o"], "--output=gs://b/o is in a bucket"),
        ("gpu_nodes.sh", [*RUN, "--hosts=a,-oProxyCommand=x"], "'-oProxyCommand=x' is not the"),
        ("gpu_nodes.sh", [*RUN, "--hosts=a,,b"], "'' is not the name of a host"),
        ("gpu_nodes.sh", [*RUN, "--hosts=a slots=8"], "'slots=8' is not the name"),
        ("gpu_nodes.sh", [*RUN, "--hosts=n[1-3]"], "'n[1-3]' is not the name"),
        ("gpu_nodes.sh", [*RUN, "--hosts=a:8"], "'a:8' is not the name"),
        ("gpu_nodes.sh", [*RUN, "--hosts=a,b,a"], "--hosts: a is named twice"),
        ("gpu_nodes.sh", [*RUN, "--hosts= "], "--hosts names no host"),
        ("gpu_nodes.sh", [*NODES, "--ssh_config=/none"], "--ssh_config=/none: there is no such"),
        ("gpu_nodes.sh", RUN, "give --hosts=a,b, or --rank"),
        ("gpu_nodes.sh", [*NODES, "--port=99999"], "--port=99999 must be at most 65535"),
        (
            "gpu_nodes.sh",
            [*RUN, "--rank=2", "--size=2", "--coordinator=a"],
            "--rank=2 must be less than --size=2",
        ),
        ("prepare_data.sh", ["slurm", *DATA, "--image=i"], "--image is not an option of"),
        ("prepare_data.sh", ["gke", *DATA, "--partition=p"], "--partition is not an option of"),
        ("prepare_data.sh", ["slurm", *DATA, "--workdir=w"], "--workdir=w is for a training"),
        ("prepare_data.sh", ["slurm", *DATA, "--parts=9", "--shards=4"], "more than --shards=4"),
        ("gpu_nodes.sh", [*RUN, "--hosts=/etc/hosts"], "is a file; its content is --hosts="),
        ("local.sh", [RUN[0], "--processes", "2"], "--processes has no value; write --processes=N"),
        ("local.sh", [RUN[0], "total_steps=3"], "keys are --config.SECTION.NAME=VALUE"),
        ("tpu_pod.sh", ["restart"], "restart is not understood; there are start, status, logs"),
        ("tpu_pod.sh", [RUN[0], "stop"], "stop comes first: launch/tpu_pod.sh stop ..."),
        ("local.sh", [RUN[0], "--workdir="], "--workdir= is empty; give a folder"),
        ("local.sh", [RUN[0], "--processes=two"], "--processes=two must be a number"),
        ("local.sh", [RUN[0], "--processes=0"], "--processes=0 must be a number, at least 1"),
        ("local.sh", [RUN[0], "config.seed=3"], "did you mean --config.seed=3?"),
        ("local.sh", [RUN[0], "--config.seed", "3"], "a value follows its flag after ="),
        ("local.sh", [RUN[0], "--restarts=3"], "--restarts=3 needs --processes=N"),
        ("local.sh", [RUN[0], "--dry-run=true"], "--dry-run takes no value; give it alone"),
        ("local.sh", [RUN[0], "--help=lr"], "verb: python -m t5x_diffeq.train --help=lr"),
        ("local.sh", [RUN[0], "--workdir=a", "--workdir=b"], "--workdir is given twice"),
        ("gpu_slurm.sh", [*RUN, "--config.data.path=my", "text"], "quotes if it has spaces"),
        ("gpu_slurm.sh", [*RUN, "\u2014nodes=2"], "another kind of dash; write --nodes=2"),
        ("gpu_slurm.sh", [*RUN, "--exclusive=user"], "--exclusive takes no value"),
        ("gpu_slurm.sh", [*RUN, "--partition="], "--partition= is empty; give it a value, or"),
        ("gpu_slurm.sh", [*RUN, "--jobs=4"], "--jobs=4 is for a sweep, with --grid=KEY=V1,V2"),
        ("gpu_slurm.sh", [*RUN, "--container_mounts=/a"], "needs --container=IMAGE"),
        ("gpu_slurm.sh", [*RUN, "--", "--config.seed=3"], "--config.seed=3 comes after --"),
        ("gpu_slurm.sh", [RUN[0], "--workdir=gs:/b/w"], "names no bucket; write gs://BUCKET/PATH"),
        ("gpu_slurm.sh", [*RUN, "--ntasks=8"], "did you mean --tasks_per_node?"),
        ("gpu_slurm.sh", [*RUN, "--num_nodes=2"], "did you mean --nodes?"),
        ("gpu_slurm.sh", [*RUN, "--container=a.sif"], "of Apptainer; pyxis takes one of enroot"),
        ("gke.sh", [RUN[0], "--mount=/data"], "--mount=/data is where --pvc=CLAIM is mounted"),
        ("gke.sh", [RUN[0], "--gpus_per_node=4"], "--gpus_per_node=4 is for --gpu; leave it out"),
        ("tpu_pod.sh", [*RUN, "--topology=4x4x4"], "did you mean --type?"),
        (
            "gpu_nodes.sh",
            [*RUN, "--rank=0", "--size=2", "--coordinator=a:99999"],
            "--coordinator=a:99999: a port is a number up to 65535",
        ),
        ("gpu_nodes.sh", [*NODES, "--rank=0", "--size=2"], "leave one of these out"),
        ("gpu_nodes.sh", [*RUN, "--hosts=a,me@a"], "--hosts: a is named twice"),
        ("gpu_nodes.sh", [*RUN, "--hosts=localhost,b"], "no other host finds the first as local"),
        (
            "gpu_nodes.sh",
            [*RUN, "--rank=-1", "--size=2", "--coordinator=a"],
            "--rank=-1 must be a number, from 0",
        ),
        ("prepare_data.sh", ["gke", DATA[0], "--output=/o", "--image=i"], "a pod loses its own"),
        (
            "prepare_data.sh",
            ["gke", DATA[0], "--output=/shared/o", "--image=i"],
            "give --pvc=CLAIM, the volume that is mounted at /shared",
        ),
    ],
)
def test_what_is_refused(stand_ins, script, arguments, message):
    assert_one_error(stand_ins.run(script, *arguments, "--dry-run"), 2, message)
    assert stand_ins.calls() == []


@pytest.mark.parametrize(
    ("option", "note"),
    [
        ("--time=24", "for minutes; hours are --time=24:00:00"),
        ("--mem=400", "are --mem=400G"),
        ("--container=nowhere.sqsh", "is not on this machine; all nodes must have it"),
        ("--env=A=1,B=2", "=... is one variable, with B in its value; for two, give --env twice"),
    ],
)
def test_what_may_be_meant_otherwise_is_told(stand_ins, option, note):
    ended = stand_ins.run("gpu_slurm.sh", *RUN, option, "--unchecked", "--dry-run")
    assert ended.returncode == 0 and note in ended.stderr


# ---------------------------------------------------------------- the bash of macOS


# What bash 3.2 doesn't know: it is macOS's.
TOO_NEW = (
    r"\$\{\w+(\[[@*\w]+\])?(\^|,|@[A-Za-z]\})",  # ${name,,} ${name^} ${name@Q}
    r"\bwait -n\b",
    r"\b(declare|local|typeset) -\w*[An]",
    r"\b(mapfile|readarray|coproc)\b",
    r"\|&|&>>",
    r"\[-[0-9]+\]\}",  # ${array[-1]}
    r"\[\[ -v ",
    r"\b(BASHPID|EPOCHSECONDS|globstar)\b",
    r"printf +(-v \w+ +)?['\"]%\(",
    r"\{\w+\}[<>]",  # {fd}>file
    r"=~ [^$\s]*\(",  # parentheses after =~, but in a variable
)
# Run on hosts of clusters and clouds, which are Linux.
ON_HOSTS = ("gpu_rank.sh", "slurm_job.sh", "tpu_host.sh")


def too_new(script: Path) -> list[str]:
    lines = [re.sub(r"(^|\s)#.*", "", line) for line in script.read_text().splitlines()]
    return [line for line in lines if any(re.search(pattern, line) for pattern in TOO_NEW)]


def test_scripts_are_for_bash_3_2():
    scripts = {path for path in (ROOT / "launch").rglob("*.sh") if path.name not in ON_HOSTS}
    assert {script: found for script in scripts if (found := too_new(script))} == {}


TRAINING = """#!/usr/bin/env bash
[ "$2" = studies.gpu_quarter ] || exit 0
trap 'touch "saved-$$"; exit 42' TERM
echo "${XLA_CLIENT_MEM_FRACTION:-}:${XLA_PYTHON_CLIENT_MEM_FRACTION:-}" >"begun-$$"
while true; do sleep 0.1; done
"""


def test_ctrl_c_saves_the_trainings_of_a_quarter_of_an_hour(tmp_path):
    """They run under `timeout`, which the terminal doesn't reach; with one fraction of memory."""
    python = tmp_path / "venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(TRAINING)
    python.chmod(0o755)
    script = ROOT / "launch" / "reproduce" / "gpu_quarter.sh"
    process = subprocess.Popen(
        [*HEAR_CTRL_C, script, "--text=a b", "--at_once=2", "--rehearse"],
        env={**os.environ, "VENV": str(tmp_path / "venv"), "XLA_CLIENT_MEM_FRACTION": "0.1"},
        cwd=tmp_path,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        wait_for(lambda: len([*tmp_path.glob("begun*")]) == 2, 20)
        os.killpg(process.pid, signal.SIGINT)
        _, errors = process.communicate(timeout=patience(60))
    finally:
        process.kill()
    assert process.returncode == 42 and "the same command continues" in errors
    assert len([*tmp_path.glob("saved*")]) == 2
    assert [begun.read_text() for begun in tmp_path.glob("begun*")] == ["0.1:\n"] * 2


@pytest.mark.parametrize("wrong", ["--output=", "--minutes=0", "--at_once=8", "--texts=a"])
def test_flags_of_a_quarter_of_an_hour(wrong):
    script = ROOT / "launch" / "reproduce" / "gpu_quarter.sh"
    ended = run_to_end([script, "--text=a", wrong])
    assert_one_error(ended, 2, wrong.partition("=")[0])
