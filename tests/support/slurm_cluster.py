"""A real SLURM cluster of two nodes on this machine, beside any other, for as long as it is used.

Its munged, slurmctld and slurmd come from Debian's packages; key, socket, ports and folders are its
own. Each node has two GPUs that exist in the configuration alone.
"""

import os
import shutil
import socket
import subprocess
import tempfile
import time
from pathlib import Path

import pytest
from patience import patience

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol", "squeue")
PACKAGES = "munge slurmctld slurmd slurm-client"
# The partitions differ in how they are preempted by `urgent`: at once, or with time to save. A job
# that was requeued waits until its old credentials have expired (cred_expire).
CONFIGURATION = """
ClusterName=test
FirstJobId={first_job}
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/affinity
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
GresTypes=gpu
KillOnBadExit=1
KillWait=10
MpiDefault=none
ReturnToService=2
SchedulerParameters=sched_interval=2
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
NodeName={host},{host}-b NodeAddr=127.0.0.1 NodeHostname=localhost Port={ports[1]},{ports[2]} \
CPUs={cpus} RealMemory=2000 Gres=gpu:toy:2
PartitionName=main Nodes=ALL Default=YES
PartitionName=graceful Nodes=ALL GraceTime=30
PartitionName=urgent Nodes=ALL PriorityTier=9 PreemptMode=OFF
"""


def find_missing() -> str:
    """Why a cluster can't be had on this machine; empty if it can."""
    absent = [program for program in PROGRAMS if not shutil.which(program, path=path())]
    if absent:
        return f"no SLURM here ({', '.join(absent)}): apt-get install {PACKAGES}"
    try:
        socket.gethostbyname(socket.gethostname())
    except OSError:
        return f"this machine's name, {socket.gethostname()}, has no address"
    return ""


def path() -> str:
    """PATH, and where Debian has the daemons."""
    return f"{os.environ['PATH']}:/usr/sbin"


def free_ports(count: int) -> list[int]:
    """So many TCP ports that nobody listens on."""
    servers = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [server.getsockname()[1] for server in servers]
    for server in servers:
        server.close()
    return ports


class Cluster:
    """Use as a context: the daemons run inside it."""

    def __enter__(self) -> "Cluster":
        self.folder = Path(tempfile.mkdtemp(prefix="slurm-"))  # short: a socket's path must be
        self.environment = {"SLURM_CONF": str(self.folder / "slurm.conf"), "PATH": path()}
        self.host = socket.gethostname().split(".")[0]
        user = subprocess.run(["id", "-un"], capture_output=True, text=True, check=True)
        (self.folder / "slurm.conf").write_text(
            CONFIGURATION.format(
                host=self.host,
                first_job=os.getpid() * 37 % 60000 + 1,
                ports=free_ports(3),
                user=user.stdout.strip(),
                folder=self.folder,
                cpus=max(2, os.cpu_count()),
            )
        )
        for gpu in ("gpu0", "gpu1"):
            (self.folder / gpu).touch()
        (self.folder / "gres.conf").write_text(f"Name=gpu Type=toy File={self.folder}/gpu[0-1]\n")
        (self.folder / "key").write_bytes(os.urandom(1024))
        (self.folder / "key").chmod(0o400)
        (self.folder / "state").mkdir()
        self.daemons = []
        own = {"key-file": "key", "socket": "munge.socket", "pid-file": "munge.pid"}
        own |= {"log-file": "munge.log", "seed-file": "munge.seed"}
        munged = [f"--{option}={self.folder / name}" for option, name in own.items()]
        self.start("munged", "--foreground", "--force", *munged)
        self.wait_until("munged", lambda: (self.folder / "munge.socket").exists())
        self.start("slurmctld", "-D", "-c")
        for node in (self.host, f"{self.host}-b"):
            (self.folder / f"spool-{node}").mkdir()
            self.start("slurmd", "-D", "-N", node)
        self.wait_until("both nodes", lambda: self._say("sinfo", "-hNo%T")[1].count("idle") >= 2)
        return self

    def __exit__(self, *exception: object) -> None:
        try:
            self.ask("scancel", "--user", str(os.getuid()))
            self.wait_until("no job", lambda: not self.ask("squeue", "--noheader"))
        finally:
            for daemon in reversed(self.daemons):
                daemon.terminate()
                daemon.wait(timeout=patience(30))
            shutil.rmtree(self.folder, ignore_errors=True)

    def start(self, program: str, *arguments: str) -> None:
        """Starts a daemon."""
        with open(self.folder / "daemons.log", "ab") as log:
            self.daemons.append(
                subprocess.Popen(
                    [shutil.which(program, path=path()), *arguments],
                    env={**os.environ, **self.environment},
                    stdout=log,
                    stderr=log,
                )
            )

    def ask(self, *command: str) -> str:
        """What a client program says, which ends well."""
        status, said = self._say(*command)
        assert status == 0, f"{' '.join(command)}: {said}"
        return said

    def _say(self, *command: str) -> tuple[int, str]:
        environment = {**os.environ, **self.environment}
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        return done.returncode, done.stdout + done.stderr

    def wait_until(self, what: str, is_so, seconds: float = 600) -> None:
        """Waits for it; fails with the daemons' logs if it doesn't come."""
        deadline = time.monotonic() + patience(seconds)
        while not is_so():
            if time.monotonic() > deadline:
                logs = "\n".join(log.read_text()[-2000:] for log in self.folder.glob("*.log"))
                pytest.fail(f"waited {seconds:.0f} s in vain for {what}\n{logs}")
            time.sleep(0.2)

    def state(self, job: str) -> dict[str, str]:
        """The job as `scontrol show job` has it, by name of the field."""
        said = self.ask("scontrol", "--oneliner", "show", "job", job)
        return dict(field.split("=", 1) for field in said.split() if "=" in field)
