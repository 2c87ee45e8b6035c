"""launch/gpu_slurm.sh and launch/gpu_nodes.sh: their arguments, and the commands that --dry-run
prints. `slurm_test.py` and `ssh_test.py` run them against a real SLURM and a real sshd."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import ROOT
from stand_ins import ODD, assert_one_error

# `check_run_test.py` checks configs; here Python is a stand-in.
SLURM = ("configs/llama1b.py", "--workdir=/shared/run", "--unchecked")
NODES = (*SLURM, "--hosts=a,b")
CONFIG = f"--config={ROOT / 'configs' / 'llama1b.py'}"


def dry_run_commands(stand_ins, script, *arguments):
    """The commands that --dry-run prints, as words; nothing is called."""
    ended = stand_ins.run(script, *arguments, "--dry-run")
    assert ended.returncode == 0, ended.stderr
    assert stand_ins.calls() == []
    # A word with a line's end in it is quoted over lines.
    commands = re.split(r"^\+ ", ended.stdout, flags=re.MULTILINE)[1:]
    return [words_in(command) for command in commands]


def words_in(command):
    """The words that a bash reads: `printf %q` writes $'...' too."""
    script = f"printf '%s\\0' {command.rstrip()}"
    words = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True)
    return words.stdout.split("\0")[:-1]


# ---------------------------------------------------------------- SLURM


def test_submission(stand_ins):
    *_, call = dry_run_commands(stand_ins, "gpu_slurm.sh", *SLURM, "--nodes=4", "--account=me", ODD)
    assert call == [
        *("sbatch", "--parsable", "--job-name=llama1b", "--nodes=4", "--ntasks-per-node=8"),
        *("--time=24:00:00", "--requeue", "--open-mode=append", "--signal=B:USR1@300"),
        *("--output=llama1b-%j.log", "--cpus-per-task=CPUS", "--gpus-per-node=8", "--account=me"),
        *(str(ROOT / "launch" / "slurm_job.sh"), str(ROOT), "100", "train", "--"),
        *(CONFIG, "--workdir=/shared/run", ODD),
    ]


def test_submission_with_options(stand_ins):
    options = ("--gpus_per_node=0", "--tasks-per-node=2", "--exclusive", "--mem=9G", "--env=A=x y")
    more = (*SLURM, *options, "--env=HOME")
    install, call = dry_run_commands(stand_ins, "gpu_slurm.sh", *more)
    assert install == ["setup", "data", "gcs", "trackers"]
    assert {"--exclusive", "--mem=9G", "--ntasks-per-node=2", "--export=ALL,A,HOME"} < set(call)
    assert not any("gpu" in word or "cpus" in word for word in call[:-7])


def test_a_sweep_is_an_array_of_jobs(stand_ins):
    words = ("configs/llama1b.py", "--output=/shared/out", "--unchecked", "--exclusive", ODD)
    grid = ("--grid=optimizer.learning_rate=1e-3,2e-3", "--grid=variant=ode,baseline")
    more = (*words, *grid, "--seeds=2", "--jobs=4")
    install, call = dry_run_commands(stand_ins, "gpu_slurm.sh", *more)
    assert install == ["setup", "gpu", "data", "gcs", "trackers", "analysis"]
    assert {"--array=0-3", "--ntasks-per-node=1", "--output=llama1b-%A-%a.log"} < set(call)
    own = ["sweep", "--", CONFIG, "--output=/shared/out", "--seeds=2", *grid, ODD]
    assert call[-len(own) :] == own


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--workdir=/w"], "--workdir=/w is for one run; a sweep has --output=DIR"),
        (["--nodes=2"], "--nodes=2: each run of a sweep has one node"),
        (["--tasks_per_node=2"], "a sweep has one process per node"),
        (["--jobs=0"], "--jobs=0 must be a number"),
        (["--output=gs://b/o"], "--output=gs://b/o is in a bucket"),
    ],
)
def test_a_sweep_that_cannot_be_submitted(stand_ins, more, message):
    words = ("configs/llama1b.py", "--output=/out", "--grid=model.num_steps=6,12", "--dry-run")
    ended = stand_ins.run("gpu_slurm.sh", *words, "--unchecked", *more)
    assert ended.returncode == 2
    assert message in ended.stderr
    assert stand_ins.calls() == []


def test_container(stand_ins):
    words = (*SLURM, "--container=IMAGE", "--container_mounts=/data:/data", "--env=A=1")
    _, folder, call = dry_run_commands(stand_ins, "gpu_slurm.sh", *words)
    assert folder == ["mkdir", "-p", "/shared/run"]
    configs = ROOT / "configs"
    assert call[call.index("train") + 1 : call.index("--")] == [
        "--container-image=IMAGE",
        f"--container-mounts={configs}:{configs},/data:/data,/shared/run:/shared/run",
        "--container-env=A",
    ]


def test_further_options_of_sbatch_come_last(stand_ins):
    """After `--`, and after ours, so that they win. --dry-run stands before."""
    words = (*SLURM, "--dry-run", "--", "--requeue", "--comment=two words")
    ended = stand_ins.run("gpu_slurm.sh", *words)
    assert ended.returncode == 0, ended.stderr
    assert "--gpus-per-node=8 --requeue --comment=two\\ words " in ended.stdout


@pytest.mark.parametrize("script", ["gpu_slurm.sh", "gpu_nodes.sh"])
def test_the_users_own_config_is_taken(stand_ins, script):
    """Not the project's of the same name; that one, where there is no other."""
    own = stand_ins.folder / "configs" / "llama1b.py"
    for exists, taken in ((False, ROOT / "configs" / "llama1b.py"), (True, own)):
        if exists:
            own.parent.mkdir()
            own.write_text("")
        words = ["configs/llama1b.py:shared", "--workdir=run", "--unchecked"]
        if script == "gpu_nodes.sh":
            words += ["--rank=0", "--size=2", "--coordinator=a"]
        *_, call = dry_run_commands(stand_ins, script, *words)
        assert f"--config={taken}:shared" in call
        assert f"--workdir={stand_ins.folder / 'run'}" in call


