"""Keeps a host's log beside the run, where it outlives the host: python keep_log.py LOG TARGET

The file LOG grows. It is written whole to TARGET, in a folder or a bucket, twice a minute, and once
more on SIGTERM, which ends the program. If the log has more than 16 MiB, only its end is written.
"""

import signal
import sys
import threading
from pathlib import Path

from t5x_diffeq.system.errors import InputError, RunError
from t5x_diffeq.system.files import AnyPath, parse_path, write_whole

SECONDS = 30
LARGEST = 16 * 2**20


def tail(log: Path) -> bytes:
    """The log, or its last 16 MiB."""
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - LARGEST))
        return file.read()


def keep(log: Path, target: AnyPath, ended: threading.Event) -> None:
    """Writes the log as it grows, until `ended`."""
    size = -1
    while True:
        last = ended.wait(SECONDS if size >= 0 else 0)
        now = log.stat().st_size
        if now != size:
            try:
                write_whole(target, tail(log))
                size = now
            except RunError as error:
                print(f"warning: the log is not kept: {error}", file=sys.stderr)
                size = 0
        if last:
            return


def main(log: str, target: str) -> int:
    """Keeps the log until SIGTERM."""
    ended = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: ended.set())
    try:
        path = parse_path(target, "--workdir")
        path.parent.mkdir(parents=True, exist_ok=True)
        keep(Path(log), path, ended)
    except InputError as error:
        print(f"warning: the log is not kept: {error}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
