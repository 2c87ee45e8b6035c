"""Nothing keeps a process from its end, and a lost process is what the others end for."""

import socket
import threading
import time

import pytest
from patience import patience

from t5x_diffeq.cluster import peers
from t5x_diffeq.cluster.peers import EXIT_INFRASTRUCTURE, Peers, _LastLine


def test_a_last_line_that_cannot_be_printed(monkeypatch):
    def fail(line):
        raise BrokenPipeError(32, "Broken pipe")

    monkeypatch.setattr(peers, "write", fail)
    _LastLine().print("the disk is full")


def test_a_first_thread_that_does_not_end_the_process(monkeypatch, capsys):
    monkeypatch.setattr(peers, "_SECONDS_TO_END", 0.2)
    last_line = _LastLine()
    first = threading.Thread(target=last_line.print, args=("process 1 was lost",))
    first.start()
    first.join()
    last_line.print("a link failed")  # returns, so that this thread can end the process
    assert capsys.readouterr().err == "error: process 1 was lost\n"


def test_an_error_does_not_wait_for_processes_that_are_done(monkeypatch):
    monkeypatch.setenv("T5X_DIFFEQ_SILENCE_SECONDS", "1000")
    connections = socket.socketpair()
    first, second = (Peers(n, 2, {1 - n: connection}) for n, connection in enumerate(connections))
    second.start(lambda sender, message: None)
    first.leave()
    second.wait_for_all()
    second.leaving = True
    connections[0].shutdown(socket.SHUT_RDWR)  # which ends its thread


@pytest.mark.parametrize("who", [0, 1])
@pytest.mark.parametrize("lost", [False, True])
def test_an_error_waits_for_the_loss_that_it_may_come_from(who, lost, monkeypatch):
    """Process 2 is silent, which takes longer to notice than an error in process 0 or 1 does."""
    monkeypatch.setenv("T5X_DIFFEQ_SILENCE_SECONDS", "2")
    events = []

    def end(self, failure):
        if not self.leaving:
            events.append((self.index, failure))

    def send_late(self, *message):
        time.sleep(0.2)
        send(self, *message)

    send = Peers.send
    monkeypatch.setattr(Peers, "end", end)
    monkeypatch.setattr(Peers, "send", send_late)
    pairs = socket.socketpair(), socket.socketpair()
    everyone = [Peers(0, 3, {1: pairs[0][0], 2: pairs[1][0]})]
    everyone += [Peers(number, 3, {0: pairs[number - 1][1]}) for number in (1, 2)]

    def wait():
        everyone[who].wait_for_all()
        events.append("all answer")

    try:
        for each in everyone[: 2 if lost else 3]:
            each.start(lambda sender, message: None)
        waiting = threading.Thread(target=wait, daemon=True)
        waiting.start()
        waiting.join(patience(30))
        assert events[-1] == "all answer"
        assert len(events) == 1 + lost
        if lost:
            index, failure = events[0]
            assert (index, failure.status) == (0, EXIT_INFRASTRUCTURE)
            assert failure.message.startswith("process 2 of 3 has not answered for 2 s")
    finally:
        for each in everyone:
            each.leaving = True
        for pair in pairs:
            pair[0].shutdown(socket.SHUT_RDWR)  # which ends their threads
