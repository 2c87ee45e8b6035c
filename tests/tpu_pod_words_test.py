"""launch/tpu_pod.sh: its arguments, what it hands to gcloud and what it copies to the hosts.

A stand-in takes what gcloud gets: the options on the reference pages of `gcloud compute tpus
queued-resources create` (in the alpha version: --provisioning-model, --max-run-duration) and of
`gcloud alpha compute tpus tpu-vm ssh` and `scp` (--tunnel-through-iap, which the version without
alpha lacks).
"""

import subprocess
import tarfile

import pytest
from gcloud_answers import ACTIVE, PLACE, RUN, ends, states
from helpers import ROOT
from stand_ins import ODD, assert_one_error


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "give a config"),
        (["configs/none.py"], "configs/none.py: there is no such file"),
        (["configs/tiny.py", "--unchecked"], "give --type=v5p-128, the kind of TPU and its size"),
        (["configs/tiny.py", "--type=v5p-8", "--unchecked"], "give --workdir=gs://"),
        (["configs/tiny.py", "--workdir=here", "--mounted"], "give --workdir=gs://"),
        (["configs/tiny.py", "--workdir=/local/dir"], "with --mounted if every host has it"),
        (["configs/tiny.py", "--restart=2"], "--restart is not an option of this script"),
        (["configs/tiny.py", "--name=No Name"], "--name=No Name must be lower-case"),
        (["configs/tiny.py", "--flex_start", "--spot"], "exclude each other"),
        (["configs/tiny.py", *PLACE, "--flex_start", "--unchecked"], "give --max_run_duration=24h"),
        (["configs/tiny.py", "--type=tpu7x-128"], "such as v5p-128"),
        (["configs/tiny.py", "--type=v9-128"], "a TPU7x is available only on GKE"),
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
