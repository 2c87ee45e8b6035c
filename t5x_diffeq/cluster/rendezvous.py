"""How the processes of a run meet, before JAX's own service, which does not name who is absent.

Process 0 listens on the coordinator's port, at the address that the others are told. What they send
is not encrypted, and nobody proves who they are: as with JAX's service, which takes the port over,
the network between the processes must be private.
"""

import ipaddress
import socket
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

from t5x_diffeq.system.console import format_duration, write
from t5x_diffeq.system.errors import InfrastructureError

_ALL_HERE = b"all are here"
_SECONDS_BETWEEN_LINES = 60  # while processes are waited for


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

    @property
    def host(self) -> str:
        """The coordinator's name or address."""
        return self.coordinator.rpartition(":")[0].strip("[]")

    @property
    def port(self) -> int:
        """The coordinator's port."""
        return int(self.coordinator.rpartition(":")[2])


def meet(rank: Rank, seconds: float) -> dict[int, socket.socket]:
    """Returns when all processes have called it, with the open connections of this one.

    Args:
      rank: of this process.
      seconds: how long the others may take.

    Raises:
      InfrastructureError: if some did not arrive in time; names them.
    """
    return _receive_ranks(rank, seconds) if rank.index == 0 else {0: _report_to(rank, seconds)}


def bind_address(rank: Rank) -> str:
    """Where process 0 listens, as `address:port`; at all addresses if `own_address` finds none."""
    address = own_address(rank.host) or "::"
    return f"[{address}]:{rank.port}" if ":" in address else f"{address}:{rank.port}"


def own_address(host: str) -> str:
    """The address of this machine that the others are told; empty if it can't be told for sure.

    That is so where the name has another address for the others (a machine's own name may be a
    loopback address for itself), or where their connections are forwarded.
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
                so_far = format_duration(now - began)
                write(f"waiting for processes {absent} of {rank.count}: {so_far} so far")
            server.settimeout(max(min(deadline, next_line) - now, 0.001))
            with suppress(ValueError, OSError):
                connection, _ = server.accept()
                connection.settimeout(5)
                number = int(connection.recv(16))
                if number in range(1, rank.count):
                    arrived[number] = connection
    for connection in arrived.values():
        connection.sendall(_ALL_HERE)
    return arrived


def _listen(rank: Rank, deadline: float) -> socket.socket:
    """A socket that listens on the port; waits if an earlier run still holds the port."""
    address = own_address(rank.host)
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
    """The other processes' part: sends its number to process 0, and waits for the reply."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        try:
            connection = socket.create_connection((rank.host, rank.port), timeout=5)
            connection.sendall(str(rank.index).encode())
            connection.settimeout(max(deadline - time.monotonic(), 0.001) + 5)
            if connection.recv(len(_ALL_HERE)) == _ALL_HERE:
                return connection
        except OSError:
            pass
        time.sleep(0.2)  # process 0 isn't up yet, or this is the service of a run that is ending
    raise InfrastructureError(
        f"process {rank.index} did not hear from process 0 at {rank.coordinator} within "
        f"{seconds:.0f} s; check its log, and whether that address can be reached from here"
    )
