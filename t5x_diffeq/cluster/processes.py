"""Several processes as one run: how they find each other, and which does one-time work.

Processes are found, in this order, from

    JAX_COORDINATOR_ADDRESS (host, or host:port with JAX_COORDINATOR_PORT for the port),
    JAX_NUM_PROCESSES, and JAX_PROCESS_ID or a Kubernetes indexed job's JOB_COMPLETION_INDEX
    TPU machines: GKE's variables or Cloud TPU's metadata (tpu_hosts.py)
    SLURM (under `srun`) and Open MPI, as JAX detects them

They meet before JAX's own service starts, which does not name the absent processes: process 0
listens on the coordinator's port, at the address that the others are told. The messages are not
encrypted, and no process proves its identity. The same holds for JAX's service, which then takes
over the port. So the network between the processes must be private.
"""

import ipaddress
import os
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeVar

import jax
from jax._src.clusters import ClusterEnv

from t5x_diffeq.cluster import tpu_hosts
from t5x_diffeq.cluster.agreement import Agreement
from t5x_diffeq.cluster.peers import Peers, start_relay
from t5x_diffeq.system import console, environment
from t5x_diffeq.system.errors import InfrastructureError, InputError

_DEFAULT_PORT = 8476
_ARRIVAL_SECONDS = 300  # for all processes to arrive; T5X_DIFFEQ_ARRIVAL_SECONDS changes it
_ALL_HERE, _REFUSED = b"all are here", b"refused: "
_SECONDS_BETWEEN_LINES = 60  # while processes are waited for
_Result = TypeVar("_Result")
peers: Peers | None = None  # this process's connections, if there are several processes
agreement: Agreement | None = None  # of the processes, if there are several


@dataclass(frozen=True)
class Rank:
    """What identifies one process among all.

    `coordinator` is process 0's `host:port`. `devices` are the numbers of this process's local
    devices; None: the devices that JAX finds.
    """

    coordinator: str
    count: int
    index: int
    devices: Sequence[int] | None = None

    @property
    def host(self) -> str:
        """The coordinator's name or address."""
        return self.coordinator.rpartition(":")[0].strip("[]")

    @property
    def port(self) -> int:
        """The coordinator's port."""
        return int(self.coordinator.rpartition(":")[2])


def initialise() -> None:
    """Joins the processes of this run; does nothing if there is only one.

    Raises:
      InputError: if the environment gives only a part of the process's rank.
      InfrastructureError: if processes did not arrive in time, which it names; if JAX can't join.
    """
    global peers, agreement
    rank = find_rank(os.environ)
    if rank is None:
        return
    _reserve_stdout()
    seconds = environment.ARRIVAL_SECONDS.read() or _ARRIVAL_SECONDS
    peers = Peers(rank.index, rank.count, meet(rank, seconds))
    agreement = Agreement(peers)  # which begins to listen
    coordinator = rank.coordinator if rank.index == 0 else start_relay(rank.coordinator)
    jax.config.update("jax_enable_preemption_service", False)  # `agreement` replaces it
    try:
        jax.distributed.initialize(
            coordinator,
            rank.count,
            rank.index,
            rank.devices or environment.LOCAL_DEVICE_IDS.read(),
            coordinator_bind_address=bind_address(rank),
            heartbeat_timeout_seconds=round(10 * peers.silence),  # ours must fire first
        )
    except (ValueError, RuntimeError) as error:
        raise InfrastructureError(
            f"the processes found as {rank} could not join: {error}; set "
            "JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and JAX_PROCESS_ID instead"
        ) from error
    names = gather("the names of the machines", local_name())
    if jax.default_backend() == "cpu":
        check_machine_names(names)


def local_name() -> tuple[str, str]:
    """The name of this machine, and the address that it has for itself."""
    name = socket.gethostname()
    try:
        return name, str(socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)[0][4][0])
    except OSError:
        return name, ""


def check_machine_names(names: Sequence[Sequence[str]]) -> None:
    """Raises an InputError if one of several machines has a loopback address for its own name.

    Gloo, which sums over processes on CPUs, tells the other processes the address to which the
    machine resolves its own name. `names` has the result of `local_name` on each process.
    """
    if len({name for name, _ in names}) == 1:
        return
    for name, address in names:
        if address.startswith("127.") or address == "::1":
            raise InputError(
                f"machine {name} has the address {address} for its own name (in its /etc/hosts), "
                "which other machines can't reach; give the name its address in the network of "
                "the processes"
            )


