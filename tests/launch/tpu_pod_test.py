"""launch/tpu_pod.sh where the real `gcloud` of `gcloud_test.py` shows nothing: options, several
slices, ends of a run, hosts that can't be reached.

A stand-in takes what gcloud gets: the options on the reference pages of `gcloud compute tpus
queued-resources create` (in the alpha version: --provisioning-model, --max-run-duration) and of
`gcloud alpha compute tpus tpu-vm ssh` and `scp` (--tunnel-through-iap, which the version without
alpha lacks). Its texts are those of gcloud 528.
"""

import re
import tarfile

import pytest
from helpers import ROOT, run_to_end
from stand_ins import assert_one_error

pytestmark = pytest.mark.slow

PLACE = ("--type=v5p-32", "--workdir=gs://bucket/run", "--zone=z")
RUN = ("configs/llama1b.py:ode", *PLACE, "--unchecked")
TINY = "configs/tiny.py"
STATUS = r"tpu_host\.sh status"
ACTIVE = {"call": "resources describe", "out": "ACTIVE\n"}
ABSENT = {"call": "resources describe", "status": 1, "error": "ERROR: NOT_FOUND: Resource\n"}
NEW = ({**ABSENT, "times": 2}, ACTIVE)  # asked for at the start and in the wait, then requested
DONE = {"call": STATUS, "out": "ended 0\n"}
UNREACHABLE = {  # after ten tries to reach one of several hosts, and without a last line
    "status": 255,
    "error": "ssh: connect to host 203.0.113.11 port 22: Connection refused\n"
    "Retrying: SSH command error: [/usr/bin/ssh] exited with return code [255].\n",
}


def steps(stand_ins):
    """The calls to gcloud in short: describe, create, scp, and the host's commands."""
    short = []
    for call in stand_ins.calls("gcloud"):
        host = re.search(r"tpu_host\.sh (\w+)", " ".join(call))
        short.append(host.group(1) if host else call[call.index("tpus") + 2])
    return short


def create(stand_ins):
    """The one request for a TPU."""
    (call,) = (call for call in stand_ins.calls("gcloud") if "create" in call)
    return call


# ---------------------------------------------------------------- what gcloud is told


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "give a config"),
        (["--unchecked"], "give --type=v5p-128, the kind of TPU and its size"),
        (["--workdir=/local/dir"], "with --mounted if every host has it"),
        (["--name=No Name"], "--name=No Name must be lower-case"),
        (["--flex_start", "--spot"], "exclude each other"),
        ([*PLACE, "--flex_start", "--unchecked"], "give --max_run_duration=24h"),
        ([*PLACE, "--secret=a b"], "--secret=a b must be VARIABLE"),
        ([*PLACE, "--max_run_duration=24h"], "--max_run_duration=24h is for --flex_start"),
        (["--type=v5e-16"], "--type=v5e-16 is --type=v5litepod-16, in gcloud's words"),
    ],
)
def test_bad_arguments(stand_ins, arguments, message):
    config = [TINY] if arguments else []
    assert_one_error(stand_ins.run("tpu_pod.sh", *config, *arguments), 2, message)
    assert stand_ins.calls() == []


@pytest.mark.parametrize(
    ("kind", "count", "hosts", "runtime"),
    [
        ("v3-32", 32, 4, "tpu-ubuntu2204-base"),
        ("v4-8", 4, 1, "tpu-ubuntu2204-base"),
        ("v5litepod-16", 16, 4, "v2-alpha-tpuv5-lite"),
        ("v5p-128", 64, 16, "v2-alpha-tpuv5"),
    ],
)
def test_kinds_of_tpu(stand_ins, kind, count, hosts, runtime):
    """Types count cores up to v5p; a core is a device up to v3, two cores are one in v4 and v5p.

    Runtime versions are those of docs.cloud.google.com/tpu/docs/runtimes.
    """
    stand_ins.rules(*NEW, DONE)
    ended = stand_ins.run("tpu_pod.sh", RUN[0], *PLACE, f"--type={kind}", "--slices=2")
    assert ended.returncode == 0, ended.stderr
    check = stand_ins.calls("python")[0]
    assert {"--chip=tpu", f"--count={count}", f"--hosts={hosts}", "--slices=2"} <= set(check)
    assert check[-2:] == ["--config=configs/llama1b.py:ode", PLACE[1]]
    assert {f"--accelerator-type={kind}", f"--runtime-version={runtime}"} <= set(create(stand_ins))