@pytest.mark.parametrize("script", ["gpu_slurm.sh", "gpu_nodes.sh"])
def test_bad_arguments(stand_ins, script):
    for arguments, message in (
        ([], "give a config"),
        (["configs/tiny.py"], "give --workdir="),
        (["configs/tiny.py", "--what=1"], "--what is not an option of this script"),
        (["configs/tiny.py", "--restarts=0"], "--restarts=0 must be a number, at least 1"),
    ):
        assert_one_error(stand_ins.run(script, *arguments), 2, message)
    assert stand_ins.calls() == []


@pytest.mark.parametrize(
    ("script", "arguments", "message"),
    [
        (
            "gpu_slurm.sh",
            ("configs/nope.py", "--workdir=/run"),
            "configs/nope.py: there is no such",
        ),
        ("gpu_slurm.sh", (*SLURM, "--time=5"), "--time=5 leaves nothing to train in"),
        ("gpu_slurm.sh", (*SLURM, "--time=abc"), "--time=abc must be like 24:00:00, 1-12:00 or"),
        ("gpu_slurm.sh", (*SLURM, "--cpus_per_task=0"), "--cpus_per_task=0 must be a number"),
        ("gpu_slurm.sh", (*SLURM, "--env=NOT_SET"), "there is no variable NOT_SET here"),
        ("gpu_nodes.sh", ("configs/no.py", *NODES[1:]), "configs/no.py: there is no such"),
        ("gpu_nodes.sh", (*SLURM, "--hosts=a,-oProxyCommand=x"), "'-oProxyCommand=x' is not the"),
        ("gpu_nodes.sh", (*NODES, "--ssh_config=/none"), "--ssh_config=/none: there is no such"),
        ("gpu_nodes.sh", SLURM, "give --hosts=a,b, or --rank"),
    ],
)
def test_what_is_refused(stand_ins, script, arguments, message):
    assert_one_error(stand_ins.run(script, *arguments, "--dry-run"), 2, message)
    assert stand_ins.calls() == []


def test_data_as_an_array(stand_ins):
    words = ("slurm", "configs/tiny.py", "--output=/shards", "--parts=4", ODD)
    _, first, last = dry_run_commands(stand_ins, "prepare_data.sh", *words)
    assert "--array=0-3" in first
    assert "--dependency=afterok:JOB" in last
    told = [f"--config={ROOT / 'configs' / 'tiny.py'}", "--output=/shards", "--shards=4"]
    assert first[-7:] == last[-7:] == ["prepare_data", "--", *told, "--workers=8", ODD]


# ---------------------------------------------------------------- ssh, or any launcher


def test_over_ssh(stand_ins):
    """One ssh for each process; what a shell on the host reads; no secret on the command line."""
    words = (*SLURM, "--hosts=me@a,b", "--processes-per-host=2", "--env=KEY=secret", ODD)
    _, *calls = dry_run_commands(stand_ins, "gpu_nodes.sh", *words)
    assert [call[-2] for call in calls] == ["me@a", "me@a", "b", "b"]
    assert all(call[-3] == "--" for call in calls)
    for rank, call in enumerate(calls):
        words = words_in(call[-1])
        assert words[1:] == [
            str(ROOT / "launch" / "gpu_rank.sh"),
            *(str(rank), "4", "a:8476", str(rank % 2), "stdin", "--workdir=/shared/run", ODD),
        ]
        assert "secret" not in call[-1]


