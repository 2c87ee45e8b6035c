"""Several processes as one run: how they find each other, and which does work done once.

Processes are found, in this order, from

    JAX_COORDINATOR_ADDRESS (host, or host:port with JAX_COORDINATOR_PORT for the port),
    JAX_NUM_PROCESSES, and JAX_PROCESS_ID or a Kubernetes indexed job's JOB_COMPLETION_INDEX
    TPU machines: GKE's variables or Cloud TPU's metadata (tpu_hosts.py)
    SLURM (under `srun`) and Open MPI, as JAX detects them
"""

import os
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import jax
from jax._src.clusters import ClusterEnv

from t5x_diffeq.cluster import tpu_hosts
from t5x_diffeq.cluster.agreement import Agreement
from t5x_diffeq.cluster.peers import Peers, start_relay
from t5x_diffeq.cluster.rendezvous import Rank, bind_address, meet
from t5x_diffeq.system import console
from t5x_diffeq.system.errors import InfrastructureError, InputError

_DEFAULT_PORT = 8476
_ARRIVAL_SECONDS = 300  # for all processes to arrive; T5X_DIFFEQ_ARRIVAL_SECONDS changes it
Result = TypeVar("Result")
peers: Peers | None = None  # this process's connections, if there are several processes
agreement: Agreement | None = None  # likewise


def initialise() -> None:
    """Joins the processes of this run; does nothing if there is only one.

    Raises:
      InputError: if the environment gives only part of what is needed.
      InfrastructureError: if processes did not arrive in time; names them.
    """
    global peers, agreement
    rank = _find_rank(os.environ)
    if rank is None:
        return
    _reserve_stdout()
    seconds = float(os.environ.get("T5X_DIFFEQ_ARRIVAL_SECONDS", _ARRIVAL_SECONDS))
    peers = Peers(rank.index, rank.count, meet(rank, seconds))
    agreement = Agreement(peers)  # which begins to listen
    coordinator = rank.coordinator if rank.index == 0 else start_relay(rank.coordinator)
    jax.config.update("jax_enable_preemption_service", False)  # `agreement` replaces it
    try:
        jax.distributed.initialize(
            coordinator,
            rank.count,
            rank.index,
            rank.devices,
            coordinator_bind_address=bind_address(rank),
            heartbeat_timeout_seconds=round(10 * peers.silence),  # ours must fire first
        )
    except (ValueError, RuntimeError) as error:
        raise InfrastructureError(
            f"the processes found through {cluster_in(os.environ) or rank} could not join: "
            f"{error}; set JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and JAX_PROCESS_ID instead"
        ) from error
    names = gather("the names of the machines", own_name())
    if jax.default_backend() == "cpu":
        check_names(names)


def own_name() -> tuple[str, str]:
    """The name of this machine, and the address that it has for itself."""
    name = socket.gethostname()
    try:
        return name, str(socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)[0][4][0])
    except OSError:
        return name, ""


def check_names(names: Sequence[Sequence[str]]) -> None:
    """Checks that machines without accelerators can reach each other by their names.

    Gloo, which then sums over processes, tells them the address that a machine's name has there.

    Args:
      names: what `own_name` returns on each process.

    Raises:
      InputError: if there are several machines, and one has a loopback address for its own name.
    """
    if len({name for name, _ in names}) == 1:
        return
    for name, address in names:
        if address.startswith("127.") or address == "::1":
            raise InputError(
                f"the name of the machine {name} stands for {address} there (in its /etc/hosts), "
                "where no other machine can reach it; give it the address that it has in the "
                "network of the processes"
            )


def _find_rank(environment: Mapping[str, str]) -> Rank | None:
    """The rank of this process among several; None if it is alone."""
    rank = rank_in(environment)
    if rank is None and (of_tpu := tpu_hosts.host_rank(environment)):
        return Rank(*of_tpu)
    if rank is None and cluster_in(environment):
        unset = (None, None, None, None, None)
        detected = ClusterEnv.auto_detect_unset_distributed_params(*unset, _ARRIVAL_SECONDS)
        return Rank(*detected)  # type: ignore[arg-type]  # in a cluster JAX finds all values
    return rank


def _reserve_stdout() -> None:
    """Keeps standard output for results: Gloo's messages are discarded."""
    results = console.Results(os.fdopen(os.dup(1), "wb"), "utf-8", line_buffering=True)
    with open(os.devnull, "w", encoding="utf-8") as nowhere:
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
    count = environment.get("JAX_NUM_PROCESSES")
    index = environment.get("JAX_PROCESS_ID") or environment.get("JOB_COMPLETION_INDEX")
    has_cluster = cluster_in(environment) or tpu_hosts.lists_hosts(environment)
    if has_cluster and count is None and index is None:
        return None  # the cluster gives them
    numbers = [int(each) for each in (count, index) if each and each.isdecimal()]
    if len(numbers) < 2 or numbers[1] >= numbers[0]:
        raise InputError(
            f"JAX_COORDINATOR_ADDRESS={address} is set, and JAX_NUM_PROCESSES={count} and "
            f"JAX_PROCESS_ID={index} must be numbers, the second less than the first; set them, or "
            "unset the address to run alone"
        )
    port = environment.get("JAX_COORDINATOR_PORT") or str(_DEFAULT_PORT)
    return Rank(address if ":" in address else f"{address}:{port}", numbers[0], numbers[1])


def cluster_in(environment: Mapping[str, str]) -> str | None:
    """The kind of cluster, if this is one whose processes JAX can find by itself."""
    if int(environment.get("SLURM_STEP_NUM_TASKS") or 1) > 1:
        return "SLURM"
    if int(environment.get("OMPI_COMM_WORLD_SIZE") or 1) > 1:
        return "Open MPI"
    return None


def are_several() -> bool:
    """Whether this is one process of several."""
    return jax.process_count() > 1


def gather(purpose: str, value: Any) -> list:
    """The values of all processes, in their order; every process must call it.

    It may wait for hours: the devices take no part in it (see `agreement`).

    Args:
      purpose: what they are for; the same on all processes.
      value: anything that JSON can hold.
    """
    if not are_several():
        return [value]
    assert agreement, "the processes were joined by something else than `initialise`"
    return agreement.gather(purpose, value)


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
