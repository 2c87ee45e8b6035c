"""A Cloud TPU of two hosts, for the real `gcloud`: Google's APIs are `tpu_api.py`, hosts are sshd.

Each host has a home, a metadata server and an environment of its own; all is in one folder. The
hosts' addresses are of a network that is reserved for documentation. `ssh` and `scp` take them for
ports of this machine, and note their arguments. The pauses of `gcloud` between its tries are a
tenth as long.
"""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import psutil
from launched_run import launch, wait_for_text
from patience import patience
from slurm_cluster import free_ports
from ssh_server import SSHD, SshServer
from stand_ins import add_python, clean_environment, mark_installed
from tpu_api import PROJECT, TpuApi
from tpu_metadata import serving_metadata

ADDRESSES = ["203.0.113.10", "203.0.113.11"]
SECRETS = {"its-name": "it's $(secret)"}
APIS = {"TPU": "", "COMPUTE": "compute/v1/", "SECRETMANAGER": "", "OSLOGIN": ""}
# What a login runs: the command in the host's home, or the server of scp.
LOGIN = """
ForceCommand cd && eval "$SSH_ORIGINAL_COMMAND"
Subsystem sftp /usr/lib/openssh/sftp-server
"""
CLIENT = """#!/bin/sh
printf '%s\\n' "{name} $*" >>{folder}/ssh_calls
exec {program} -F {folder}/ssh_config "$@"
"""
GCLOUD = """#!/bin/sh
PYTHONPATH={folder}/shorter exec {program} "$@"
"""
SHORTER_PAUSES = """import time

pause = time.sleep
time.sleep = lambda seconds: pause(seconds / 10)
"""


def find_missing() -> str:
    """Why there can be none on this machine; empty if there can."""
    if not shutil.which("gcloud"):
        return "no gcloud here: it is of Google's own package repository"
    if not SSHD or not shutil.which("ssh-agent"):
        return "no sshd here: apt-get install openssh-server openssh-client"
    return "" if os.getuid() == 0 else "hosts of their own home need root"


