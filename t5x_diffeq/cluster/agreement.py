"""Agreement of processes without the devices: they exchange small values, and stop together.

A process waits for the values of the others for as long as they are alive, for example while
process 0 prepares the data or another process reads a checkpoint. A collective of the devices would
fail after a time (half a minute with Gloo, ten minutes or more with NCCL), and keep the devices
from other work.

When any of several processes is asked to stop or to save, all do so at the same place: an optimizer
step, or a batch of an evaluation. Each process counts the places that it has reached. A process
that is asked tells process 0, which asks every process for its count. After its answer, a process
goes no further until it hears the decision. The decision is the largest count plus one, a place
that no process has reached yet. All of this happens in the threads that listen to the peers, so a
process answers even while it compiles or waits for a device.

JAX's own service for this (`reached_preemption_sync_point`) holds the GIL while it waits. So it
blocks threads that it depends on: the senders of this process's heartbeats, and the relay.
"""

import threading
from typing import Any, NamedTuple

from t5x_diffeq.cluster.peers import Peers


class Request(NamedTuple):
    """What all processes do at the same place: end with `status`, or save and go on if it is 0."""

    status: int
    name: str  # of the signal or file that asks for it


class Agreement:
    """Gathers values of all processes, counts places, and says what all processes do at a place.

    The constructor starts to listen to the peers.
    """

    def __init__(self, peers: Peers):
        self._peers = peers
        self._changed = threading.Condition()
        self._calls = 0  # of `gather` in this process
        self._values: dict[int, list] = {}  # process 0: sender, purpose and value, by call
        self._gathered: dict[int, list] = {}  # by call, when the values of all processes are there
        self._places = 0  # reached by this process
        self._held = False  # go no further until the decision
        self._decided: list[tuple[int, Request]] = []  # what to do at which place
        # Process 0: requests without a decision; a request to stop stays, and none follows it.
        self._asked: list[Request] = []
        self._counts: dict[int, int] = {}  # process 0: each process's count, for the first request
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

    def ask(self, request: Request) -> None:
        """Asks all processes to carry out the request. Returns at once.

        It may be called by a signal handler. After the first request to stop, further requests
        change nothing.
        """
        message = {"request": "ask", "value": request}
        # A signal handler must not wait for the lock of `send`, which the same thread may hold.
        threading.Thread(target=self._peers.send_to, args=(0, message), daemon=True).start()

    def count_place(self) -> list[Request]:
        """Counts a place, and returns what all processes do at it."""
        with self._changed:
            self._changed.wait_for(lambda: not self._held)
            self._places += 1
            due = [request for place, request in self._decided if place <= self._places]
            self._decided = [each for each in self._decided if each[0] > self._places]
            return due

    def _on_message(self, sender: int, message: dict[str, Any]) -> None:
        """Runs in the listening thread, and on process 0 also in others; never twice at a time."""
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
            case {"request": "ask", "value": value}:
                request = Request(*value)
                to_stop = any(each.status for each in self._asked)
                if not to_stop and request not in self._asked:
                    self._asked.append(request)
                    if len(self._asked) == 1:
                        self._peers.send_to_all({"request": "count"})
            case {"request": "count"}:
                with self._changed:  # one lock, so that no place is counted in between
                    self._held, places = True, self._places
                self._peers.send_to(0, {"request": "answer", "places": places})
            case {"request": "answer", "places": places}:
                self._counts[sender] = places
                if len(self._counts) == self._peers.count:
                    self._decide()
            case {"request": "decision", "place": place, "value": value}:
                with self._changed:
                    self._decided.append((place, Request(*value)))
                    self._held = False
                    self._changed.notify()

    def _decide(self) -> None:
        """On process 0: says where the first request is carried out, and turns to the next."""
        request, place = self._asked[0], max(self._counts.values()) + 1
        self._counts = {}
        if not request.status:
            del self._asked[0]
        self._peers.send_to_all({"request": "decision", "place": place, "value": request})
        if self._asked and not request.status:
            self._peers.send_to_all({"request": "count"})
