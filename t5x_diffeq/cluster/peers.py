"""Connections between the processes of a run, so that all end together and for the same reason.

Every process keeps a connection to process 0, from before JAX starts until the process ends. The
connection carries heartbeats, and at the end either the message that the process has finished, or
the status and the message of its failure, which process 0 forwards to the others. `agreement` sends
messages of its own over the connection. Any process may ask process 0 whether it has heard from all
processes since the question.
A connection that closes without a message, or is silent for `SILENCE_SECONDS`, means that the
process was lost. A process that hears of a failure ends at once, with the failure's message and
status.

JAX's own service would also end the others, with a C++ stack trace and SIGABRT: later if another
process is lost, and at once if process 0 is. So its heartbeat timeout is longer than ours, and its
connections to process 0 go through a relay in this process, which hides the loss of process 0 from
JAX.
"""

import json
import os
import selectors
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, replace

from t5x_diffeq.cluster import recurrence
from t5x_diffeq.system import environment
from t5x_diffeq.system.console import ERROR, write
from t5x_diffeq.system.files import parse_json

EXIT_PREEMPTED = 42  # saved: run the same command again
EXIT_INTERRUPTED = 130  # saved, stopped by a person
EXIT_INFRASTRUCTURE = 175  # infrastructure failure: run the same command again
_BEAT_SECONDS = 5
SILENCE_SECONDS = 60  # T5X_DIFFEQ_SILENCE_SECONDS changes it
_SECONDS_TO_END = 30  # for the thread that has printed the last line to end the process
_DONE = {"done": True}


@dataclass(frozen=True)
class Failure:
    """Why the processes end: `process` failed. Their exit status and last line follow from it.

    After a hang, each process must say what it was doing (see `cluster/watchdog.py`).
    """

    process: int
    status: int
    message: str
    hang: bool = False

    def unless_repeated(self) -> "Failure":
        """The failure, with status 1 if the attempt before failed alike (see `recurrence`)."""
        if self.status != EXIT_INFRASTRUCTURE or not recurrence.is_repeated(self.message):
            return self
        message = self.message.removesuffix("; the same command continues the run")
        again = "the attempt before failed alike at the same step, so a restart is in vain"
        return replace(self, status=1, message=f"{message}; {again}")

    def __str__(self) -> str:
        return self.message if self.process == 0 else f"process {self.process}: {self.message}"


class _LastLine:
    """The last line of a process: the first thread that has one prints it and ends the process."""

    def __init__(self):
        self.taken = threading.RLock()

    def print(self, line: object) -> None:
        """Prints the line; a second thread waits here until the first ends the process.

        The process ends even if nobody reads its standard error any more, or if the first thread
        is held up.
        """
        if self.taken.acquire(timeout=_SECONDS_TO_END):  # and never released
            with suppress(OSError):
                write(f"{ERROR}{' '.join(str(line).split())}")


LAST_LINE = _LastLine()