def find_rank(variables: Mapping[str, str]) -> Rank | None:
    """This process's rank, from wherever the environment has it; None if the process is alone.

    Raises:
      InputError: if the variables are invalid, or tell of other processes but not how to reach
      them.
    """
    rank = rank_in(variables)
    if rank is None and (tpu_rank := tpu_hosts.host_rank(variables)):
        rank = Rank(*tpu_rank)
    if rank is None and (cluster := cluster_in(variables)):
        rank = _rank_of_cluster(cluster)
    if rank is None:
        _check_alone(variables)
        return None
    found = {environment.NUM_PROCESSES: rank.count, environment.PROCESS_ID: rank.index}
    for variable, actual in found.items():
        given = variable.read(variables)
        if given not in (None, actual):
            raise InputError(
                f"{variable.name}={given} contradicts the cluster, which says {actual}; unset it, "
                "or set JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and JAX_PROCESS_ID"
            )
    return rank


def _rank_of_cluster(cluster: environment.Variable[int]) -> Rank:
    """The rank that JAX finds in the variables of a cluster, of which `cluster` is one."""
    environment.COORDINATOR_PORT.read()  # checked here, because JAX doesn't check it
    devices = environment.LOCAL_DEVICE_IDS.read()  # in place of the one that JAX would take
    given = (None, None, None, devices, None)
    try:
        detected = ClusterEnv.auto_detect_unset_distributed_params(*given, _ARRIVAL_SECONDS)
        fault = "" if None not in detected[:3] else "the launcher's other variables are missing"
    except (KeyError, ValueError, RuntimeError) as error:
        fault = f"JAX can't use the variables beside it ({type(error).__name__}: {error})"
    if fault:
        raise InputError(f"{cluster.name}={cluster.read()}, but {fault}; {cluster.way_out}")
    return Rank(*detected)  # type: ignore[arg-type]  # in a cluster JAX finds all values


def _check_alone(variables: Mapping[str, str]) -> None:
    """Raises an InputError if variables tell of other processes, but not how to reach them."""
    for size, number in (
        (environment.NUM_PROCESSES, environment.PROCESS_ID),
        (environment.TORCH_SIZE, environment.TORCH_RANK),
    ):
        if (size.read(variables) or 1) > 1 or number.read(variables):
            given = [each for each in (size, number) if variables.get(each.name)]
            names = " and ".join(f"{each.name}={variables[each.name]}" for each in given)
            source = " (of torchrun)" if size is environment.TORCH_SIZE else ""
            raise InputError(
                f"{names}{source}: this is one of several processes, but there is no "
                "JAX_COORDINATOR_ADDRESS; set it to HOST:PORT of process 0 (for torchrun, "
                "$MASTER_ADDR), JAX_NUM_PROCESSES ($WORLD_SIZE) and JAX_PROCESS_ID ($RANK), or "
                f"unset {' and '.join(each.name for each in given)} to run a single process"
            )


def _reserve_stdout() -> None:
    """Keeps standard output for results: Gloo's messages are discarded."""
    results = console.Results(os.fdopen(os.dup(1), "wb"), "utf-8", line_buffering=True)
    with open(os.devnull, "w", encoding="utf-8") as nowhere:
        os.dup2(nowhere.fileno(), 1)
    sys.stdout = results


def rank_in(variables: Mapping[str, str]) -> Rank | None:
    """The rank that the JAX_ variables give, or None; an InputError if some are invalid."""
    address = environment.COORDINATOR_ADDRESS.read(variables)
    count, index = environment.NUM_PROCESSES.read(variables), environment.PROCESS_ID.read(variables)
    if address is None:
        return None
    if index is None:
        index = environment.JOB_COMPLETION_INDEX.read(variables)
    has_cluster = cluster_in(variables) or tpu_hosts.lists_hosts(variables)
    if has_cluster and count is None and index is None:
        return None  # the cluster gives them
    if count is None or index is None or index >= count:
        raise InputError(
            f"JAX_COORDINATOR_ADDRESS is set, so JAX_NUM_PROCESSES={count} and "
            f"JAX_PROCESS_ID={index} must be numbers, and the second less than the first; set "
            "them, or unset the address to run a single process"
        )
    host, port = address
    port = port or environment.COORDINATOR_PORT.read(variables) or _DEFAULT_PORT
    return Rank(f"{host}:{port}", count, index)


def cluster_in(variables: Mapping[str, str]) -> environment.Variable[int] | None:
    """The variable of a cluster whose processes JAX can find by itself: of SLURM or Open MPI."""
    sizes = (environment.SLURM_TASKS, environment.OPEN_MPI_SIZE)
    return next((size for size in sizes if (size.read(variables) or 1) > 1), None)


def meet(rank: Rank, seconds: float) -> dict[int, socket.socket]:
    """The connections to the others by their numbers, when all processes have called this.

    Raises:
      InputError: if the processes were told different counts.
      InfrastructureError: if a process doesn't arrive in so many seconds.
    """
    return _receive_ranks(rank, seconds) if rank.index == 0 else {0: _report_to(rank, seconds)}


def bind_address(rank: Rank) -> str:
    """Where process 0 listens, as `address:port`; at all addresses if `local_address` is empty."""
    address = local_address(rank.host) or "::"
    return f"[{address}]:{rank.port}" if ":" in address else f"{address}:{rank.port}"


