"""launch/tpu_pod.sh against a gcloud that does what it is told to, or fails.

gcloud can't be had without a cloud. What stands in for it answers as Google's documentation says:
a queued resource is WAITING_FOR_RESOURCES, PROVISIONING, ACTIVE, FAILED, SUSPENDING or SUSPENDED,
and in the last state "no longer eligible for further allocation"
(docs.cloud.google.com/tpu/docs/queued-resources). The options that it gets are those of the
reference pages of `gcloud compute tpus queued-resources create` (in the alpha version:
--provisioning-model, --max-run-duration) and of `gcloud alpha compute tpus tpu-vm ssh` and `scp`
(--tunnel-through-iap, which the version without alpha lacks).
"""

import os
import re
import shutil
import subprocess
import tarfile

import pytest
from helpers import ROOT
from stand_ins import ODD, assert_one_error

PLACE = ("--type=v5p-32", "--workdir=gs://bucket/run", "--zone=z")
RUN = ("configs/llama1b.py:ode", *PLACE, "--unchecked")
BOOT = f"--metadata-from-file=startup-script={ROOT}/launch/tpu_boot.sh"
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
        verb = call[call.index("tpus") + 2]
        short.append(host.group(1) if host else verb)
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
        BOOT,
        "--spot",
    ]
    workers = [word for call in stand_ins.calls() for word in call if "--worker" in word]
    assert workers == ["--worker=all"] * 3 + ["--worker=0"] * 2


def test_slices(stand_ins):
    stand_ins.rules(*states("", ""), *ends("ended 0"))
    assert stand_ins.run("tpu_pod.sh", *RUN, "--slices=2", "--name=two").returncode == 0
    assert steps(stand_ins)[-8:] == ["scp"] * 2 + ["install"] * 2 + ["start"] * 2 + BEGIN[3:]
    named = [call[6] for call in stand_ins.calls("gcloud") if "ssh" in call]
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


def test_a_question_that_fails_does_not_end_the_wait(stand_ins):
    """The TPU would be granted later, and paid for, with nobody to use it."""
    busy = (  # gcloud 528, which had asked for 28 seconds
        "ERROR: (gcloud.compute.tpus.queued-resources.describe) HttpError accessing <https://tpu>: "
        "response: <{'status': 503}>, content <The service is currently unavailable.>\n"
        "This may be due to network connectivity issues.\n"
    )
    unknown = {"call": "resources describe", "status": 1, "error": busy, "times": 1}
    waiting = states("", "", "WAITING_FOR_RESOURCES")
    stand_ins.rules(*waiting[:3], unknown, *waiting[2:], *ends("ended 0"))
    ended = stand_ins.run("tpu_pod.sh", *RUN)
    assert ended.returncode == 0, ended.stderr
    assert "TPU llama1b-ode: unknown" in ended.stderr and busy in ended.stderr
    assert steps(stand_ins).count("create") == 1


def test_the_zone_is_that_of_gcloud(stand_ins):
    """A reserved TPU can't be created without; and what is printed names all that it needs."""
    words = ("configs/llama1b.py:ode", *PLACE[:2], "--unchecked", "--reserved", "--slices=2")
    assert_one_error(stand_ins.run("tpu_pod.sh", *words), 2, "give --zone=us-east5-a")
    zone = {"call": "config get compute/zone", "out": "z-configured\n"}
    stand_ins.rules(zone, *states("", ""), *ends("ended 0"))
    ended = stand_ins.run("tpu_pod.sh", *words, "--project=p")
    assert ended.returncode == 0, ended.stderr
    (create,) = (call for call in stand_ins.calls() if "create" in call)
    assert "--zone=z-configured" in create
    place = "--name=llama1b-ode --project=p --zone=z-configured --slices=2"
    assert f"tpu_pod.sh delete {place}" in ended.stderr


def test_a_silent_host_is_noticed(stand_ins):
    stand_ins.rules(*states(""), *ends("ended 0"))
    assert stand_ins.run("tpu_pod.sh", *RUN).returncode == 0
    reached = [call for call in stand_ins.calls("gcloud") if "ssh" in call or "scp" in call]
    assert len(reached) == len(BEGIN)
    for call in reached:
        flag = "--ssh-flag" if "ssh" in call else "--scp-flag"
        assert f"{flag}=-o ServerAliveInterval=15" in call
        assert f"{flag}=-o ServerAliveCountMax=4" in call


def test_ctrl_c_leaves_the_log(stand_ins):
    """Pressed once, also if what gcloud runs catches it."""
    follow = {"call": r"tpu_host\.sh follow", "waits": True}
    stand_ins.rules(follow, *states(""), *ends("running"))
    status, said = stand_ins.interrupt("tpu_pod.sh", *RUN, call="tpu_host.sh follow")
    assert status == 130, said
    assert "the run goes on; stop it with: " in said and "tpu_pod.sh stop" in said
    assert steps(stand_ins).count("follow") == 1


