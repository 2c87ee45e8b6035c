"""How processes meet: where process 0 listens, and whom it waits for."""

import socket
import threading
import time
from contextlib import suppress

import pytest
from patience import patience
from slurm_cluster import free_ports

from t5x_diffeq.cluster import processes
from t5x_diffeq.cluster.processes import Rank, bind_address, local_address, meet
from t5x_diffeq.system.errors import InputError


def test_process_0_listens_at_the_address_that_the_others_are_told(monkeypatch, capfd):
    """And says whom it waits for; nobody hears it elsewhere."""
    monkeypatch.setattr(processes, "_SECONDS_BETWEEN_LINES", 0.1)
    (port,) = free_ports(1)
    coordinator, met = f"127.0.0.1:{port}", {}

    def arrive(index):
        met[index] = meet(Rank(coordinator, 3, index), patience(60))

    threads = [threading.Thread(target=arrive, args=(index,)) for index in range(3)]
    for thread in threads[:2]:
        thread.start()
    said, deadline = "", time.monotonic() + patience(30)
    while "waiting for processes 2 of 3: 0:0" not in said:
        assert time.monotonic() < deadline, said
        said += capfd.readouterr().err
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", port)).close()
    threads[2].start()
    for thread in threads:
        thread.join(patience(60))
    assert [sorted(met[index]) for index in range(3)] == [[1, 2], [0], [0]]
    for connection in (each for connections in met.values() for each in connections.values()):
        connection.close()


def test_processes_that_are_told_different_numbers():
    """All that have come hear it, also one that was told the right one; a stranger doesn't."""
    (port,) = free_ports(1)
    errors = {}

    def arrive(index, count):
        with pytest.raises(InputError) as raised:
            meet(Rank(f"127.0.0.1:{port}", count, index), patience(60))
        errors[index] = str(raised.value)

    threads = [threading.Thread(target=arrive, args=each) for each in ((0, 3), (2, 2))]
    threads[0].start()

    def connect(text):
        while True:
            with suppress(ConnectionRefusedError):
                connection = socket.create_connection(("127.0.0.1", port))
                connection.sendall(text)
                return connection

    with connect(b"GET /"), connect(b"1/3") as other:
        threads[1].start()
        for thread in threads:
            thread.join(patience(60))
        told = "process 0 is told of 3 processes, and process 2 of 2; give all the same "
        assert errors == dict.fromkeys((0, 2), f"{told}JAX_NUM_PROCESSES")
        assert other.recv(2**10) == f"refused: {errors[0]}".encode()


@pytest.mark.parametrize(
    ("host", "resolved", "address"),
    [
        ("127.0.0.1", "127.0.0.1", "127.0.0.1"),
        ("localhost", "127.0.0.1", "127.0.0.1"),
        ("node7", "127.0.1.1", ""),  # Debian's /etc/hosts; the others resolve it otherwise
        ("node7", "192.0.2.7", ""),  # forwarded from an address that no interface here has
        ("node7", None, ""),
    ],
)
def test_the_address_of_this_machine(monkeypatch, host, resolved, address):
    def resolve(*arguments, **keywords):
        if resolved is None:
            raise socket.gaierror("Name or service not known")
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (resolved, 0))]

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    assert local_address(host) == address
    assert bind_address(Rank(f"{host}:8476", 2, 0)) == f"{address or '[::]'}:8476"