def local_address(host: str) -> str:
    """The address at which the others reach this machine by the name `host`; empty if uncertain.

    It is uncertain if the name has another address on the other machines (a machine may resolve its
    own name to a loopback address), or if their connections are forwarded.
    """
    with suppress(OSError):
        address = str(socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0])
        is_local = host in ("localhost", address)
        if is_local or not ipaddress.ip_address(address.partition("%")[0]).is_loopback:
            with socket.create_server((address, 0), family=_family(address)):
                return address
    return ""


def _family(address: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in address else socket.AF_INET


def _receive_ranks(rank: Rank, seconds: float) -> dict[int, socket.socket]:
    """Process 0's part: waits for each of the others to send its number."""
    arrived: dict[int, socket.socket] = {}
    began = time.monotonic()
    deadline, next_line = began + seconds, began + _SECONDS_BETWEEN_LINES
    with _listen(rank, deadline) as server:
        while len(arrived) < rank.count - 1:
            now = time.monotonic()
            absent = ", ".join(str(n) for n in range(1, rank.count) if n not in arrived)
            if now >= deadline:
                raise InfrastructureError(
                    f"of {rank.count} processes, {absent} did not arrive within {seconds:.0f} s; "
                    f"check their logs, and whether they can reach {rank.coordinator}"
                )
            if now >= next_line:
                next_line = now + _SECONDS_BETWEEN_LINES
                so_far = console.format_duration(now - began)
                console.write(f"waiting for processes {absent} of {rank.count}: {so_far} so far")
            server.settimeout(max(min(deadline, next_line) - now, 0.001))
            if (arrival := _receive_rank(server)) is None:
                continue
            connection, number, count = arrival
            if count != rank.count:
                _refuse(rank, number, count, [*arrived.values(), connection])
            if number in range(1, rank.count):
                arrived[number] = connection
    for connection in arrived.values():
        connection.sendall(_ALL_HERE)
    return arrived


def _receive_rank(server: socket.socket) -> tuple[socket.socket, int, int] | None:
    """The connection, number and count of a process; None if nobody came, or another program."""
    try:
        connection, _ = server.accept()
        connection.settimeout(5)
        number, count = map(int, connection.recv(32).split(b"/"))
    except (ValueError, OSError):
        return None
    return connection, number, count


def _refuse(rank: Rank, number: int, count: int, connections: Sequence[socket.socket]) -> None:
    """Raises an InputError here and on the connected processes: one was told another count."""
    message = (
        f"process 0 is told of {rank.count} processes, and process {number} of {count}; give all "
        "the same JAX_NUM_PROCESSES"
    )
    for connection in connections:
        with suppress(OSError):
            connection.sendall(_REFUSED + message.encode())
    raise InputError(message)


def _listen(rank: Rank, deadline: float) -> socket.socket:
    """A socket that listens on the port; waits if an earlier run still holds the port."""
    address = local_address(rank.host)
    while True:
        try:
            return socket.create_server(
                (address, rank.port), family=_family(address), backlog=rank.count
            )
        except OSError as error:
            if time.monotonic() < deadline:
                time.sleep(0.5)
                continue
            raise InfrastructureError(
                f"process 0 can't listen on port {rank.port}: {error.strerror}; set "
                "JAX_COORDINATOR_PORT (or the port in JAX_COORDINATOR_ADDRESS) to a free one, for "
                "all processes"
            ) from error


def _report_to(rank: Rank, seconds: float) -> socket.socket:
    """The other processes' part: each sends its number to process 0, and waits for the reply."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        try:
            connection = socket.create_connection((rank.host, rank.port), timeout=5)
            connection.sendall(f"{rank.index}/{rank.count}".encode())
            connection.settimeout(max(deadline - time.monotonic(), 0.001) + 5)
            reply = connection.recv(len(_ALL_HERE))
            if reply == _ALL_HERE:
                return connection
            if reply.startswith(_REFUSED):
                message = reply.removeprefix(_REFUSED) + connection.recv(2**10)
                raise InputError(message.decode())
        except OSError:
            pass
        time.sleep(0.2)  # process 0 isn't up yet, or this is the service of a run that is ending
    raise InfrastructureError(
        f"process {rank.index} did not hear from process 0 at {rank.coordinator} within "
        f"{seconds:.0f} s; check its log, and whether that address can be reached from here"
    )


def are_several() -> bool:
    """Whether this is one process of several."""
    return jax.process_count() > 1


def gather(purpose: str, value: Any) -> list:
    """The values (of JSON) of all processes, in their order; every process must call it.

    It may wait for hours: the devices take no part in it (see `agreement`).
    """
    if not are_several():
        return [value]
    assert agreement, "the processes were joined by something else than `initialise`"
    return agreement.gather(purpose, value)


def wait_for_all(what: str) -> None:
    """Returns when all processes have reached `what`, however long that takes."""
    gather(what, None)


def run_in_turn(work: Callable[[bool], _Result], what: str) -> _Result:
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