def test_slices(stand_ins):
    """And the startup script, which continues the run after a boot."""
    stand_ins.rules(*NEW, DONE)
    assert stand_ins.run("tpu_pod.sh", *RUN, "--slices=2", "--name=two").returncode == 0
    begin = ["scp"] * 2 + ["install"] * 2 + ["start"] * 2
    assert steps(stand_ins)[-8:] == [*begin, "follow", "status"]
    named = [call[6] for call in stand_ins.calls("gcloud") if "ssh" in call]
    assert named == ["two-0", "two-1", "two-0", "two-1", "two-0", "two-0"]
    workers = [word for call in stand_ins.calls() for word in call if "--worker" in word]
    assert workers == ["--worker=all"] * 6 + ["--worker=0"] * 2
    boot = f"--metadata-from-file=startup-script={ROOT}/launch/tpu_boot.sh"
    assert {"--node-count=2", "--node-prefix=two", boot} <= set(create(stand_ins))


def test_options_of_gclouds_alpha_version(stand_ins):
    """A TPU for a day, and hosts without addresses outside."""
    stand_ins.rules(*NEW, DONE)
    options = ("--flex_start", "--max_run_duration=24h", "--labels=team=a", "--internal_ips")
    assert stand_ins.run("tpu_pod.sh", *RUN, *options).returncode == 0
    wanted = {"--provisioning-model=flex-start", "--max-run-duration=86400s"}
    assert wanted | {"--labels=team=a", "--internal-ips", "alpha"} <= set(create(stand_ins))
    for call in stand_ins.calls("gcloud"):
        if "ssh" in call or "scp" in call:
            assert call[1] == "alpha" and "--tunnel-through-iap" in call


def test_variables_are_sent_unseen(stand_ins, tmp_path):
    """In a file that its owner alone reads, and a config of one's own beside it."""
    mine = tmp_path / "llama1b.py"
    mine.write_text("# mine\n")
    stand_ins.rules({"call": " scp ", "keep": str(tmp_path)}, *NEW, DONE)
    given = ("--env=A=it's\n\t$(x)", "--env=HERE", "--secret=TOKEN=its-name", "--restarts=7")
    ended = stand_ins.run("tpu_pod.sh", f"{mine}:ode", *PLACE, *given, HERE="hidden")
    assert ended.returncode == 0, ended.stderr
    (start,) = (call for call in stand_ins.calls() if "tpu_host.sh start" in call[-1])
    assert "--config=own_config/llama1b.py:ode" in start[-1]
    assert "hidden" not in str(stand_ins.calls())
    with tarfile.open(tmp_path / "t5x_diffeq.tar.gz") as copied:
        assert copied.extractfile("own_config/llama1b.py").read() == b"# mine\n"
        assert copied.getmember("settings").mode & 0o077 == 0
        copied.extract("settings", tmp_path)
    told = "set -a; source settings; env -0"
    printed = run_to_end(["bash", "-c", told], cwd=tmp_path)
    wanted = {"A=it's\n\t$(x)", "HERE=hidden", "T5X_DIFFEQ_SECRETS=TOKEN=its-name"}
    assert wanted | {"T5X_DIFFEQ_RESTARTS=7"} <= {*printed.stdout.split("\0")}


# ---------------------------------------------------------------- what becomes of the run


def test_restarts_are_bounded(stand_ins):
    stand_ins.rules(ACTIVE, {"call": STATUS, "out": "ended 42\n"})
    ended = stand_ins.run("tpu_pod.sh", *RUN, "--restarts=2")
    assert_one_error(ended, 1, "started again 2 times (--restarts) and ended 42")
    assert steps(stand_ins).count("start") == 3


@pytest.mark.parametrize(
    ("said", "status"),
    [("ended 1", 1), ("ended 130", 1), ("stopped 42", 0), ("stopped 137", 1), ("ended 0", 0)],
)
def test_ends_for_good(stand_ins, said, status):
    report = {"call": r"tpu_host\.sh report", "out": "host: ended 1 | error: it broke\n"}
    stand_ins.rules(report, ACTIVE, {"call": STATUS, "out": f"{said}\n"})
    ended = stand_ins.run("tpu_pod.sh", *RUN)
    assert ended.returncode == status
    assert ("error: it broke" in ended.stderr) == (status > 0 and said.startswith("ended"))
    assert ("stopped, saved" in ended.stderr) == (said == "stopped 42")
    assert steps(stand_ins).count("start") == 1


def test_ssh_dropped(stand_ins):
    """The run goes on without it, so its log is shown again, and nothing is started."""
    drop = {"call": r"tpu_host\.sh follow", **UNREACHABLE, "times": 1}
    running = {"call": STATUS, "out": "running\n", "times": 1}
    stand_ins.rules(drop, *NEW, running, DONE)
    ended = stand_ins.run("tpu_pod.sh", *RUN)
    assert ended.returncode == 0, ended.stderr
    begun = ["scp", "install", "start", *["follow", "status"] * 2]
    assert steps(stand_ins) == ["describe", "describe", "create", "describe", *begun]
