"""A failure that occurs twice in a row at the same step is not an infrastructure failure.

`errors` decides by classes, numbers and texts which failures are temporary, and no such list is
complete. So an attempt that trains leaves its failure in the workdir. If the next attempt fails at
the same step with the same text, numbers aside, it ends with status 1, because another restart
would be in vain. Before the state is restored, only one failure is compared: JAX sees no GPU. The
other failures of a start, such as absent peers or a bucket out of reach, may last for many
attempts.
"""

import json
import re
import threading
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from t5x_diffeq.system.errors import NO_GPU
from t5x_diffeq.system.files import AnyPath, read_json_object, write_whole

FILE = "last_failure.json"
_SECONDS = 10  # to write the file: its disk or bucket may be what failed


@dataclass
class _Attempt:
    workdir: AnyPath | None = None  # None if this process doesn't train
    step: int | None = None  # the last step that is done; None before the state is restored
    before: Mapping[str, Any] = field(default_factory=dict)  # the failure of the attempt before


_attempt = _Attempt()


def begin(workdir: AnyPath) -> None:
    """Begins an attempt, before JAX looks for its devices."""
    _attempt.workdir, _attempt.step = workdir, None


def _last_failure(workdir: AnyPath) -> Mapping[str, Any]:
    """The failure of the attempt before; {} if there is none."""
    try:
        return read_json_object(workdir / FILE)
    except (OSError, ValueError):
        return {}


def take_last_failure(workdir: AnyPath) -> Mapping[str, Any]:
    """Reads the failure of the attempt before, and removes its file; {} if there is none."""
    failure = _last_failure(workdir)
    with suppress(OSError):
        (workdir / FILE).unlink(missing_ok=True)
    return failure


def watch(workdir: AnyPath, start: int, before: Mapping[str, Any]) -> None:
    """Begins to compare, at step `start`: from here on, every failure is left in the workdir."""
    _attempt.workdir, _attempt.step, _attempt.before = workdir, start, before


def at_step(step: int) -> None:
    """Says that a step is done."""
    _attempt.step = step


def end() -> None:
    """Ends the comparison: the run is done, or was stopped."""
    _attempt.workdir = None


def is_repeated(message: str) -> bool:
    """Whether the attempt before failed with this message at the same step.

    Leaves this failure in the workdir for the next attempt.
    """
    workdir = _attempt.workdir
    at_start = _attempt.step is None
    if workdir is None or (at_start and NO_GPU not in message):
        return False
    before = _last_failure(workdir) if at_start else _attempt.before
    # Without what differs from one attempt to the next: times, addresses, processes.
    text = re.sub(r"0x[0-9a-f]+|\d+", "#", message)[:1000]
    failure = {"step": _attempt.step, "text": text}

    def write() -> None:
        with suppress(Exception):
            write_whole(workdir / FILE, json.dumps({**failure, "message": message}).encode())

    writing = threading.Thread(target=write, daemon=True)
    writing.start()
    writing.join(_SECONDS)
    return all(before.get(key) == value for key, value in failure.items())