def test_one_process_under_a_launcher(stand_ins):
    (stand_ins.install() / "bin" / "python").write_text(
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
SCRIPTS = [p for p in sorted((ROOT / "launch").rglob("*.sh")) if p.name not in ON_HOSTS]


def too_new(script: Path) -> list[str]:
    lines = [re.sub(r"(^|\s)#.*", "", line) for line in script.read_text().splitlines()]
    return [line for line in lines if any(re.search(pattern, line) for pattern in TOO_NEW)]


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_scripts_are_for_bash_3_2(script):
    found = too_new(script)
    assert not found, found


@pytest.mark.skipif("BASH_3" not in os.environ, reason="BASH_3 names no bash 3.2")
@pytest.mark.parametrize(
    "words", [("gpu_slurm.sh", *SLURM), ("gpu_nodes.sh", *NODES), ("gke.sh", "--help")]
)
def test_bash_3_2_itself(stand_ins, words):
    script, *rest = words
    command = [os.environ["BASH_3"], ROOT / "launch" / script, *rest, "--dry-run"]
    options = {"capture_output": True, "text": True, "env": stand_ins.environment()}
    found, expected = (subprocess.run(c, **options) for c in (command, ["bash", *command[1:]]))
    assert found.returncode == 0, found.stderr
    assert found.stdout == expected.stdout != ""


# ---------------------------------------------------------------- XLA's flags


def run_xla_flags(*kind, **given):
    mine = {k: v for k, v in os.environ.items() if "MEM_FRACTION" not in k and k != "XLA_FLAGS"}
    command = [sys.executable, ROOT / "launch" / "xla_flags.py", *kind]
    environment = {**mine, "JAX_PLATFORMS": "cpu"} | given
    return subprocess.run(command, env=environment, capture_output=True, text=True)


def test_flags_that_jaxlib_does_not_know_are_left_out():
    ended = run_xla_flags(XLA_FLAGS="--xla_gone=1 --xla_gpu_enable_pipelined_all_gather=false")
    assert ended.stderr == (
        "warning: --xla_gone=1 is unknown to the installed jaxlib, and left out\n"
    )
    taken = ended.stdout.split()
    assert "--xla_gpu_enable_latency_hiding_scheduler=true" in taken
    assert taken[-1] == "--xla_gpu_enable_pipelined_all_gather=false"  # the user's wins
    assert "--xla_gpu_enable_pipelined_all_gather=true" not in taken


def test_flags_that_cannot_be_read_are_not_fatal():
    ended = run_xla_flags(XLA_FLAGS="--xla_gpu_enable_pipelined_all_gather=perhaps")
    assert ended.stdout.split() == ["--xla_gpu_enable_pipelined_all_gather=perhaps"]
    assert ended.stderr.count("\n") == 1


def test_collectives_are_combined_as_asked():
    ended = run_xla_flags(
        "gpu",
        T5X_DIFFEQ_COMBINE_MIB="64",
        XLA_FLAGS="--xla_gpu_all_reduce_combine_threshold_bytes=1",
        XLA_CLIENT_MEM_FRACTION="0.8",
    )
    taken = [flag for flag in ended.stdout.split() if "combine" in flag]
    assert (ended.returncode, ended.stderr) == (0, "")  # the installed jaxlib knows all of them
    assert sorted(taken) == [
        "--xla_gpu_all_gather_combine_threshold_bytes=67108864",
        "--xla_gpu_all_reduce_combine_threshold_bytes=1",  # the user's own
        "--xla_gpu_reduce_scatter_combine_threshold_bytes=67108864",
    ]


@pytest.mark.parametrize(
    ("kind", "given", "message"),
    [
        ("gpu", {"T5X_DIFFEQ_COMBINE_MIB": "64MB"}, "64MB is not a number of MiB"),
        ("tpu", {"T5X_DIFFEQ_COMBINE_MIB": "0"}, "0 is not a number of MiB"),
        ("gpu", {"XLA_CLIENT_MEM_FRACTION": "92"}, "92 is not a fraction of a GPU's memory"),
        ("gpu", {"XLA_PYTHON_CLIENT_MEM_FRACTION": "most"}, "most is not a fraction"),
        (
            "gpu",
            {"XLA_CLIENT_MEM_FRACTION": "0.9", "XLA_PYTHON_CLIENT_MEM_FRACTION": "0.9"},
            "are both set",
        ),
    ],
)
def test_values_of_variables_that_cannot_be_used(kind, given, message):
    ended = run_xla_flags(kind, **given)
    assert (ended.returncode, ended.stdout) == (2, "")
    assert ended.stderr.startswith("error: ")
    assert message in ended.stderr
