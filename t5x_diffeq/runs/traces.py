"""Traces by jax.profiler, stored where TensorBoard and XProf look for them, on disk or in a bucket.

XProf shows what it finds in FOLDER/plugins/profile/RUN/, a file for each process that traced.
"""

import shutil
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import jax

from t5x_diffeq.runtime.files import AnyPath, atomic_file

TRACE = ".trace.json.gz"  # a trace as ui.perfetto.dev reads it
_SUFFIXES = (".xplane.pb", TRACE)


def start_trace(local: Path) -> None:
    """Starts a trace that `jax.profiler.stop_trace` ends and writes below a local folder.

    Python's own calls are left out: recording each of them would slow down the steps that the trace
    is to show.
    """
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0
    jax.profiler.start_trace(local, profiler_options=options)


def process_name() -> str:
    """What this process's files are named by: its host and its number."""
    return f"{socket.gethostname()}_process_{jax.process_index()}"


def store_trace(local: Path, folder: AnyPath, run: str) -> AnyPath:
    """Moves the files of a trace to FOLDER/plugins/profile/RUN/; returns that folder.

    Args:
      local: the folder below which `stop_trace` has written.
      folder: what TensorBoard is to be given as `--logdir`.
      run: the name under which XProf lists the trace.

    Raises:
      RunError: if a file can't be written.
      FileNotFoundError: if there is none.
      MachineryError: if the bucket doesn't answer.
    """
    target = folder / "plugins" / "profile" / run
    found = [
        (file, suffix)
        for suffix in _SUFFIXES
        for file in local.rglob("*")
        if file.name.endswith(suffix)
    ]
    if not found:
        raise FileNotFoundError(f"jax.profiler has written no trace into {local}")
    for file, suffix in found:
        store_file(file, target / f"{process_name()}{suffix}")
    return target


def store_file(local: Path, path: AnyPath) -> None:
    """Moves a local file to `path`, which appears only when it is complete.

    Raises:
      RunError: if it can't be written.
      MachineryError: if the bucket doesn't answer.
    """
    with atomic_file(path) as partial:
        shutil.move(local, partial)


@contextmanager
def trace(folder: AnyPath, run: str) -> Iterator[None]:
    """A context whose work is traced; the trace is stored at its end, as by `store_trace`."""
    with TemporaryDirectory(prefix="t5x_diffeq-trace-") as local:
        start_trace(Path(local))
        try:
            yield
        finally:
            jax.profiler.stop_trace()
        store_trace(Path(local), folder, run)


def how_to_open(folder: AnyPath) -> str:
    """The commands that show the traces of a folder."""
    return (
        f"open them with: tensorboard --logdir={folder} (pip install tensorboard xprof), or drop a "
        f"*{TRACE} file on https://ui.perfetto.dev"
    )
