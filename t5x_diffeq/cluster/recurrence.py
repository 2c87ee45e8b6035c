"""A failure that occurs twice in a row at the same step isn't one of the infrastructure.

`errors` decides by classes, numbers and texts which failures are temporary, and no such list is
complete. So an attempt that trains leaves its failure in the workdir. If the next attempt ends at
the same step with the same text, up to its numbers, it ends with status 1: what restarts a run
would restart it in vain. A failure before the first step of an attempt, such as peers that don't
arrive or a bucket that is out of reach, isn't compared, because the wait for them may be long.
"""

import json
import re
import threading
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from t5x_diffeq.system.files import AnyPath, read_json_object, write_whole

FILE = "last_failure.json"
_SECONDS = 10  # to write the file: its disk or bucket may be what failed


@dataclass
class _Attempt:
    workdir: AnyPath | None = None  # None before the first step, and if this process doesn't train
    step: int = 0  # the last one that is done
    before: Mapping[str, Any] = field(default_factory=dict)  # the failure of the attempt before


_attempt = _Attempt()


def take_last_failure(workdir: AnyPath) -> Mapping[str, Any]:
    """Reads the failure of the attempt before, and removes its file; {} if there is none."""
    try:
        failure = read_json_object(workdir / FILE)
    except (OSError, ValueError):
        failure = {}
    with suppress(OSError):
        (workdir / FILE).unlink(missing_ok=True)
    return failure


def watch(workdir: AnyPath, start: int, before: Mapping[str, Any]) -> None:
    """Begins to compare, at step `start`: from here on, a failure is left in the workdir."""
    _attempt.workdir, _attempt.step, _attempt.before = workdir, start, before


def at_step(step: int) -> None:
    """Says that a step is done."""
    _attempt.step = step


def end() -> None:
    """Ends the comparison: the run is done, or was stopped."""
    _attempt.workdir = None


def is_repeated(message: str) -> bool:
    """Whether the attempt before ended with this at the same step; leaves it for the next one."""
    workdir = _attempt.workdir
    if workdir is None:
        return False
    # Without what differs from one attempt to the next: times, addresses, processes.
    text = re.sub(r"0x[0-9a-f]+|\d+", "#", message)[:1000]
    failure = {"step": _attempt.step, "text": text}

    def write() -> None:
        with suppress(Exception):
            write_whole(workdir / FILE, json.dumps({**failure, "message": message}).encode())

    writing = threading.Thread(target=write, daemon=True)
    writing.start()
    writing.join(_SECONDS)
    return all(_attempt.before.get(key) == value for key, value in failure.items())