class Peers:
    """This process's connections: from process 0 to all others, from any other to process 0.

    `at_hang` is called before this process ends because a process hangs.
    """

    def __init__(self, index: int, count: int, connections: dict[int, socket.socket]):
        self.index, self.count, self.connections = index, count, connections
        self.silence = environment.SILENCE_SECONDS.read() or SILENCE_SECONDS
        self.beat = min(_BEAT_SECONDS, self.silence / 4)
        self.last_received = dict.fromkeys(connections, time.monotonic())
        self.unread = dict.fromkeys(connections, b"")
        self.done: set[int] = set()
        self.leaving = False
        self.at_hang: Callable[[], None] = lambda: None
        self.sending = threading.Lock()
        self.questions: dict[int, tuple[float, float]] = {}  # see `_answer`
        self.all_received = 0.0  # time of this process's newest question with an answer
        self.on_message: Callable[[int, dict], None] = lambda sender, message: None
        self.delivering = threading.RLock()  # one message at a time
        self.selector = selectors.DefaultSelector()
        for other, connection in connections.items():
            connection.settimeout(self.beat)
            self.selector.register(connection, selectors.EVENT_READ, other)

    def wait_for_all(self) -> None:
        """Returns when every process has sent something since this call.

        It is called after an error, which may be the consequence of a lost process. If a process
        was lost, this process ends in here, with the status of an infrastructure failure.
        """
        since = time.monotonic()
        latest = since + self.silence + 4 * self.beat
        if self.index != 0:
            self.send({"all_received_question": since})
        while time.monotonic() < latest:
            receives_all = self.index == 0 or 0 in self.done  # else only process 0 hears from all
            if self._oldest_received() > since if receives_all else self.all_received >= since:
                return
            time.sleep(self.beat / 10)

    def start(self, on_message: Callable[[int, dict], None]) -> None:
        """Starts to listen; `on_message(sender, message)` is called for each message of others."""
        self.on_message = on_message
        threading.Thread(target=self._listen, name="peers", daemon=True).start()

    # ---------------------------------------------------------------------- what is sent

    def send_failure(self, failure: Failure) -> None:
        """Tells the others that all must end."""
        self.leaving = True
        self.send(asdict(failure))

    def leave(self) -> None:
        """Tells the others that this process has finished its work."""
        self.leaving = True
        self.send(_DONE)

    def send(self, message: dict, others: set[int] | None = None) -> None:
        """Sends a message to the `others` that still listen; None stands for all processes."""
        line = json.dumps(message).encode() + b"\n"
        listening = self.connections.keys() - self.done
        with self.sending:
            for other in listening if others is None else listening & others:
                with suppress(OSError):  # `_listen` finds out
                    self.connections[other].sendall(line)

    def send_to(self, process: int, message: dict) -> None:
        """Sends a message to process 0, or from process 0 to any process, itself included."""
        if process == self.index:
            self._deliver(self.index, message)
        else:
            self.send(message, {process})

    def send_to_all(self, message: dict) -> None:
        """Sends a message from process 0 to all processes, to itself last."""
        self.send(message)
        self._deliver(self.index, message)

    # ---------------------------------------------------------------------- what is received

    def _deliver(self, sender: int, message: dict) -> None:
        with self.delivering:
            self.on_message(sender, message)

    def _listen(self) -> None:
        """The listening thread: receives messages, and sends heartbeats."""
        last_sent = 0.0
        while self.selector.get_map():
            for key, _ in self.selector.select(self.beat):
                self._receive(key.data)
            now = time.monotonic()
            if now - last_sent > self.beat:
                last_sent = now
                self.send({})
            self._answer()
            for other in self.last_received.keys() - self.done:
                if now - self.last_received[other] > self.silence + 2 * self.beat:
                    self._lose(other, f"has not answered for {self.silence:.0f} s")

    def _answer(self) -> None:
        """Answers each question whether all processes have been heard from since it was asked.

        A question is a time by the asking process's clock, which the answer repeats. This process
        compares only times by its own clock: when it received the question, and when the others.
        """
        for other, (asked, received) in list(self.questions.items()):
            if self._oldest_received() > received:
                del self.questions[other]
                self.send({"all_received_answer": asked}, {other})

    def _oldest_received(self) -> float:
        """When the process that has been silent for longest was heard from."""
        running = self.last_received.keys() - self.done
        return min((self.last_received[other] for other in running), default=time.monotonic())

    def _receive(self, other: int) -> None:
        connection = self.connections[other]
        try:
            received = connection.recv(2**16)
        except OSError:
            received = b""
        if not received:
            self.selector.unregister(connection)
            if other not in self.done:
                self._lose(
                    other, "was lost: it was killed, or its machine or the link to it failed"
                )
            return
        self.last_received[other] = time.monotonic()
        *lines, self.unread[other] = (self.unread[other] + received).split(b"\n")
        for message in map(parse_json, lines):
            if message == _DONE:
                self.done.add(other)
            elif "all_received_question" in message:
                asked = message["all_received_question"]
                self.questions[other] = (asked, self.last_received[other])
            elif "all_received_answer" in message:
                self.all_received = max(self.all_received, message["all_received_answer"])
            elif "status" in message:
                self.end(Failure(**message))
            elif message:
                self._deliver(other, message)

    def _lose(self, other: int, how: str) -> None:
        if self.leaving:
            self.done.add(other)
            return
        message = f"process {other} of {self.count} {how}; the same command continues the run"
        self.end(Failure(0, EXIT_INFRASTRUCTURE, message).unless_repeated())
        self.done.add(other)  # this process began to leave meanwhile

    def end(self, failure: Failure) -> None:
        """Ends this process, and through process 0 all others."""
        if self.leaving:
            return
        self.send_failure(failure)
        if failure.hang:
            self.at_hang()
        LAST_LINE.print(failure)
        os._exit(failure.status)


def start_relay(address: str) -> str:
    """Starts a relay to `address`, which stays open when `address` closes; returns its address."""
    server = socket.create_server(("127.0.0.1", 0))
    threading.Thread(target=_relay, args=(server, address), name="relay", daemon=True).start()
    return f"127.0.0.1:{server.getsockname()[1]}"


def _relay(server: socket.socket, address: str) -> None:
    """The relay's thread: forwards every connection to `server` to `address`."""
    host, _, port = address.rpartition(":")
    while True:
        near, _ = server.accept()
        try:
            far = socket.create_connection((host.strip("[]"), int(port)), timeout=10)
        except OSError:
            near.close()  # the client tries again
            continue
        far.settimeout(None)
        for source, target in ((near, far), (far, near)):
            threading.Thread(target=_pump, args=(source, target), daemon=True).start()


def _pump(source: socket.socket, target: socket.socket) -> None:
    """Copies data until either end closes; the other end is left open."""
    with suppress(OSError):
        while received := source.recv(2**16):
            target.sendall(received)