class Host:
    """One machine of the TPU."""

    def __init__(self, folder: Path, number: int, variables: dict[str, str]):
        self.home = folder / f"host{number}"
        own = {**variables, "HOME": self.home, "CLOUDSDK_CONFIG": self.home / "gcloud"}
        own["PATH"] = f"{folder}/bin:{os.environ['PATH']}"
        told = " ".join(f'"{name}={value}"' for name, value in own.items())
        more = f"{LOGIN}SetEnv {told}\n"
        self.server = SshServer(folder / f"sshd{number}", folder / "authorized_keys", more)

    def begin(self, before: str) -> None:
        """The machine is new; its Python environment is made, and runs lines of shell before."""
        shutil.rmtree(self.home, ignore_errors=True)
        venv = self.home / "t5x_diffeq_venv"
        add_python(venv, before)
        mark_installed(venv, ("tpu,data,gcs,trackers",), project=self.home / "t5x_diffeq")
        self.server.start()

    def processes(self, word: str = "") -> list[psutil.Process]:
        """The host's processes, but for sshd, that have the word in their command."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if process.environ().get("HOME") == str(self.home):
                    found += [process] if word in " ".join(process.cmdline()) else []
        return found

    def end(self) -> None:
        """The machine is taken away, with all that runs on it."""
        self.server.end()
        while processes := self.processes():
            for process in processes:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()


class CloudTpu:
    """Use as a context: Google's APIs, and the environment of `gcloud`. Its hosts begin later."""

    def __init__(self, folder: Path):
        self.folder = folder
        (folder / "bin").mkdir(parents=True)
        (folder / "shorter").mkdir()
        (folder / "shorter" / "sitecustomize.py").write_text(SHORTER_PAUSES)
        for name, text in (("ssh", CLIENT), ("scp", CLIENT), ("gcloud", GCLOUD)):
            program = folder / "bin" / name
            program.write_text(text.format(name=name, folder=folder, program=shutil.which(name)))
            program.chmod(0o755)
        (folder / "bin" / "uv").symlink_to(Path(sys.executable).parent / "uv")

    def __enter__(self) -> "CloudTpu":
        self.stack = contextlib.ExitStack()
        keys = self.folder / "authorized_keys"
        self.api = self.stack.enter_context(TpuApi(ADDRESSES, keys, SECRETS))
        (port,) = free_ports(1)
        self.hosts = []
        for number in range(len(ADDRESSES)):
            metadata = self.stack.enter_context(serving_metadata(number, "localhost,localhost"))
            own = {"GCE_METADATA_IP": metadata, "JAX_COORDINATOR_PORT": port}
            self.hosts.append(Host(self.folder, number, {**self.variables(), **own}))
        lines = [
            f"Host {address}\n  HostName 127.0.0.1\n  Port {host.server.port}\n  LogLevel ERROR\n"
            for address, host in zip(ADDRESSES, self.hosts, strict=True)
        ]
        (self.folder / "ssh_config").write_text("".join(lines))
        return self

    def __exit__(self, *exception: object) -> None:
        self.stack.close()

    def begin_hosts(self, before: str) -> None:
        """The hosts are new machines, which know nobody's key yet."""
        (self.folder / "authorized_keys").unlink(missing_ok=True)
        for host in self.hosts:
            self.stack.callback(host.end)
            host.begin(before)

    def preempt(self, name: str) -> None:
        """Google takes the TPU away, and its hosts."""
        self.api.take_away(name)
        for host in self.hosts:
            host.end()

    def configure(self, name: str, value: str) -> None:
        """The user sets one of the properties of `gcloud`."""
        command = [self.folder / "bin" / "gcloud", "config", "set", name, value]
        subprocess.run(command, env=self.environment(), check=True, capture_output=True)

    def launch(self, *words: str, cwd: Path | None = None, **more: str) -> "Launched":
        """A user calls launch/tpu_pod.sh."""
        log = self.folder / f"log{len(list(self.folder.glob('log*')))}"
        environment = {**self.environment(), **more}
        process = launch("tpu_pod.sh", *words, log=log, cwd=cwd or self.folder, env=environment)
        launched = Launched(process, log)
        self.stack.callback(launched.kill)
        return launched

    def run(self, *words: str, **more: str) -> "Launched":
        """`launch` that waits for the end."""
        launched = self.launch(*words, **more)
        launched.wait()
        return launched

    def variables(self) -> dict[str, str]:
        """`gcloud` is told a token, a project, and where the APIs are."""
        apis = {
            f"CLOUDSDK_API_ENDPOINT_OVERRIDES_{name}": f"{self.api.address}{path}"
            for name, path in APIS.items()
        }
        return {
            **apis,
            "CLOUDSDK_AUTH_ACCESS_TOKEN": "none",
            "CLOUDSDK_CORE_PROJECT": PROJECT,
            "CLOUDSDK_CORE_DISABLE_USAGE_REPORTING": "1",
            "CLOUDSDK_COMPONENT_MANAGER_DISABLE_UPDATE_CHECK": "1",
            "NO_GCE_CHECK": "true",
            "LAUNCH_POLL_SECONDS": "0.2",
        }

    def environment(self) -> dict[str, str]:
        """The user's variables; no proxy and no agent is inherited."""
        inherited = {
            name: value
            for name, value in clean_environment().items()
            if not name.lower().endswith("_proxy") and name != "SSH_AUTH_SOCK"
        }
        return {
            **inherited,
            **self.variables(),
            "HOME": str(self.folder / "user"),
            "CLOUDSDK_CONFIG": str(self.folder / "user" / "gcloud"),
            "PATH": f"{self.folder}/bin:{os.environ['PATH']}",
        }

    def ssh_calls(self) -> list[str]:
        """The arguments that `gcloud` gave to `ssh` and `scp`, in order."""
        return (self.folder / "ssh_calls").read_text().splitlines()


class Launched:
    """The script in a process group of its own, and what it says."""

    def __init__(self, process: subprocess.Popen, log: Path):
        self.process, self.log_file = process, log

    def wait(self) -> int:
        """Its exit status."""
        return self.process.wait(timeout=patience(300))

    def log(self) -> str:
        """What it has said so far."""
        return self.log_file.read_text()

    def wait_for_text(self, text: str, after: str = "") -> None:
        """Returns when it has said so, after it said something else."""
        wait_for_text(self.process, self.log_file, text, after)

    def interrupt(self) -> None:
        """The terminal sends Ctrl-C to all that the script started."""
        os.killpg(self.process.pid, signal.SIGINT)

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