@pytest.mark.skipif(not shutil.which("ssh-agent"), reason="needs ssh-agent: openssh-client")
def test_the_key_of_gcloud_is_in_the_agent(stand_ins, tmp_path):
    """With an agent that lacks it gcloud refuses to copy to several hosts."""
    key = tmp_path / ".ssh" / "google_compute_engine"
    key.parent.mkdir()
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", key], check=True)
    agent = {"SSH_AUTH_SOCK": str(tmp_path / "agent")}
    running = subprocess.Popen(
        ["ssh-agent", "-D", "-a", agent["SSH_AUTH_SOCK"]], stdout=subprocess.DEVNULL
    )
    try:
        stand_ins.rules(*states(""), *ends("ended 0"))
        ended = stand_ins.run("tpu_pod.sh", *RUN, HOME=str(tmp_path), **agent)
        assert ended.returncode == 0, ended.stderr
        listed = ["ssh-add", "-T", f"{key}.pub"]
        subprocess.run(listed, env={**os.environ, **agent}, check=True, capture_output=True)
    finally:
        running.terminate()
        running.wait()


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
    report = {"call": r"tpu_host\.sh report", "out": "host: ended 1 | error: it broke\n"}
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
        (["configs/none.py"], "configs/none.py: there is no such file"),
        (["configs/tiny.py", "--unchecked"], "give --type=v5p-128, the kind of TPU and its size"),
        (["configs/tiny.py", "--type=v5p-8", "--unchecked"], "give --workdir=gs://"),
        (["configs/tiny.py", "--workdir=here"], "give --workdir=gs://"),
        (["configs/tiny.py", "--workdir=here", "--mounted"], "give --workdir=gs://"),
        (["configs/tiny.py", "--workdir=/local/dir"], "with --mounted if every host has it"),
        (["configs/tiny.py", "more.py"], "two configs are given: configs/tiny.py and more.py"),
        (["configs/tiny.py", "--restart=2"], "--restart is no option of this script"),
        (["configs/tiny.py", "--zone"], "--zone needs a value"),
        (["configs/tiny.py", "--slices=two"], "--slices=two must be a number"),
        (["configs/tiny.py", "--name=No Name"], "--name=No Name must be lower-case"),
        (["configs/tiny.py", "--spot", "--reserved"], "exclude each other"),
        (["configs/tiny.py", "--flex_start", "--spot"], "exclude each other"),
        (["configs/tiny.py", *PLACE, "--flex_start", "--unchecked"], "give --max_run_duration=24h"),
        (["configs/tiny.py", "--type=tpu7x-128"], "such as v5p-128"),
        (["configs/tiny.py", "--type=v9-128"], "a TPU7x is had through GKE alone"),
        (["configs/tiny.py", *PLACE, "--env=9=x"], "9 is no name of a variable"),
        (["configs/tiny.py", *PLACE, "--secret=a b"], "--secret=a b must be VARIABLE"),
    ],
)
def test_bad_arguments(stand_ins, arguments, message):
    assert_one_error(stand_ins.run("tpu_pod.sh", *arguments), 2, message)
    assert stand_ins.calls() == []


@pytest.mark.parametrize("workdir", [(RUN[2],), ("--workdir=/mnt/runs/a", "--mounted")])
def test_dry_run_calls_nothing(stand_ins, workdir):
    options = (*RUN[:2], *workdir, *RUN[3:], ODD, "--slices=2", "--dry-run")
    ended = stand_ins.run("tpu_pod.sh", *options)
    assert ended.returncode == 0, ended.stderr
    assert stand_ins.calls() == []
    lines = ended.stdout.splitlines()
    assert len(lines) == 10
    assert all(line.startswith(("+ gcloud compute tpus ", "+ tar ")) for line in lines)


def test_arguments_reach_the_program_as_written(stand_ins, tmp_path):
    """Through gcloud's --command, the host's shell, and its script: really run on a host's home."""
    home = tmp_path / "host"
    python = stand_ins.install() / "bin" / "python"
    project = {"call": "ssh", "homes": [str(home)]}
    stand_ins.rules(ACTIVE, {"call": "tpu_host.sh install", "times": 1}, project)
    (home / "t5x_diffeq").mkdir(parents=True)
    (home / "t5x_diffeq" / "launch").symlink_to(ROOT / "launch")
    ended = stand_ins.run("tpu_pod.sh", *RUN[:-1], ODD)
    assert ended.returncode == 0, ended.stderr
    (train,) = (call for call in stand_ins.calls(python.name) if "-m" in call)
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


