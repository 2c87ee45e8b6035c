"""Folders that this process has locked: nothing is written there once the lock is lost."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from etils import epath

# Each a folder, and what raises an error if this process has lost its lock (`locks`, `leases`).
write_guards: list[tuple[Path | epath.Path, Callable[[], None]]] = []


@contextmanager
def guarded(folder: Path | epath.Path, check: Callable[[], None]) -> Iterator[None]:
    """A context in which `check_writable` of what is in the folder calls `check`."""
    guard = (folder, check)
    write_guards.append(guard)
    try:
        yield
    finally:
        write_guards.remove(guard)


def check_writable(path: Path | epath.Path) -> None:
    """Checks that this process still has the locks on the folders of the path.

    Raises:
      RunError: if one of the folders was moved.
      InfrastructureError: if another process holds the lease on one in a bucket.
    """
    for folder, check in list(write_guards):
        if path.is_relative_to(folder):
            check()
