"""A real sshd on a port of its own of this machine."""

import contextlib
import os
import shutil
import socket
import subprocess
import time
from pathlib import Path

import psutil
from patience import patience
from slurm_cluster import free_ports, path

SSHD = shutil.which("sshd", path=path())
CONFIGURATION = """
Port {port}
ListenAddress 127.0.0.1
HostKey {folder}/host_key
AuthorizedKeysFile {keys}
PidFile none
StrictModes no
UsePAM no
PermitRootLogin yes
PasswordAuthentication no
"""


def make_key(file: Path) -> None:
    """A pair of keys, without a passphrase."""
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", file], check=True)


class SshServer:
    """A host that lets these keys in; `more` is added to its configuration."""

    def __init__(self, folder: Path, authorized_keys: Path, more: str = ""):
        self.folder = folder
        self.process: subprocess.Popen | None = None
        folder.mkdir()
        make_key(folder / "host_key")
        (self.port,) = free_ports(1)
        own = CONFIGURATION.format(port=self.port, folder=folder, keys=authorized_keys)
        (folder / "configuration").write_text(own + more)

    def start(self) -> None:
        """The host is there, and can be reached."""
        if os.getuid() == 0:
            Path("/run/sshd").mkdir(exist_ok=True)  # sshd does not start without
        command = [SSHD, "-D", "-e", "-f", self.folder / "configuration"]
        with open(self.folder / "log", "ab") as log:
            self.process = subprocess.Popen(command, stderr=log, start_new_session=True)
        deadline = time.monotonic() + patience(60)
        while not self.answers():
            assert self.process.poll() is None, (self.folder / "log").read_text()
            assert time.monotonic() < deadline
            time.sleep(0.1)

    def answers(self) -> bool:
        """Whether it greets."""
        with (
            contextlib.suppress(OSError),
            socket.create_connection(("127.0.0.1", self.port), 10) as connection,
        ):
            return connection.recv(4) == b"SSH-"
        return False

    def end(self) -> None:
        """Takes the host away: its sshd, and every connection to it."""
        if self.process is None or self.process.poll() is not None:
            return
        connections = psutil.Process(self.process.pid).children()
        self.process.kill()
        self.process.wait()
        for connection in connections:
            with contextlib.suppress(psutil.NoSuchProcess):
                connection.kill()
