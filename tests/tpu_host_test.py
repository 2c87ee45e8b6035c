"""launch/tpu_host.sh on a folder that is a host's home, with a Python that ends as it is told."""

import os
import shutil
import signal
import socket
import subprocess
import sys
import time

import pytest
from helpers import ROOT
from patience import patience
from stand_ins import ODD

ARGUMENTS = ("--config=configs/tiny.py", "--workdir=gs://bucket/run", ODD)
PYTHON = """#!/usr/bin/env bash
# Training ends with the next status of the list; the other scripts of launch/ do nothing.
case "$*" in
  *keep_log*) exec sleep 60 ;;
  *t5x_diffeq.train*) ;;
  *) exit 0 ;;
esac
printf '%s\\0' "$@" >"$HOME/arguments.$(ls "$HOME" | grep -c '^arguments')"
echo "$T5X_DIFFEQ_ARRIVAL_SECONDS" >"$HOME/arrival"
[ -z "${TOKEN:-}" ] || echo "$TOKEN" >"$HOME/token"
read -r status <"$HOME/statuses"
sed -i 1d "$HOME/statuses"
exit "$status"
"""


class Host:
    def __init__(self, home):
        self.home = home
        project = home / "t5x_diffeq"
        project.mkdir()
        shutil.copytree(ROOT / "launch", project / "launch")
        python = home / "t5x_diffeq_venv" / "bin" / "python"
        python.parent.mkdir(parents=True)
        python.write_text(PYTHON)
        python.chmod(0o755)

    def run(self, *words, script="tpu_host.sh", status=0, **more):
        given = {**os.environ, "HOME": str(self.home), "LAUNCH_POLL_SECONDS": "0", **more}
        given.pop("VENV", None)
        command = ["bash", self.home / "t5x_diffeq" / "launch" / script, *words]
        ended = subprocess.run(
            command, env=given, capture_output=True, text=True, timeout=patience(60)
        )
        assert ended.returncode == status, ended.stderr
        return (ended.stderr if status else ended.stdout).strip()

    def begin(self, *statuses):
        (self.home / "statuses").write_text("".join(f"{status}\n" for status in statuses))
        self.run("start", "1", *ARGUMENTS)

    def wait(self):
        for _ in range(300):
            if (status := self.run("status")) != "running":
                return status
            time.sleep(0.1)
        raise AssertionError((self.home / "t5x_diffeq_run" / "log").read_text())

    def trainings(self):
        files = sorted(self.home.glob("arguments.*"))
        return [file.read_text().split("\0")[:-1] for file in files]


@pytest.fixture
def host(tmp_path):
    home = tmp_path / "home"
    home.mkdir()
    return Host(home)


def test_starts_again_when_the_infrastructure_fails(host):
    """Without a word from outside; with the same arguments."""
    host.begin(175, 137, 0)
    assert host.wait() == "ended 0"
    assert host.trainings() == [["-m", "t5x_diffeq.train", *ARGUMENTS]] * 3
    log = (host.home / "t5x_diffeq_run/log").read_text()
    assert "ended with status 175; starting again on this host in 10 s (1 of at most 100)" in log
    assert "ended with status 137; starting again on this host in 20 s (2 of at most 100)" in log


@pytest.mark.parametrize("status", [1, 2, 42, 130])
def test_other_ends_are_ends(host, status):
    host.begin(status, 0)
    assert host.wait() == f"ended {status}"
    assert len(host.trainings()) == 1


@pytest.mark.parametrize(
    ("lasted", "pauses"),
    [([1] * 8, [10, 20, 40, 80, 160, 320, 320, 320]), ([1, 1, 599, 600, 1], [10, 20, 40, 10, 20])],
)
def test_pauses_grow_while_starts_soon_fail(lasted, pauses):
    script = 'source "$0"; for each in "$@"; do next_pause "$each"; echo "$pause"; done'
    command = ["bash", "-c", script, ROOT / "launch" / "forward.sh", *map(str, lasted)]
    ended = subprocess.run(command, capture_output=True, text=True, check=True)
    assert list(map(int, ended.stdout.split())) == pauses


@pytest.mark.parametrize(("given", "seconds"), [("", "14400"), ("7", "7")])
def test_hosts_wait_for_one_that_is_being_mended(host, given, seconds):
    variable = f"T5X_DIFFEQ_ARRIVAL_SECONDS={given}\n" if given else ""
    (host.home / "t5x_diffeq" / "settings").write_text(variable)
    host.begin(0)
    assert host.wait() == "ended 0"
    assert (host.home / "arrival").read_text().strip() == seconds


