"""launch/tpu_host.sh on a folder that is a host's home, with a Python that ends as it is told."""

import os
import pwd
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
from helpers import ROOT, run_to_end
from stand_ins import ODD

ARGUMENTS = ("--config=configs/tiny.py", "--workdir=gs://bucket/run", ODD)
PYTHON = """#!/usr/bin/env bash
# Training ends with the next status of the list; the other scripts of launch/ do nothing.
case "$*" in
  *keep_log*) exec sleep 60 ;;
  *t5x_diffeq.train*) ;;
  *) exit 0 ;;
esac
number="$(ls "$HOME" | grep -c '^arguments')"
told=("$T5X_DIFFEQ_ARRIVAL_SECONDS" "$JAX_COMPILATION_CACHE_DIR")
printf '%s\\0' "$@" "${told[@]}" >"$HOME/arguments.$number"
read -r status <"$HOME/statuses"
sed -i 1d "$HOME/statuses"
exit "$status"
"""
TRAINING = ["-m", "t5x_diffeq.train", *ARGUMENTS]
CACHE = "gs://bucket/compilation_cache"


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

    def run(self, *words, script="tpu_host.sh", status=0):
        path = f"{self.home}:{os.environ['PATH']}"
        given = {**os.environ, "HOME": str(self.home), "LAUNCH_POLL_SECONDS": "0", "PATH": path}
        given.pop("VENV", None)
        given["HOMES"] = str(self.home.parent)
        command = ["bash", self.home / "t5x_diffeq" / "launch" / script, *words]
        ended = run_to_end(command, env=given)
        assert ended.returncode == status, ended.stderr
        return (ended.stderr if status else ended.stdout).strip()

    def add(self, program, script):
        (self.home / program).write_text(f"#!/usr/bin/env bash\n{script}\n")
        (self.home / program).chmod(0o755)

    def tell(self, *settings):
        (self.home / "t5x_diffeq" / "settings").write_text("\n".join(settings) + "\n")

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
    """Without a word from outside; with the same arguments. Hosts wait for one that is mended."""
    host.begin(175, 137, 0)
    assert host.wait() == "ended 0"
    assert host.trainings() == [[*TRAINING, "14400", CACHE]] * 3


def test_restarts_are_bounded(host):
    host.tell("T5X_DIFFEQ_RESTARTS=2", "T5X_DIFFEQ_ARRIVAL_SECONDS=7")
    host.begin(175, 175, 175, 0)
    assert host.wait() == "ended 175"
    assert host.trainings() == [[*TRAINING, "7", CACHE]] * 3


@pytest.mark.parametrize("status", [1, 42, 130])
def test_other_ends_are_ends(host, status):
    host.begin(status, 0)
    assert host.wait() == f"ended {status}"
    assert len(host.trainings()) == 1


def test_pauses_grow_while_starts_soon_fail():
    script = 'source "$0"; for each in "$@"; do next_pause "$each"; echo "$pause"; done'
    lasted = ["1"] * 8 + ["599", "600", "1"]
    command = ["bash", "-c", script, ROOT / "launch" / "forward.sh", *lasted]
    ended = run_to_end(command, check=True)
    pauses = [10, 20, 40, 80, 160, 320, 320, 320, 320, 10, 20]
    assert [*map(int, ended.stdout.split())] == pauses


@pytest.mark.parametrize(
    ("workdir", "given", "kept"),
    [
        ("gs://bucket/runs/a", "", "gs://bucket/runs/compilation_cache"),
        ("gs://bucket/runs/a", "gs://other/cache", "gs://other/cache"),
        ("gs://bucket/run/", "", "gs://bucket/compilation_cache"),
        ("gs://bucket", "", ""),
        ("gs://bucket/", "", ""),
        ("{0}/run", "", "{0}/compilation_cache"),
        ("{0}/run//", "", "{0}/compilation_cache"),
        ("run", "", ""),
    ],
)
def test_compiled_programs_are_kept_beside_the_workdir(tmp_path, workdir, given, kept):
    """Where every host of a run reads them when it starts anew."""
    script = 'source "$0"; keep_programs "$@"; echo "$JAX_COMPILATION_CACHE_DIR"'
    arguments = ("train", f"--workdir={workdir.format(tmp_path)}", "--config=a/b.py")
    command = ["bash", "-c", script, ROOT / "launch" / "forward.sh", *arguments]
    ended = run_to_end(command, env={**os.environ, "JAX_COMPILATION_CACHE_DIR": given})
    assert ended.stdout.strip() == kept.format(tmp_path)
    if given == "" and kept.startswith("{0}"):
        assert (tmp_path / "compilation_cache").stat().st_mode & 0o777 == 0o700


def test_an_installation_without_a_network_says_what_it_needs(host):
    """It takes the mirrors that it was told of, and its status is not 0."""
    shutil.copytree(ROOT / "docker", host.home / "t5x_diffeq" / "docker")
    host.tell("PIP_INDEX_URL=https://mirror/simple")
    for program in ("python3", "uv"):
        host.add(program, 'echo "no way to $PIP_INDEX_URL" >&2\nexit 1')
    (host.home / "t5x_diffeq_venv" / "bin" / "python").unlink()
    ended = host.run("install", status=1)
    assert "no way to https://mirror/simple" in ended
    assert "--internal_ips the network needs Cloud NAT" in ended