def test_a_config_of_ones_own_is_sent_along(stand_ins, tmp_path):
    """The file itself, though the project has one of that name; variables go beside it, unseen."""
    mine = tmp_path / "elsewhere" / "llama1b.py"
    mine.parent.mkdir()
    mine.write_text("# mine\n")
    stand_ins.rules({"call": " scp ", "keep": [str(tmp_path)]}, *states(""), *ends("ended 0"))
    given = ("--env=A=it's $(x)", "--env=HERE", "--secret=TOKEN=its-name", "--restarts=7")
    words = (f"{mine}:ode", *PLACE, "--unchecked", *given)
    assert stand_ins.run("tpu_pod.sh", *words, HERE="hidden").returncode == 0
    (start,) = (call for call in stand_ins.calls() if "tpu_host.sh start" in call[-1])
    assert "--config=own_config/llama1b.py:ode" in start[-1]
    assert "hidden" not in str(stand_ins.calls())
    with tarfile.open(tmp_path / "t5x_diffeq.tar.gz") as copied:
        assert copied.extractfile("own_config/llama1b.py").read() == b"# mine\n"
        assert copied.getmember("settings").mode & 0o077 == 0
        copied.extract("settings", tmp_path)
    told = "set -a; source settings; set +a; env -0"
    printed = subprocess.run(["bash", "-c", told], cwd=tmp_path, capture_output=True, text=True)
    variables = dict(line.split("=", 1) for line in printed.stdout.split("\0") if "=" in line)
    assert (variables["A"], variables["HERE"]) == ("it's $(x)", "hidden")
    assert variables["T5X_DIFFEQ_SECRETS"] == "TOKEN=its-name"
    assert (variables["T5X_DIFFEQ_TPU"], variables["T5X_DIFFEQ_RESTARTS"]) == ("v5p-32", "7")


def test_flex_start(stand_ins):
    stand_ins.rules(*states("", ""), *ends("ended 0"))
    options = ("--flex_start", "--max_run_duration=24h", "--labels=team=a", "--subnetwork=s")
    assert stand_ins.run("tpu_pod.sh", *RUN, *options).returncode == 0
    (create,) = (call for call in stand_ins.calls() if "create" in call)
    assert create[1] == "alpha"
    wanted = {"--provisioning-model=flex-start", "--max-run-duration=86400s"}
    assert wanted | {"--labels=team=a", "--subnetwork=s"} <= set(create)


def test_hosts_without_addresses_outside(stand_ins):
    stand_ins.rules(*states("", ""), *ends("ended 0"))
    assert stand_ins.run("tpu_pod.sh", *RUN, "--internal_ips").returncode == 0
    for call in stand_ins.calls("gcloud"):
        reached = "ssh" in call or "scp" in call
        assert (call[1] == "alpha" and "--tunnel-through-iap" in call) == reached
        assert ("--internal-ips" in call) == ("create" in call)


@pytest.mark.parametrize(
    ("kind", "runtime"),
    [
        ("v4-16", "tpu-ubuntu2204-base"),
        ("v5litepod-16", "v2-alpha-tpuv5-lite"),
        ("v5p-16", "v2-alpha-tpuv5"),
        ("v6e-16", "v2-alpha-tpuv6e"),
    ],
)
def test_runtime_versions(stand_ins, kind, runtime):
    """As docs.cloud.google.com/tpu/docs/runtimes lists them; a TPU7x has none, outside GKE."""
    ended = stand_ins.run("tpu_pod.sh", *RUN, f"--type={kind}", "--dry-run")
    assert f"--runtime-version={runtime} " in ended.stdout


@pytest.mark.parametrize(
    ("kind", "count", "hosts"),
    [
        ("v5p-128", 64, 16),
        ("v4-8", 4, 1),
        ("v5litepod-16", 16, 4),
        ("v6e-8", 8, 1),
        ("v3-32", 32, 4),
    ],
)
def test_the_check_knows_devices_and_hosts(stand_ins, kind, count, hosts):
    """Types count cores up to v5p; a core is a device up to v3, two cores are one in v4 and v5p."""
    stand_ins.rules({"call": "check_run.py", "status": 2})
    ended = stand_ins.run("tpu_pod.sh", RUN[0], *PLACE, f"--type={kind}", "--slices=2")
    assert ended.returncode == 2
    (check,) = stand_ins.calls()
    assert {"--chip=tpu", f"--count={count}", f"--hosts={hosts}", "--slices=2"} <= set(check)
    assert check[-2:] == ["--config=configs/llama1b.py:ode", "--workdir=gs://bucket/run"]
