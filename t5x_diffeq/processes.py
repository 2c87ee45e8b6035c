"""Several processes as one run: how they find each other, and who does what is done once.

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
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeVar

import jax
from jax.experimental import multihost_utils

from t5x_diffeq import tpu_hosts
from t5x_diffeq.errors import InputError, RunError

DEFAULT_PORT = 8476
HEARTBEAT_SECONDS = 30  # after which the others give up on a process that died
ALL_HERE = b"all are here"
ARRIVAL_SECONDS = 300  # for all to be there; T5X_DIFFEQ_ARRIVAL_SECONDS changes it
Result = TypeVar("Result")


@dataclass(frozen=True)
class Place:
    """Where one process stands among all: the coordinator is process 0's `host:port`."""

    coordinator: str
    count: int
    index: int


def initialise() -> None:
    """Joins the processes of this run; nothing, if there is but one.

    Raises:
      InputError: if the environment says only half of what is needed.
      RunError: naming the processes that did not arrive in time.
    """
    place = place_in(os.environ)
    if place is None and (told := tpu_hosts.place(os.environ)):
        place = Place(*told)
    if place is not None:
        spare_stdout()
        meet(place, float(os.environ.get("T5X_DIFFEQ_ARRIVAL_SECONDS", ARRIVAL_SECONDS)))
        arguments = (place.coordinator, place.count, place.index)
    elif cluster_in(os.environ):
        spare_stdout()
        arguments = ()
    else:
        return
    try:
        jax.distributed.initialize(*arguments, heartbeat_timeout_seconds=HEARTBEAT_SECONDS)
    except (ValueError, RuntimeError) as error:
        raise RunError(
            f"the processes found through {cluster_in(os.environ) or place} could not join: "
            f"{error}; set JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and JAX_PROCESS_ID instead"
        ) from error


def spare_stdout() -> None:
    """Keeps standard output for results: Gloo's messages about itself go nowhere."""
    results = os.fdopen(os.dup(1), "w", buffering=1)
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), 1)
    sys.stdout = results


def place_in(environment: Mapping[str, str]) -> Place | None:
    """The place that the JAX_ variables give, or None if they name no coordinator.

    Raises:
      InputError: if they do, and the rest is missing or makes no sense.
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
        return None  # the cluster tells the rest
    for name, value in values.items():
        if value is None or not value.isdecimal():
            raise InputError(
                f"JAX_COORDINATOR_ADDRESS={address} is set, and {name} is {value!r}; set it to a "
                "number, or unset the address to run alone"
            )
    count, index = map(int, values.values())
    if index >= count:
        raise InputError(f"JAX_PROCESS_ID={index} must be less than JAX_NUM_PROCESSES={count}")
    port = environment.get("JAX_COORDINATOR_PORT") or str(DEFAULT_PORT)
    return Place(address if ":" in address else f"{address}:{port}", count, index)


def cluster_in(environment: Mapping[str, str]) -> str | None:
    """The kind of cluster that JAX can find the processes of by itself, if this is one."""
    if int(environment.get("SLURM_STEP_NUM_TASKS") or 1) > 1:
        return "SLURM"
    if int(environment.get("OMPI_COMM_WORLD_SIZE") or 1) > 1:
        return "Open MPI"
    return None


def meet(place: Place, seconds: float) -> None:
    """Returns when all processes have called it.

    JAX's own service ends a process that waits in vain without saying for whom. So process 0
    listens on the coordinator's port before that service does.

    Raises:
      RunError: naming who did not arrive within `seconds`.
    """
    host, _, port = place.coordinator.rpartition(":")
    deadline = time.monotonic() + seconds
    if place.index == 0:
        receive(place, int(port), deadline, seconds)
    else:
        report_to(host.strip("[]"), int(port), place, deadline, seconds)


def receive(place: Place, port: int, deadline: float, seconds: float) -> None:
    """Process 0's part: waits for each of the others to say its number."""
    missing, arrived = set(range(1, place.count)), []
    try:
        server = socket.create_server(("", port), backlog=place.count)
    except OSError as error:
        raise RunError(
            f"process 0 can't listen on port {port}: {error.strerror}; set JAX_COORDINATOR_PORT "
            "(or the port in JAX_COORDINATOR_ADDRESS) to a free one, for all processes"
        ) from error
    with server:
        while missing:
            server.settimeout(max(deadline - time.monotonic(), 0.001))
            try:
                connection, _ = server.accept()
                connection.settimeout(5)
                missing.discard(int(connection.recv(16)))
                arrived.append(connection)
            except (TimeoutError, ValueError, OSError) as error:
                if time.monotonic() < deadline:
                    continue
                absent = ", ".join(map(str, sorted(missing)))
                raise RunError(
                    f"of {place.count} processes, {absent} did not arrive within {seconds:.0f} s; "
                    "see their logs, or whether they can reach "
                    f"{place.coordinator}"
                ) from error
    for connection in arrived:
        with connection:
            connection.sendall(ALL_HERE)


def report_to(host: str, port: int, place: Place, deadline: float, seconds: float) -> None:
    """The other processes' part: says its number to process 0, and waits for its word."""
    while time.monotonic() < deadline:
        try:
            with socket.create_connection((host, port), timeout=5) as connection:
                connection.sendall(str(place.index).encode())
                connection.settimeout(max(deadline - time.monotonic(), 0.001) + 5)
                if connection.recv(16) == ALL_HERE:
                    return
        except OSError:
            pass
        time.sleep(0.2)  # it isn't there yet, or still the service of a run that is ending
    raise RunError(
        f"process {place.index} did not hear from process 0 at {place.coordinator} within "
        f"{seconds:.0f} s; see its log, or whether that address can be reached from here"
    )


def are_several() -> bool:
    """Whether this is one process of several."""
    return jax.process_count() > 1


def wait_for_all(what: str) -> None:
    """Returns when all processes have come to `what`."""
    if are_several():
        multihost_utils.sync_global_devices(what)


def first_then_others(work: Callable[[bool], Result], what: str) -> Result:
    """The result of `work(is_first)`: of process 0 first, then of the others."""
    result = work(True) if jax.process_index() == 0 else None
    wait_for_all(what)
    return result if jax.process_index() == 0 else work(False)
