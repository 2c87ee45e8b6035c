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
from typing import TypeVar

import jax
import numpy as np
from jax._src.clusters import ClusterEnv
from jax.experimental import multihost_utils

from t5x_diffeq.runtime import tpu_hosts
from t5x_diffeq.runtime.agreement import Agreement
from t5x_diffeq.runtime.errors import InputError, MachineryError
from t5x_diffeq.runtime.peers import Peers, relayed

DEFAULT_PORT = 8476
ALL_HERE = b"all are here"
ARRIVAL_SECONDS = 300  # for all processes to arrive; T5X_DIFFEQ_ARRIVAL_SECONDS changes it
Result = TypeVar("Result")
peers: Peers | None = None  # this process's connections, if there are several processes
agreement: Agreement | None = None  # likewise


@dataclass(frozen=True)
class Place:
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
    global peers, agreement
    place = found_place(os.environ)
    if place is None:
        return
    spare_stdout()
    seconds = float(os.environ.get("T5X_DIFFEQ_ARRIVAL_SECONDS", ARRIVAL_SECONDS))
    peers = Peers(place.index, place.count, meet(place, seconds))
    agreement = Agreement(peers)
    coordinator = place.coordinator if place.index == 0 else relayed(place.coordinator)
    jax.config.update("jax_enable_preemption_service", False)  # `agreement` replaces it
    try:
        jax.distributed.initialize(
            coordinator,
            place.count,
            place.index,
            place.devices,
            heartbeat_timeout_seconds=round(10 * peers.silence),  # ours must fire first
        )
    except (ValueError, RuntimeError) as error:
        raise MachineryError(
            f"the processes found through {cluster_in(os.environ) or place} could not join: "
            f"{error}; set JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and JAX_PROCESS_ID instead"
        ) from error


def found_place(environment: Mapping[str, str]) -> Place | None:
    """The place of this process among several; None if it is alone.

    Raises:
      InputError: if the environment gives only part of what is needed.
    """
    place = place_in(environment)
    if place is None and (told := tpu_hosts.place(environment)):
        return Place(*told)
    if place is None and cluster_in(environment):
        unset = (None, None, None, None, None)
        found = ClusterEnv.auto_detect_unset_distributed_params(*unset, ARRIVAL_SECONDS)
        return Place(*found)  # type: ignore[arg-type]  # in a cluster JAX finds all values
    return place


def spare_stdout() -> None:
    """Keeps standard output for results: Gloo's messages are discarded."""
    results = os.fdopen(os.dup(1), "w", buffering=1)
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), 1)
    sys.stdout = results


def place_in(environment: Mapping[str, str]) -> Place | None:
    """The place that the JAX_ variables give, or None if they name no coordinator.

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
    told = cluster_in(environment) or tpu_hosts.is_told(environment)
    if told and all(value is None for value in values.values()):
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
    port = environment.get("JAX_COORDINATOR_PORT") or str(DEFAULT_PORT)
    return Place(address if ":" in address else f"{address}:{port}", count, index)


def cluster_in(environment: Mapping[str, str]) -> str | None:
    """The kind of cluster, if this is one whose processes JAX can find by itself."""
    if int(environment.get("SLURM_STEP_NUM_TASKS") or 1) > 1:
        return "SLURM"
    if int(environment.get("OMPI_COMM_WORLD_SIZE") or 1) > 1:
        return "Open MPI"
    return None


def meet(place: Place, seconds: float) -> dict[int, socket.socket]:
    """Returns when all processes have called it, with the open connections of this one.

    JAX's own service ends a process whose peers don't arrive without naming them. So process 0
    listens on the coordinator's port before that service does.

    Raises:
      MachineryError: if a process did not arrive within `seconds`; names it.
    """
    host, _, port = place.coordinator.rpartition(":")
    deadline = time.monotonic() + seconds
    if place.index == 0:
        return receive(place, int(port), deadline, seconds)
    return {0: report_to(host.strip("[]"), int(port), place, deadline, seconds)}


def receive(place: Place, port: int, deadline: float, seconds: float) -> dict[int, socket.socket]:
    """Process 0's part: waits for each of the others to send its number."""
    arrived: dict[int, socket.socket] = {}
    with listening(port, place.count, deadline) as server:
        while len(arrived) < place.count - 1:
            server.settimeout(max(deadline - time.monotonic(), 0.001))
            try:
                connection, _ = server.accept()
                connection.settimeout(5)
                number = int(connection.recv(16))
                if number in range(1, place.count):
                    arrived[number] = connection
            except (TimeoutError, ValueError, OSError) as error:
                if time.monotonic() < deadline:
                    continue
                absent = sorted(set(range(1, place.count)) - arrived.keys())
                raise MachineryError(
                    f"of {place.count} processes, {', '.join(map(str, absent))} did not arrive "
                    f"within {seconds:.0f} s; see their logs, or whether they can reach "
                    f"{place.coordinator}"
                ) from error
    for connection in arrived.values():
        connection.sendall(ALL_HERE)
    return arrived


def listening(port: int, count: int, deadline: float) -> socket.socket:
    """A socket that listens on the port; waits if an earlier run still holds the port.

    Raises:
      MachineryError: if the port isn't free in time.
    """
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


def report_to(host: str, port: int, place: Place, deadline: float, seconds: float) -> socket.socket:
    """The other processes' part: sends its number to process 0, and waits for the reply."""
    while time.monotonic() < deadline:
        try:
            connection = socket.create_connection((host, port), timeout=5)
            connection.sendall(str(place.index).encode())
            connection.settimeout(max(deadline - time.monotonic(), 0.001) + 5)
            if connection.recv(len(ALL_HERE)) == ALL_HERE:
                return connection
        except OSError:
            pass
        time.sleep(0.2)  # process 0 isn't up yet, or this is the service of a run that is ending
    raise MachineryError(
        f"process {place.index} did not hear from process 0 at {place.coordinator} within "
        f"{seconds:.0f} s; see its log, or whether that address can be reached from here"
    )


def are_several() -> bool:
    """Whether this is one process of several."""
    return jax.process_count() > 1


def wait_for_all(what: str) -> None:
    """Returns when all processes have reached `what`."""
    if are_several():
        multihost_utils.sync_global_devices(what)


def first_told(text: str | None) -> str | None:
    """The text of the first process that has one, on all processes; None if none has."""
    if not are_several():
        return text
    letters = np.zeros(512, np.uint8)
    encoded = (text or "").encode()[: letters.size]
    letters[: len(encoded)] = np.frombuffer(encoded, np.uint8)
    rows = multihost_utils.process_allgather(letters)
    texts = (bytes(row).rstrip(b"\0").decode(errors="replace") for row in rows)
    return next(filter(None, texts), None)


def first_then_others(work: Callable[[bool], Result], what: str) -> Result:
    """The result of `work(is_first)`, which runs on process 0 first, then on the others."""
    if jax.process_index() != 0:
        wait_for_all(what)
        return work(False)
    result = work(True)
    wait_for_all(what)
    return result
