"""Processes that are asked to stop do so after the same step, wherever each of them is."""

import socket
import threading
import time

import numpy as np
import pytest
from patience import patience

from t5x_diffeq.cluster.agreement import Agreement, Reason
from t5x_diffeq.cluster.peers import Peers

SIGTERM = Reason(42, "SIGTERM")
STEPS = 2000


def connect_peers(count):
    """The peers of so many processes, all in this one."""
    pairs = {n: socket.socketpair() for n in range(1, count)}
    first = Peers(0, count, {n: pair[0] for n, pair in pairs.items()})
    return [first, *(Peers(n, count, {0: pair[1]}) for n, pair in pairs.items())]


def start_training(agreements, seconds_per_step):
    """Starts to train in all processes; returns the list that the step each stops after goes to."""
    stopped = [None] * len(agreements)

    def train(process):
        for step in range(1, STEPS):
            time.sleep(seconds_per_step[process])
            if agreements[process].count_place():
                stopped[process] = step
                return

    threads = [threading.Thread(target=train, args=(n,)) for n in range(len(agreements))]
    for thread in threads:
        thread.start()
    return stopped, threads


@pytest.mark.parametrize("asking", [(0,), (2,), (1, 2), (0, 1, 2)])
def test_all_stop_after_the_same_step(asking):
    """Processes run ahead of each other, and are asked at various times, some at once."""
    chance = np.random.default_rng(len(asking) + asking[0])
    for _ in range(5):
        agreements = [Agreement(peers) for peers in connect_peers(3)]
        stopped, threads = start_training(agreements, chance.uniform(0, 0.003, 3))
        time.sleep(chance.uniform(0, 0.05))
        for process in asking:
            agreements[process].ask(SIGTERM)
        for thread in threads:
            thread.join(30)
        assert None not in stopped
        assert len(set(stopped)) == 1
        assert [agreement.reason for agreement in agreements] == [SIGTERM] * 3


def test_the_first_request_gives_the_reason():
    agreements = [Agreement(peers) for peers in connect_peers(2)]
    agreements[1].ask(Reason(130, "Ctrl-C"))
    deadline = time.monotonic() + patience(30)
    while agreements[0].reason is None and time.monotonic() < deadline:
        time.sleep(0.001)
    agreements[0].ask(SIGTERM)
    assert [agreement.count_place() for agreement in agreements] == [True, True]
    assert agreements[0].reason == agreements[1].reason == (130, "Ctrl-C")


def test_a_process_that_starts_later_is_waited_for():
    """What is asked before a process can hear it is kept until it can."""
    first, second = connect_peers(2)
    agreement = Agreement(second)
    agreement.ask(SIGTERM)
    stopped, threads = start_training([agreement], [0.001])
    time.sleep(0.05)
    late = Agreement(first)
    threads[0].join(30)
    while not late.count_place():
        time.sleep(0.001)
    assert agreement.reason == late.reason == SIGTERM
    assert late._places == stopped[0]
