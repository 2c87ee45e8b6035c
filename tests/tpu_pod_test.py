"""launch/tpu_pod.sh against a gcloud that does what it is told to, or fails."""

import re
import tarfile

import pytest
from conftest import ROOT
from stand_ins import ODD, assert_one_error, stand_ins_fixture  # noqa: F401

RUN = ("configs/llama1b.py:ode", "--type=v5p-32", "--workdir=gs://bucket/run", "--zone=z")
ABSENT = {"call": "resources describe", "status": 1, "error": "ERROR: NOT_FOUND: no such\n"}
ACTIVE = {"call": "resources describe", "out": "ACTIVE\n"}
STATUS = r"tpu_host\.sh status"


def states(*names):
    """One after the other, then ACTIVE."""
    once = [
        {**ACTIVE, "out": f"{name}\n", "times": 1} if name else {**ABSENT, "times": 1}
        for name in names
    ]
    return [*once, ACTIVE]


def ends(*statuses):
    """What the host's status says, one after the other."""
    return [{"call": STATUS, "out": f"{status}\n", "times": 1} for status in statuses]


def steps(stand_ins):
    """The calls to gcloud in short: describe, create, scp, and the host's commands."""
    short = []
    for call in stand_ins.calls("gcloud"):
        words = " ".join(call)
        host = re.search(r"tpu_host\.sh (\w+)", words)
        short.append(host.group(1) if host else next(w for w in call[4:] if w != "tpu-vm"))
    return short


BEGIN = ["scp", "install", "start", "follow", "status"]


def test_makes_the_tpu_and_runs(stand_ins):
    stand_ins.rules(*states("", "", "WAITING_FOR_RESOURCES", "PROVISIONING"), *ends("ended 0"))
    ended = stand_ins.run("tpu_pod.sh", *RUN, "--spot")
    assert ended.returncode == 0, ended.stderr
    waiting = ["describe"] * 2 + ["create"] + ["describe"] * 3
    assert steps(stand_ins) == [*waiting, *BEGIN]
    (create,) = (call for call in stand_ins.calls() if "create" in call)
    assert create[5:] == [
        "llama1b-ode",
        "--zone=z",
        "--node-id=llama1b-ode",
        "--accelerator-type=v5p-32",
        "--runtime-version=v2-alpha-tpuv5",
        "--async",
        "--spot",
    ]
    workers = [word for call in stand_ins.calls() for word in call if "--worker" in word]
    assert workers == ["--worker=all"] * 3 + ["--worker=0"] * 2


def test_slices(stand_ins):
    stand_ins.rules(*states("", ""), *ends("ended 0"))
    assert stand_ins.run("tpu_pod.sh", *RUN, "--slices=2", "--name=two").returncode == 0
    assert steps(stand_ins)[-8:] == ["scp"] * 2 + ["install"] * 2 + ["start"] * 2 + BEGIN[3:]
    named = [call[5] for call in stand_ins.calls("gcloud") if "ssh" in call]
    assert named == ["two-0", "two-1", "two-0", "two-1", "two-0", "two-0"]
    (create,) = (call for call in stand_ins.calls() if "create" in call)
    assert {"--node-count=2", "--node-prefix=two"} <= set(create)


def test_preempted(stand_ins):
    """Saved, TPU taken away: it is requested again, and the run goes on there."""
    taken = states("ACTIVE", "ACTIVE", "SUSPENDING", "SUSPENDED", "DELETING", "")
    stand_ins.rules(*taken, *ends("absent", "ended 42", "ended 0"))
    ended = stand_ins.run("tpu_pod.sh", *RUN)
    assert ended.returncode == 0, ended.stderr
    first = ["describe", "status", "describe", *BEGIN]
    again = ["describe"] * 2 + ["delete"] + ["describe"] * 2 + ["create", "describe", *BEGIN]
    assert steps(stand_ins) == first + again
    assert "ended 42: starting again (1 of at most 100)" in ended.stderr


def test_a_host_lost_without_a_word(stand_ins):
    """The host can't be reached, and the TPU is gone."""
    stand_ins.rules(
        *states("", "ACTIVE", "SUSPENDED", "SUSPENDED", ""),
        {"call": STATUS, "status": 255, "times": 1},
        *ends("ended 0"),
    )
    ended = stand_ins.run("tpu_pod.sh", *RUN)
    assert ended.returncode == 0, ended.stderr
    again = ["describe"] * 2 + ["delete", "describe", "create", "describe"]
    assert steps(stand_ins) == ["describe"] * 2 + BEGIN + again + BEGIN


