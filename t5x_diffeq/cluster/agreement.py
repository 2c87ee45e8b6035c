"""Agreement of processes without the devices: small values of all, and where all stop.

A process waits for the values of the others for as long as they are alive: while process 0 prepares
the data, or while one reads a checkpoint. A collective of the devices would fail after a time (half
a minute with Gloo, ten minutes or more with NCCL), and keep the devices from other work.

When a signal reaches any of several processes, all stop at the same place: an optimizer step, or a
batch of an evaluation. Each process counts those that it has reached. A process that is asked to
stop tells process 0, which asks every process for its count. Between answering and hearing the
decision, a process goes no further. The decision is the largest count plus one, so that every
process can still stop there. All of this happens in the threads that listen to the peers, so a
process answers even while it compiles or waits for a device.

JAX's own service for this (`reached_preemption_sync_point`) holds the GIL while it waits, and so
blocks the threads that it depends on: those that send this process's heartbeats and relay its
connections.
"""

import threading
from typing import Any, NamedTuple

from t5x_diffeq.cluster.peers import Peers


class Reason(NamedTuple):
    """Why all processes stop: the exit status to end with, and the name of the signal."""

    status: int
    name: str


class Agreement:
    """Gathers values of all processes, counts places, and knows at which one all stop.

    Listening to the peers starts here. `reason` says why all stop at the place for which
    `count_place` is true; it is None until that is decided.
    """

    def __init__(self, peers: Peers):
        self._peers = peers
        self._changed = threading.Condition()
        self._calls = 0  # of `gather` in this process
        self._values: dict[int, list] = {}  # process 0: sender, purpose and value, by call
        self._gathered: dict[int, list] = {}  # the same of all processes, once they are there
        self._places = 0  # reached by this process
        self._held = False  # go no further until the decision
        self._last: int | None = None  # the place to stop at
        self._asked: Reason | None = None  # process 0: the first request
        self._counts: dict[int, int] = {}  # process 0: the answers
        self.reason: Reason | None = None
        peers.start(self._on_message)

    def gather(self, purpose: str, value: Any) -> list:
        """The values (of JSON) of all processes, in their order; every process must call it.

        Raises:
          RuntimeError: if another process has another purpose, which is a fault of the program.
        """
        self._calls += 1
        call = self._calls
        self._peers.send_to(0, {"gather": call, "purpose": purpose, "value": value})
        with self._changed:
            self._changed.wait_for(lambda: call in self._gathered)
            gathered = self._gathered.pop(call)
        for process, other, _ in gathered:
            if other != purpose:
                raise RuntimeError(f"process {process} waits for {other!r}, not for {purpose!r}")
        return [each for _, _, each in gathered]

    def ask(self, reason: Reason) -> None:
        """Asks all processes to stop. Returns at once, and may be called by a signal handler."""
        message = {"stop": "ask", "reason": reason}
        threading.Thread(target=self._peers.send_to, args=(0, message), daemon=True).start()

    def count_place(self) -> bool:
        """Counts a place, and returns whether all processes stop at it, or should have earlier."""
        with self._changed:
            self._changed.wait_for(lambda: not self._held)
            self._places += 1
            return self._last is not None and self._places >= self._last

    def _on_message(self, sender: int, message: dict[str, Any]) -> None:
        """In the listening thread; on process 0 also in the main thread, but never in both."""
        match message:
            case {"gather": call, "purpose": purpose, "value": value}:
                values = self._values.setdefault(call, [])
                values.append((sender, purpose, value))
                if len(values) == self._peers.count:
                    del self._values[call]
                    ordered = sorted(values, key=lambda each: each[0])
                    self._peers.send_to_all({"gathered": call, "values": ordered})
            case {"gathered": call, "values": values}:
                with self._changed:
                    self._gathered[call] = values
                    self._changed.notify()
            case {"stop": "ask", "reason": reason}:
                if self._asked is None:  # the first request counts
                    self._asked = Reason(*reason)
                    self._peers.send_to_all({"stop": "count"})
            case {"stop": "count"}:
                with self._changed:
                    self._held, places = True, self._places
                self._peers.send_to(0, {"stop": "answer", "places": places})
            case {"stop": "answer", "places": places}:
                self._counts[sender] = places
                if len(self._counts) == self._peers.count:
                    last = max(self._counts.values()) + 1
                    decision = {"stop": "decision", "last": last, "reason": self._asked}
                    self._peers.send_to_all(decision)
            case {"stop": "decision", "last": last, "reason": reason}:
                with self._changed:
                    self._last, self.reason, self._held = last, Reason(*reason), False
                    self._changed.notify()
