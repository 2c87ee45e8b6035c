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

_READ_BY_PERFETTO = ".trace.json.gz"
_SUFFIXES = (".xplane.pb", _READ_BY_PERFETTO)


def start_trace(local: Path) -> None:
    """Starts a trace that `jax.profiler.stop_trace` ends and writes below a local folder.

    Python's own calls are left out: recording each of them would slow down the steps that the trace
    is to show.
    """
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0
    jax.profiler.start_trace(local, profiler_options=options)


def store_trace(local: Path, folder: AnyPath, run: str) -> AnyPath:
    """Moves the files of a trace to FOLDER/plugins/profile/RUN/; returns that folder.

    Args:
      local: the folder below which `stop_trace` has written.
      folder: what TensorBoard is to be given as `--logdir`.
      run: the name under which XProf lists the trace.

    Raises:
      RunError: if a file can't be written.
      FileNotFoundError: if there is none.
      InfrastructureError: if the bucket doesn't answer.
    """
    target = folder / "plugins" / "profile" / run
    files = [(file, suffix) for suffix in _SUFFIXES for file in local.rglob(f"*{suffix}")]
    if not files:
        raise FileNotFoundError(f"jax.profiler has written no trace into {local}")
    for file, suffix in files:
        process = f"{socket.gethostname()}_process_{jax.process_index()}"
        with atomic_file(target / f"{process}{suffix}") as partial:
            shutil.move(file, partial)
    return target


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
        f"*{_READ_BY_PERFETTO} file on https://ui.perfetto.dev"
    )