def test_an_installation_without_a_network_says_what_it_needs(host):
    """It takes the mirrors that it was told of, and its status is not 0."""
    shutil.copytree(ROOT / "docker", host.home / "t5x_diffeq" / "docker")
    (host.home / "t5x_diffeq" / "settings").write_text("PIP_INDEX_URL=https://mirror/simple\n")
    python = host.home / "python3"
    python.write_text('#!/usr/bin/env bash\necho "no way to $PIP_INDEX_URL" >&2\nexit 1\n')
    python.chmod(0o755)
    path = f"{host.home}:/usr/bin:/bin"
    ended = host.run("install", status=1, PATH=path)
    assert "no way to https://mirror/simple" in ended
    assert f"{socket.gethostname()} could not install the project" in ended
    assert "--internal_ips the network needs Cloud NAT" in ended


def test_restarts_are_bounded(host):
    (host.home / "t5x_diffeq" / "settings").write_text("T5X_DIFFEQ_RESTARTS=2\n")
    host.begin(175, 175, 175, 0)
    assert host.wait() == "ended 175"
    assert len(host.trainings()) == 3


def test_goes_on_after_a_boot(host, tmp_path):
    """As the startup script does for each home; not what had ended, or was stopped."""
    host.begin(42, 0)
    assert host.wait() == "ended 42"
    (host.home / "t5x_diffeq_run" / "stopped").touch()
    host.run("resume")
    assert len(host.trainings()) == 1
    (host.home / "t5x_diffeq_run" / "stopped").unlink()
    (host.home / "runuser").write_text('#!/usr/bin/env bash\nshift 3\nexec "$@"\n')
    (host.home / "runuser").chmod(0o755)
    path = f"{host.home}:{os.environ['PATH']}"
    host.run(script="tpu_boot.sh", HOMES=str(tmp_path), PATH=path)
    assert host.wait() == "ended 0"
    assert host.trainings()[1] == host.trainings()[0]
    host.run("resume")
    assert len(host.trainings()) == 2


def test_secrets_are_read_on_the_host(host):
    (host.home / "t5x_diffeq" / "settings").write_text("T5X_DIFFEQ_SECRETS=TOKEN=its-name\n")
    (host.home / "gcloud").write_text('#!/usr/bin/env bash\necho "secret of $*"\n')
    (host.home / "gcloud").chmod(0o755)
    (host.home / "statuses").write_text("0\n")
    host.run("start", "1", *ARGUMENTS, PATH=f"{host.home}:{os.environ['PATH']}")
    assert host.wait() == "ended 0"
    told = (host.home / "token").read_text().strip()
    assert told == "secret of secrets versions access latest --secret=its-name"


def test_what_ends_before_the_training_leaves_a_status(host):
    """A secret that can't be read: status 2, not a host that was lost, which is installed again."""
    (host.home / "t5x_diffeq" / "settings").write_text("T5X_DIFFEQ_SECRETS=TOKEN=its-name\n")
    (host.home / "gcloud").write_text("#!/usr/bin/env bash\necho PERMISSION_DENIED >&2\nexit 1\n")
    (host.home / "gcloud").chmod(0o755)
    host.run("start", "1", *ARGUMENTS, PATH=f"{host.home}:{os.environ['PATH']}")
    assert host.wait() == "ended 2"
    name, _, report = host.run("report").partition(": ")
    assert name == socket.gethostname()
    assert report.startswith("ended 2 | error: the secret its-name (--secret=TOKEN=its-name) can't")


def test_the_log_does_not_begin_again_with_gclouds_next_try(host):
    host.begin(0)
    assert host.wait() == "ended 0"
    lines = [f"step {number}" for number in range(100)]
    (host.home / "t5x_diffeq_run" / "log").write_text("\n".join(lines) + "\n")
    assert host.run("follow", "+1", "a").splitlines() == lines
    assert host.run("follow", "+1", "a").splitlines() == lines[-20:]
    assert host.run("follow", "+1", "b").splitlines() == lines


@pytest.mark.slow
def test_the_log_is_kept(tmp_path):
    """The real Python script: what is there at once, and what came since at the end."""
    log, target = tmp_path / "log", tmp_path / "run" / "logs" / "host.log"
    log.write_text("first\n")
    command = [sys.executable, ROOT / "launch" / "keep_log.py", log, target]
    given = {**os.environ, "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(command, env=given)
    while not target.exists():
        assert process.poll() is None
        time.sleep(0.1)
    with log.open("a") as file:
        file.write("last\n")
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 0
    assert target.read_text() == "first\nlast\n"
