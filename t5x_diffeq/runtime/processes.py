"""Several processes as one run: how they find each other, and which one does work done once.

Processes are found, in this order, from

    JAX_COORDINATOR_ADDRESS (host, or host:port with JAX_COORDINATOR_PORT for the port),
    JAX_NUM_PROCESSES, and JAX_PROCESS_ID or a Kubernetes indexed job's JOB_COMPLETION_INDEX
    TPU machines: GKE's variables or Cloud TPU's metadata (tpu_hosts.py)
    SLURM (under `srun`) and Open MPI, as JAX detects them
"""

import os
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import jax
from jax._src.clusters import ClusterEnv

from t5x_diffeq.runtime import tpu_hosts
from t5x_diffeq.runtime.agreement import Agreement
from t5x_diffeq.runtime.errors import InputError, MachineryError
from t5x_diffeq.runtime.gathering import Gathering
from t5x_diffeq.runtime.peers import Peers, start_relay

_DEFAULT_PORT = 8476
_ALL_HERE = b"all are here"
_ARRIVAL_SECONDS = 300  # for all processes to arrive; T5X_DIFFEQ_ARRIVAL_SECONDS changes it
Result = TypeVar("Result")
peers: Peers | None = None  # this process's connections, if there are several processes
gathering: Gathering | None = None  # likewise
agreement: Agreement | None = None  # likewise


@dataclass(frozen=True)
class Rank:
    """What identifies one process among all.

    Attributes:
      coordinator: process 0's `host:port`.
      count: the number of processes.
      index: the number of this process.
      devices: the local devices of this process; None: those that JAX finds.
    """

    coordinator: str
    count: int
    index: int
    devices: Sequence[int] | None = None


def initialise() -> None:
    """Joins the processes of this run; does nothing if there is only one.

    Raises:
      InputError: if the environment gives only part of what is needed.
      MachineryError: if processes did not arrive in time; names them.
    """
    global peers, gathering, agreement
    rank = _find_rank(os.environ)
    if rank is None:
        return
    _reserve_stdout()
    seconds = float(os.environ.get("T5X_DIFFEQ_ARRIVAL_SECONDS", _ARRIVAL_SECONDS))
    peers = Peers(rank.index, rank.count, _meet(rank, seconds))
    gathering = Gathering(peers)
    agreement = Agreement(peers)  # which begins to listen
    coordinator = rank.coordinator if rank.index == 0 else start_relay(rank.coordinator)
    jax.config.update("jax_enable_preemption_service", False)  # `agreement` replaces it
    try:
        jax.distributed.initialize(
            coordinator,
            rank.count,
            rank.index,
            rank.devices,
            heartbeat_timeout_seconds=round(10 * peers.silence),  # ours must fire first
        )
    except (ValueError, RuntimeError) as error:
        raise MachineryError(
            f"the processes found through {cluster_in(os.environ) or rank} could not join: "
            f"{error}; set JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and JAX_PROCESS_ID instead"
        ) from error


def _find_rank(environment: Mapping[str, str]) -> Rank | None:
    """The rank of this process among several; None if it is alone."""
    rank = rank_in(environment)
    if rank is None and (of_tpu := tpu_hosts.host_rank(environment)):
        return Rank(*of_tpu)
    if rank is None and cluster_in(environment):
        unset = (None, None, None, None, None)
        found = ClusterEnv.auto_detect_unset_distributed_params(*unset, _ARRIVAL_SECONDS)
        return Rank(*found)  # type: ignore[arg-type]  # in a cluster JAX finds all values
    return rank


def _reserve_stdout() -> None:
    """Keeps standard output for results: Gloo's messages are discarded."""
    results = os.fdopen(os.dup(1), "w", buffering=1)
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), 1)
    sys.stdout = results


def rank_in(environment: Mapping[str, str]) -> Rank | None:
    """The rank that the JAX_ variables give, or None if they name no coordinator.

    Raises:
      InputError: if they name one, and the others are missing or invalid.
    """
    address = environment.get("JAX_COORDINATOR_ADDRESS")
    if not address:
        return None
    values = {
        "JAX_NUM_PROCESSES": environment.get("JAX_NUM_PROCESSES"),
        "JAX_PROCESS_ID": environment.get("JAX_PROCESS_ID")
        or environment.get("JOB_COMPLETION_INDEX"),
    }
    has_cluster = cluster_in(environment) or tpu_hosts.lists_hosts(environment)
    if has_cluster and all(value is None for value in values.values()):
        return None  # the cluster gives the others
    numbers = []
    for name, value in values.items():
        if value is None or not value.isdecimal():
            raise InputError(
                f"JAX_COORDINATOR_ADDRESS={address} is set, and {name} is {value!r}; set it to a "
                "number, or unset the address to run alone"
            )
        numbers.append(int(value))
    count, index = numbers
    if index >= count:
        raise InputError(f"JAX_PROCESS_ID={index} must be less than JAX_NUM_PROCESSES={count}")
    port = environment.get("JAX_COORDINATOR_PORT") or str(_DEFAULT_PORT)
    return Rank(address if ":" in address else f"{address}:{port}", count, index)