def test_what_was_stopped_stays_stopped(host):
    """Though it left no status, because it had to be killed, or a boot came before it had saved."""
    host.begin(0)
    assert host.wait() == "ended 0"
    (host.home / "t5x_diffeq_run" / "status").unlink()
    assert host.run("status") == "lost"
    assert host.run("stop") == "stopped 137"
    host.run("resume")
    assert len(host.trainings()) == 1


def test_goes_on_after_a_boot(host):
    """As the startup script does for each home; not what had ended, or was stopped."""
    stopped = host.home / "t5x_diffeq_run" / "stopped"
    host.add("runuser", 'shift 3\nexec "$@"')
    host.begin(42, 0)
    assert host.wait() == "ended 42"
    for number, sign in ((1, stopped.touch), (2, stopped.unlink), (2, lambda: None)):
        sign()
        host.run(script="tpu_boot.sh")
        host.wait()
        assert host.trainings() == [host.trainings()[0]] * number
    assert host.wait() == "ended 0"


OWNER, OTHER = "daemon", "nobody"  # of any system


@pytest.fixture
def homes():
    """A folder for homes that every user can enter, where `make` makes one for OWNER."""
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        folder.chmod(0o755)

        def make(name):
            home = folder / name
            (home / "t5x_diffeq" / "launch").mkdir(parents=True)
            (home / "t5x_diffeq_venv" / "bin").mkdir(parents=True)
            (home / "t5x_diffeq_venv" / "bin" / "python").symlink_to("/bin/true")
            script = home / "t5x_diffeq" / "launch" / "tpu_host.sh"
            script.write_text('echo "$(id -un) $HOME $*" >>"$HOME/ran"\n')
            for path in (home, *home.rglob("*")):
                os.lchown(path, pwd.getpwnam(OWNER).pw_uid, -1)
            return home

        yield folder, make


@pytest.mark.skipif(os.getuid() != 0, reason="only root can make files of other users")
def test_a_boot_runs_what_is_one_users_alone(homes):
    """As root does it, with real users: no link and no file of another user is followed."""
    folder, make = homes
    mine = make("mine")
    faults = {
        "linked copy": lambda home: replace_by_link(home / "t5x_diffeq", mine / "t5x_diffeq"),
        "linked launch": lambda home: replace_by_link(
            home / "t5x_diffeq" / "launch", mine / "t5x_diffeq" / "launch"
        ),
        "linked script": lambda home: replace_by_link(
            home / "t5x_diffeq" / "launch" / "tpu_host.sh",
            mine / "t5x_diffeq" / "launch" / "tpu_host.sh",
        ),
        "linked environment": lambda home: replace_by_link(
            home / "t5x_diffeq_venv", mine / "t5x_diffeq_venv"
        ),
        "home of another": lambda home: shutil.chown(home, OTHER),
        "copy of another": lambda home: shutil.chown(home / "t5x_diffeq", OTHER),
        "script of root": lambda home: shutil.chown(
            home / "t5x_diffeq" / "launch" / "tpu_host.sh", "root"
        ),
        "python of another": lambda home: replace_by_link(
            home / "t5x_diffeq_venv" / "bin" / "python", program_of(OTHER, folder / "program")
        ),
        "open to everybody": lambda home: (home / "t5x_diffeq" / "launch").chmod(0o777),
    }
    for name, spoil in faults.items():
        spoil(make(name))
    replace_by_link(make("linked home"), mine)
    given = {**os.environ, "HOMES": str(folder)}
    ended = run_to_end(["bash", ROOT / "launch" / "tpu_boot.sh"], env=given, check=True)
    assert (mine / "ran").read_text() == f"{OWNER} {mine} resume\n"
    assert list(folder.rglob("ran")) == [mine / "ran"]
    assert ended.stderr.count("not one user's; left alone") == len(faults) + 1


def replace_by_link(path, target):
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink()
    path.symlink_to(target)
    os.lchown(path, pwd.getpwnam(OWNER).pw_uid, -1)


def program_of(user, path):
    path.write_text("")
    shutil.chown(path, user)
    return path


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
def test_a_boot_goes_on_with_the_next_home(homes):
    folder, make = homes
    (make("a") / "t5x_diffeq" / "launch" / "tpu_host.sh").write_text("exit 1\n")
    b = make("b")
    given = {**os.environ, "HOMES": str(folder)}
    ended = run_to_end(["bash", ROOT / "launch" / "tpu_boot.sh"], env=given, check=True)
    assert (b / "ran").exists() and "could not resume its run" in ended.stderr


def test_what_ends_before_the_training_leaves_a_status(host):
    """A secret that can't be read: status 2, not a host that was lost, which is installed again."""
    host.tell("T5X_DIFFEQ_SECRETS=TOKEN=its-name")
    host.add("gcloud", "exit 1")
    host.begin()
    assert host.wait() == "ended 2"
    assert ": ended 2 | error: the secret its-name (--secret=TOKEN=its-name)" in host.run("report")


def test_the_log_does_not_begin_again_with_gclouds_next_try(host):
    host.begin(0)
    assert host.wait() == "ended 0"
    lines = [f"step {number}" for number in range(100)]
    (host.home / "t5x_diffeq_run" / "log").write_text("\n".join(lines) + "\n")
    for name, shown in (("a", lines), ("a", lines[-20:]), ("b", lines)):
        assert host.run("follow", "+1", name).splitlines() == shown


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