def test_restarts_are_bounded(stand_ins):
    stand_ins.rules(*states(""), {"call": STATUS, "out": "ended 42\n"})
    ended = stand_ins.run("tpu_pod.sh", *RUN, "--restarts=2")
    assert_one_error(ended, 1, "started again 2 times (--restarts) and ended 42")
    assert steps(stand_ins).count("start") == 3


def test_quota_exceeded(stand_ins):
    full = {"call": "create", "status": 1, "error": "RESOURCE_EXHAUSTED: Quota limit exceeded\n"}
    stand_ins.rules(full, ABSENT)
    ended = stand_ins.run("tpu_pod.sh", *RUN)
    assert_one_error(ended, 1, "can't be requested; the lines above say why")
    assert "RESOURCE_EXHAUSTED" in ended.stderr
    assert steps(stand_ins) == ["describe", "describe", "create"]


def test_refused(stand_ins):
    stand_ins.rules(*states("", "", "FAILED"))
    ended = stand_ins.run("tpu_pod.sh", *RUN)
    assert_one_error(ended, 1, "was refused")


def test_gcloud_without_rights(stand_ins):
    denied = {"call": "describe", "status": 1, "error": "PERMISSION_DENIED\n"}
    stand_ins.rules(denied)
    ended = stand_ins.run("tpu_pod.sh", *RUN)
    assert_one_error(ended, 1, "gcloud can't tell the state of the TPU llama1b-ode")
    assert "create" not in steps(stand_ins)


@pytest.mark.parametrize("step", ["scp", "install", "start"])
def test_one_worker_is_not_reachable(stand_ins, step):
    call = " scp " if step == "scp" else rf"tpu_host\.sh {step}"
    stand_ins.rules({"call": call, "status": 255}, *states(""))
    ended = stand_ins.run("tpu_pod.sh", *RUN)
    assert_one_error(ended, 1, "every host of llama1b-ode")
    assert steps(stand_ins).count(step) == 3
    assert "follow" not in steps(stand_ins)


def test_ssh_dropped(stand_ins):
    """The run goes on without it, so its log is shown again, and nothing is started."""
    drop = {"call": r"tpu_host\.sh follow", "status": 255, "times": 1}
    stand_ins.rules(drop, *states(""), *ends("running", "ended 0"))
    ended = stand_ins.run("tpu_pod.sh", *RUN)
    assert ended.returncode == 0, ended.stderr
    assert steps(stand_ins) == ["describe"] * 2 + BEGIN + ["follow", "status"]


def test_ssh_drops_for_ever(stand_ins):
    drop = {"call": r"tpu_host\.sh (follow|status)", "status": 255}
    stand_ins.rules(drop, *states(""))
    ended = stand_ins.run("tpu_pod.sh", *RUN)
    assert_one_error(ended, 1, "worker 0 of llama1b-ode can't be held")
    assert steps(stand_ins).count("start") == 1


@pytest.mark.parametrize("status", [1, 2, 130])
def test_a_failed_run_is_not_started_again(stand_ins, status):
    report = {"call": r"tpu_host\.sh report", "out": "ended 1 | error: it broke\n"}
    stand_ins.rules(report, *states(""), *ends(f"ended {status}"))
    ended = stand_ins.run("tpu_pod.sh", *RUN)
    assert ended.returncode == 1
    assert f"the run ended with status {status}" in ended.stderr
    assert "error: it broke" in ended.stderr
    assert steps(stand_ins).count("start") == 1


def test_stopped_by_the_other_command(stand_ins):
    stand_ins.rules(*states(""), *ends("stopped 42"))
    assert stand_ins.run("tpu_pod.sh", *RUN).returncode == 0
    assert steps(stand_ins).count("start") == 1


def test_the_same_command_shows_the_run_that_is_there(stand_ins):
    stand_ins.rules(ACTIVE, *ends("running", "ended 0"))
    assert stand_ins.run("tpu_pod.sh", *RUN).returncode == 0
    assert steps(stand_ins) == ["describe", "status", "follow", "status"]