def cluster_in(environment: Mapping[str, str]) -> str | None:
    """The kind of cluster, if this is one whose processes JAX can find by itself."""
    if int(environment.get("SLURM_STEP_NUM_TASKS") or 1) > 1:
        return "SLURM"
    if int(environment.get("OMPI_COMM_WORLD_SIZE") or 1) > 1:
        return "Open MPI"
    return None


def _meet(rank: Rank, seconds: float) -> dict[int, socket.socket]:
    """Returns when all processes have called it, with the open connections of this one.

    JAX's own service ends a process whose peers don't arrive without naming them. So process 0
    listens on the coordinator's port before that service does.
    """
    host, _, port = rank.coordinator.rpartition(":")
    deadline = time.monotonic() + seconds
    if rank.index == 0:
        return _receive_ranks(rank, int(port), deadline, seconds)
    return {0: _report_to(host.strip("[]"), int(port), rank, deadline, seconds)}


def _receive_ranks(
    rank: Rank, port: int, deadline: float, seconds: float
) -> dict[int, socket.socket]:
    """Process 0's part: waits for each of the others to send its number."""
    arrived: dict[int, socket.socket] = {}
    with _listen_on(port, rank.count, deadline) as server:
        while len(arrived) < rank.count - 1:
            server.settimeout(max(deadline - time.monotonic(), 0.001))
            try:
                connection, _ = server.accept()
                connection.settimeout(5)
                number = int(connection.recv(16))
                if number in range(1, rank.count):
                    arrived[number] = connection
            except (TimeoutError, ValueError, OSError) as error:
                if time.monotonic() < deadline:
                    continue
                absent = sorted(set(range(1, rank.count)) - arrived.keys())
                raise MachineryError(
                    f"of {rank.count} processes, {', '.join(map(str, absent))} did not arrive "
                    f"within {seconds:.0f} s; see their logs, or whether they can reach "
                    f"{rank.coordinator}"
                ) from error
    for connection in arrived.values():
        connection.sendall(_ALL_HERE)
    return arrived


def _listen_on(port: int, count: int, deadline: float) -> socket.socket:
    """A socket that listens on the port; waits if an earlier run still holds the port."""
    while True:
        try:
            return socket.create_server(("", port), backlog=count)
        except OSError as error:
            if time.monotonic() < deadline:
                time.sleep(0.5)
                continue
            raise MachineryError(
                f"process 0 can't listen on port {port}: {error.strerror}; set "
                "JAX_COORDINATOR_PORT (or the port in JAX_COORDINATOR_ADDRESS) to a free one, for "
                "all processes"
            ) from error


def _report_to(host: str, port: int, rank: Rank, deadline: float, seconds: float) -> socket.socket:
    """The other processes' part: sends its number to process 0, and waits for the reply."""
    while time.monotonic() < deadline:
        try:
            connection = socket.create_connection((host, port), timeout=5)
            connection.sendall(str(rank.index).encode())
            connection.settimeout(max(deadline - time.monotonic(), 0.001) + 5)
            if connection.recv(len(_ALL_HERE)) == _ALL_HERE:
                return connection
        except OSError:
            pass
        time.sleep(0.2)  # process 0 isn't up yet, or this is the service of a run that is ending
    raise MachineryError(
        f"process {rank.index} did not hear from process 0 at {rank.coordinator} within "
        f"{seconds:.0f} s; see its log, or whether that address can be reached from here"
    )


def are_several() -> bool:
    """Whether this is one process of several."""
    return jax.process_count() > 1


def gather(purpose: str, value: Any) -> list:
    """The values of all processes, in their order; every process must call it.

    It may wait for hours: the devices take no part in it (see `gathering`).

    Args:
      purpose: what they are for; the same on all processes.
      value: anything that JSON can hold.
    """
    if not are_several():
        return [value]
    assert gathering, "the processes were joined by something else than `initialise`"
    return gathering.gather(purpose, value)


def wait_for_all(what: str) -> None:
    """Returns when all processes have reached `what`, however long that takes."""
    gather(what, None)


def run_in_turn(work: Callable[[bool], Result], what: str) -> Result:
    """The result of `work(is_first)`, which runs on process 0 first, then on the others.

    It returns when all are done, so that none waits for another in a collective of the devices.
    """
    is_first = jax.process_index() == 0
    if is_first:
        result = work(True)
    wait_for_all(f"{what}, by process 0")
    if not is_first:
        result = work(False)
    wait_for_all(f"{what}, by all")
    return result
