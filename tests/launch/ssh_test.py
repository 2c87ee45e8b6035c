"""launch/gpu_nodes.sh over real ssh: two hosts, which are two sshd on this machine."""

import getpass
import os
import shutil
import signal
import tempfile
from pathlib import Path

import pytest
from launched_run import LaunchedRun, steps_after_stops, wait_for_text
from patience import wait_for
from slurm_cluster import free_ports
from ssh_server import SSHD, SshServer, make_key

NAMES = ("one", "two")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.in_turns,
    pytest.mark.skipif(not SSHD, reason="no sshd here: apt-get install openssh-server"),
]
CLIENT = """
Host *
  HostName 127.0.0.1
  User {user}
  IdentityFile {folder}/key
  IdentitiesOnly yes
  StrictHostKeyChecking no
  UserKnownHostsFile {folder}/known_hosts
  LogLevel ERROR
"""


class Hosts:
    """Use as a context: two sshd of our own, with a key and ports of their own."""

    def __enter__(self) -> "Hosts":
        self.folder = Path(tempfile.mkdtemp(prefix="sshd-"))
        make_key(self.folder / "key")
        keys = self.folder / "key.pub"
        self.servers = {name: SshServer(self.folder / name, keys) for name in NAMES}
        for server in self.servers.values():
            server.start()
        self.config = self.folder / "ssh_config"
        ports = "".join(
            f"Host {name}\n  Port {server.port}\n" for name, server in self.servers.items()
        )
        self.config.write_text(ports + CLIENT.format(folder=self.folder, user=getpass.getuser()))
        return self

    def start(self, name: str) -> None:
        """The host is there, and can be reached."""
        self.servers[name].start()

    def end(self, name: str) -> None:
        """Takes the host away."""
        self.servers[name].end()

    def __exit__(self, *exception: object) -> None:
        for name in NAMES:
            self.end(name)
        shutil.rmtree(self.folder)


@pytest.fixture(scope="module")
def hosts():
    with Hosts() as hosts:
        yield hosts


class NodesRun:
    """gpu_nodes.sh, and what it says."""

    def __init__(self, hosts: Hosts, run: LaunchedRun):
        self.log_file = run.folder / "log"
        (port,) = free_ports(1)
        place = [f"--hosts={','.join(NAMES)}", f"--ssh_config={hosts.config}"]
        place += ["--coordinator=127.0.0.1", f"--port={port}", f"--env=VENV={run.installed_at}"]
        self.process = run.launch("gpu_nodes.sh", *run.words, *place, log=self.log_file)

    def wait_for_text(self, text: str, after: str = "") -> None:
        """Returns when it has said so, after it said something else."""
        wait_for_text(self.process, self.log_file, text, after)

    def log(self) -> str:
        return self.log_file.read_text()


def test_interrupted_again_and_again(hosts, tmp_path):
    """By Ctrl-C, by a process that fails, by SIGTERM to one, and by a host that is away."""
    run = LaunchedRun(tmp_path / "user")
    run.set(seconds=0.5)
    launched = NodesRun(hosts, run)
    wait_for(lambda: run.step() >= 3)
    launched.process.send_signal(signal.SIGINT)
    assert launched.process.wait() == 42, launched.log()
    assert "2 x cpu, 2 process(es)" in launched.log()
    assert "stopping: all save" in launched.log()
    assert not run.processes()
    saved = run.step()
    assert steps_after_stops(launched.log()) == ([saved], [])

    run.set(fault=f"{saved + 3} 1 175")
    launched = NodesRun(hosts, run)
    # The process that fails may do so before the other reports its first step.
    failed = "status 175: starting again (1 of at most 100)"
    launched.wait_for_text("first step done", after=failed)
    os.kill(run.processes()[1], signal.SIGTERM)
    stopped = "status 42: starting again (2 of at most 100)"
    launched.wait_for_text("first step done", after=stopped)
    hosts.end("two")
    launched.wait_for_text("process 1: ssh to two failed or broke off")
    launched.wait_for_text("status 255: starting again")
    hosts.start("two")
    run.set(seconds=0)
    assert launched.process.wait() == 0, launched.log()
    stopped, (first, *later) = steps_after_stops(launched.log())
    assert first == saved
    assert stopped and set(stopped) <= set(later)
    assert run.is_done()


def test_lost_process_and_failure(hosts, tmp_path):
    """Killed: started again. Failed: not, and what failed wins over what it did to the other."""
    run = LaunchedRun(tmp_path / "user")
    run.set(seconds=0.5)
    launched = NodesRun(hosts, run)
    wait_for(lambda: run.step() >= 3)
    os.kill(run.processes()[1], signal.SIGKILL)
    launched.wait_for_text("starting again (1 of at most 100)")
    assert "process 1 on two ended with status 137" in launched.log()
    run.set(fault="1 0 1")
    assert launched.process.wait() == 1
    assert "error: the run ended with status 1; the lines above say why" in launched.log()