@pytest.mark.parametrize(
    ("arguments", "steps_wanted"),
    [
        (["status"], ["describe", "report"]),
        (["logs", "--worker=3"], ["follow"]),
        (["stop"], ["stop"]),
        (["delete"], ["delete"]),
    ],
)
def test_other_verbs(stand_ins, arguments, steps_wanted):
    stand_ins.rules(ACTIVE)
    ended = stand_ins.run("tpu_pod.sh", *arguments, TPU_NAME="named", TPU_ZONE="z", TPU_PROJECT="p")
    assert ended.returncode == 0, ended.stderr
    assert steps(stand_ins) == steps_wanted
    for call in stand_ins.calls():
        assert {"named", "--zone=z", "--project=p"} <= set(call)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "give a config"),
        (["configs/none.py"], "the project has no configs/none.py"),
        (["configs/tiny.py"], "give --workdir=gs://"),
        (["configs/tiny.py", "--workdir=here"], "give --workdir=gs://"),
        (["configs/tiny.py", "--workdir=here", "--mounted"], "give --workdir=gs://"),
        (["configs/tiny.py", "--workdir=/local/dir"], "with --mounted if every host has it"),
        (["configs/tiny.py", "more.py"], "two configs are given: configs/tiny.py and more.py"),
        (["configs/tiny.py", "--restart=2"], "--restart is no option of this script"),
        (["configs/tiny.py", "--zone"], "--zone needs a value"),
        (["configs/tiny.py", "--slices=two"], "--slices=two must be a number"),
        (["configs/tiny.py", "--name=No Name"], "--name=No Name must be lower-case"),
        (["configs/tiny.py", "--spot", "--reserved"], "--spot and --reserved exclude each other"),
    ],
)
def test_bad_arguments(stand_ins, arguments, message):
    assert_one_error(stand_ins.run("tpu_pod.sh", *arguments), 2, message)
    assert stand_ins.calls() == []


@pytest.mark.parametrize("workdir", [(RUN[2],), ("--workdir=/mnt/runs/a", "--mounted")])
def test_dry_run_calls_nothing(stand_ins, workdir):
    options = (*RUN[:2], *workdir, RUN[3], ODD, "--slices=2", "--dry-run")
    ended = stand_ins.run("tpu_pod.sh", *options)
    assert ended.returncode == 0, ended.stderr
    assert stand_ins.calls() == []
    lines = ended.stdout.splitlines()
    assert len(lines) == 10
    assert all(line.startswith(("+ gcloud compute tpus ", "+ tar ")) for line in lines)


def test_arguments_reach_the_program_as_written(stand_ins, tmp_path):
    """Through gcloud's --command, the host's shell, and its script: really run on a host's home."""
    home = tmp_path / "host"
    python = stand_ins.installed() / "bin" / "python"
    project = {"call": "ssh", "homes": [str(home)]}
    stand_ins.rules(ACTIVE, {"call": "tpu_host.sh install", "times": 1}, project)
    (home / "t5x_diffeq").mkdir(parents=True)
    (home / "t5x_diffeq" / "launch").symlink_to(ROOT / "launch")
    ended = stand_ins.run("tpu_pod.sh", *RUN[:-1], ODD)
    assert ended.returncode == 0, ended.stderr
    (train,) = stand_ins.calls(python.name)
    assert train[1:] == [
        *("-m", "t5x_diffeq.train", "--config=configs/llama1b.py:ode"),
        *("--workdir=gs://bucket/run", ODD),
    ]
    assert not list(tmp_path.rglob("pwned"))


def test_the_copy_has_what_a_host_needs(stand_ins, tmp_path):
    stand_ins.rules({"call": " scp ", "keep": [str(tmp_path)]}, *states(""), *ends("ended 0"))
    assert stand_ins.run("tpu_pod.sh", *RUN).returncode == 0
    names = tarfile.open(tmp_path / "t5x_diffeq.tar.gz").getnames()  # noqa: SIM115
    needed = {
        "launch/tpu_host.sh",
        "docker/constraints.txt",
        "configs/default.py",
        "pyproject.toml",
    }
    assert needed <= set(names)
    assert not any(
        "__pycache__" in name or "test" in name for name in names if name != "launch/test.sh"
    )
