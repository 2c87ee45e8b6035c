"""Processes that are asked to stop do so after the same step, wherever each of them is."""

import socket
import threading
import time

import numpy as np
import pytest
from patience import patience

from t5x_diffeq.cluster.agreement import Agreement, Request
from t5x_diffeq.cluster.peers import Peers

SIGTERM, SAVE = Request(42, "SIGTERM"), Request(0, "save")
STEPS = 2000


def connect_peers(count):
    """The peers of so many processes, all in this one."""
    pairs = {n: socket.socketpair() for n in range(1, count)}
    first = Peers(0, count, {n: pair[0] for n, pair in pairs.items()})
    return [first, *(Peers(n, count, {0: pair[1]}) for n, pair in pairs.items())]


def start_training(agreements, seconds_per_step):
    """Starts to train in all processes; returns, by process, what each did after which step."""
    did = [[] for _ in agreements]

    def train(process):
        for step in range(1, STEPS):
            time.sleep(seconds_per_step[process])
            did[process] += [(step, request) for request in agreements[process].count_place()]
            if did[process] and did[process][-1][1].status:
                return

    threads = [threading.Thread(target=train, args=(n,)) for n in range(len(agreements))]
    for thread in threads:
        thread.start()
    return did, threads


@pytest.mark.parametrize("asking", [(0,), (2,), (1, 2), (0, 1, 2)])
def test_all_stop_after_the_same_step(asking):
    """Processes run ahead of each other, and are asked at various times, some at once."""
    chance = np.random.default_rng(len(asking) + asking[0])
    for _ in range(5):
        agreements = [Agreement(peers) for peers in connect_peers(3)]
        did, threads = start_training(agreements, chance.uniform(0, 0.003, 3))
        time.sleep(chance.uniform(0, 0.05))
        for process in asking:
            agreements[process].ask(SIGTERM)
        for thread in threads:
            thread.join(30)
        assert did[0] == did[1] == did[2]
        assert [request for _, request in did[0]] == [SIGTERM]


def test_all_save_after_the_same_step_and_go_on():
    """Requests that come while one is being decided wait; one to stop is the last."""
    chance = np.random.default_rng(0)
    agreements = [Agreement(peers) for peers in connect_peers(3)]
    did, threads = start_training(agreements, chance.uniform(0.001, 0.003, 3))
    for _ in range(3):
        before = len(did[0])
        agreements[0].ask(SAVE)
        deadline = time.monotonic() + patience(30)
        while len(did[0]) == before and time.monotonic() < deadline:
            time.sleep(0.001)
    for request in (SAVE, SIGTERM, SAVE):
        agreements[1].ask(request)
        time.sleep(0.002)
    for thread in threads:
        thread.join(30)
    assert did[0] == did[1] == did[2]
    made = [request for _, request in did[0]]
    assert made[-1] == SIGTERM and made[:-1] == [SAVE] * (len(made) - 1) and len(made) in (4, 5)


def test_the_first_request_gives_the_reason():
    agreements = [Agreement(peers) for peers in connect_peers(2)]
    agreements[1].ask(Request(130, "Ctrl-C"))
    deadline = time.monotonic() + patience(30)
    while not agreements[0]._decided and time.monotonic() < deadline:
        time.sleep(0.001)
    agreements[0].ask(SIGTERM)
    assert [agreement.count_place() for agreement in agreements] == [[(130, "Ctrl-C")]] * 2
    assert agreements[0].count_place() == []


def test_a_process_that_starts_later_is_waited_for():
    """What is asked before a process can hear it is kept until it can."""
    first, second = connect_peers(2)
    agreement = Agreement(second)
    agreement.ask(SIGTERM)
    did, threads = start_training([agreement], [0.001])
    time.sleep(0.05)
    late = Agreement(first)
    threads[0].join(30)
    while not (requests := late.count_place()):
        time.sleep(0.001)
    assert did[0] == [(late._places, SIGTERM)] and requests == [SIGTERM]
