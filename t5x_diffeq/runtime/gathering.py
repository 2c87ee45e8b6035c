"""Small values from all processes to all processes, without the devices.

A process waits here for as long as the others are alive: while process 0 prepares the data, or
while one reads a checkpoint. A collective of the devices would fail after a time (half a minute
with Gloo, ten minutes or more with NCCL), and keep the devices from other work. The values travel
over the connections of `peers`, which end this process if another one is lost.
"""

import threading
from typing import Any

from t5x_diffeq.runtime.peers import Peers


class Gathering:
    """Gathers the values that the main threads of all processes give, again and again.

    Args:
      peers: the connections to the other processes; listening on them has not started yet.
    """

    def __init__(self, peers: Peers):
        self._peers = peers
        self._changed = threading.Condition()
        self._calls = 0  # of `gather` in this process
        self._given: dict[int, list] = {}  # process 0: sender, purpose and value, by call
        self._gathered: dict[int, list] = {}  # the same of all processes, once they are there
        peers.subscribe("gather", self._hear)

    def gather(self, purpose: str, value: Any) -> list:
        """The values of all processes, in their order; every process must call it.

        Args:
          purpose: what they are for; the same on all processes.
          value: anything that JSON can hold.

        Raises:
          RuntimeError: if another process has another purpose, which is a fault of the program.
        """
        self._calls += 1
        call = self._calls
        message = {"gather": call, "purpose": purpose, "value": value}
        self._peers.send_to(0, message)
        with self._changed:
            self._changed.wait_for(lambda: call in self._gathered)
            gathered = self._gathered.pop(call)
        for process, other, _ in gathered:
            if other != purpose:
                raise RuntimeError(f"process {process} waits for {other!r}, not for {purpose!r}")
        return [each for _, _, each in gathered]

    def _hear(self, sender: int, message: dict[str, Any]) -> None:
        """In the listening thread; on process 0 also in the main thread, but never in both."""
        call = message["gather"]
        if "all" in message:
            with self._changed:
                self._gathered[call] = message["all"]
                self._changed.notify()
            return
        given = self._given.setdefault(call, [])
        given.append((sender, message["purpose"], message["value"]))
        if len(given) == self._peers.count:
            del self._given[call]
            self._peers.send_to_all({"gather": call, "all": sorted(given, key=lambda x: x[0])})
