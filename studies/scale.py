"""What grows with size: CPU seconds and memory of trainings, of data and of tables.

    python -m studies.scale --what=steps --output=DIR

`--what` is one of

    steps      an optimizer step of `:ode`, by N, T, width and length, and the part of it that W(t)
               takes: what `:euler`, with the same number of layers, doesn't need
    bytes      `prepare_data` of 10, 100 and 1000 MB in files of 1 MB
    files      `prepare_data` of 1000, 10 000 and 100 000 files of 1 kB
    outcomes   the table of a sweep of 50, 500 and 5000 runs
    saves      a state of 0.1, 1 and 5 GB that is saved and restored, beside `dd`
    processes  a training of one, two, ..., 16 processes on virtual CPU devices

Prints a table as Markdown. CPU seconds are those of all processes of a command, and memory is the
largest resident set of one of them. Both hardly depend on what else the machine does. Seconds do.
"""

import json
import os
import resource
import shutil
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing import get_context
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from t5x_diffeq.checkpoints.checkpoint import Checkpoints
from t5x_diffeq.checkpoints.stored import RunFacts, TrainState
from t5x_diffeq.cli import command_line, flag_values
from t5x_diffeq.cli.verb_flags import VerbFlags
from t5x_diffeq.hf.folder import check_new_folder, local_path
from t5x_diffeq.system.errors import InputError, RunError

FLAGS = VerbFlags("studies.scale")
_WHAT = FLAGS.define_text("what", "steps, bytes, files, outcomes, saves or processes.")
_OUTPUT = FLAGS.define_text("output", "Folder for what is made; it must be new or empty.")
_FEW, _MANY = 4, 24  # steps of the two trainings whose difference is that of the steps between
_TOKENS = 2048  # of an optimizer step
_BASE = {"num_steps": 6, "time_embed_dim": 16, "embed_dim": 64, "length": 128}
_CHANGES = {
    "num_steps": (6, 12, 24, 48),
    "time_embed_dim": (16, 64, 256),
    "embed_dim": (64, 128, 256),
    "length": (128, 512, 2048),
}


class Usage(NamedTuple):
    """What a command took."""

    seconds: float  # of all cores, with its child processes
    memory: float  # GiB, of the largest process


def measure(verb: str, *arguments: str) -> Usage:
    """What a verb takes; a RunError if it fails."""
    return measure_command(sys.executable, "-m", f"t5x_diffeq.{verb}", "--quiet", *arguments)


def measure_command(*command: str) -> Usage:
    """What a command takes; a RunError if it fails."""
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    if status:
        raise RunError(f"{' '.join(command)} ended with status {os.waitstatus_to_exitcode(status)}")
    return Usage(usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 2**20)


def _training(output: Path, variant: str, sizes: dict[str, int], steps: int) -> Usage:
    shutil.rmtree(output / "run", ignore_errors=True)
    keys = {
        "model.num_steps": sizes["num_steps"],
        "model.time_embed_dim": sizes["time_embed_dim"],
        "model.embed_dim": sizes["embed_dim"],
        "model.mlp_dim": 4 * sizes["embed_dim"],
        "data.sequence_length": sizes["length"],
        "train.batch_size": _TOKENS // sizes["length"],
        "train.total_steps": steps,
        "train.eval_every": 10**6,
        "train.eval_batches": 1,
        "train.eval_batch_size": 1,
        "train.checkpoint_every": 10**6,
        "train.velocity_penalty": 0.0,
    }
    return measure(
        "train",
        f"--config=configs/ladder.py:{variant}",
        f"--workdir={output / 'run'}",
        *(f"--config.{key}={value}" for key, value in keys.items()),
    )


def _step(output: Path, variant: str, sizes: dict[str, int]) -> Usage:
    # The first training compiles the programs, which the others read from JAX's cache.
    _, few, many = (_training(output, variant, sizes, steps) for steps in (1, _FEW, _MANY))
    return Usage((many.seconds - few.seconds) / (_MANY - _FEW), many.memory)


def _steps(output: Path) -> Iterator[Sequence[str]]:
    yield "changed", "CPU s a step", "over the row above", "W(t)'s part", "memory, GiB"
    for changed, values in _CHANGES.items():
        before = None
        for value in values:
            sizes = {**_BASE, changed: value}
            (ode, memory), (euler, _) = (
                _step(output, variant, sizes) for variant in ("ode-64", "euler-64")
            )
            growth = f"{ode / before:.2f}" if before else ""
            before = ode
            yield (
                f"{changed}={value}",
                f"{ode:.3f}",
                growth,
                f"{1 - euler / ode:.0%}",
                f"{memory:.2f}",
            )


def _text(size: int) -> bytes:
    """So many bytes of the standard library's source, in ASCII, so that it can be cut anywhere."""
    library = Path(sysconfig.get_path("stdlib"))
    read = b"".join(path.read_bytes() for path in sorted(library.glob("*.py")))
    text = read.decode("ascii", "ignore").encode()
    return (text * (size // len(text) + 1))[:size]


def _prepared(output: Path, name: str, files: int, size: int) -> Sequence[str]:
    folder, text = output / "text", _text(10**7)
    shutil.rmtree(output, ignore_errors=True)
    for n in range(files):
        path = folder / f"{n // 1000}" / f"{n}.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        start = n * size % (len(text) - size)
        path.write_bytes(str(n).encode() + text[start : start + size])
    used = measure(
        "prepare_data",
        "--config=configs/tiny.py",
        "--config.data.source=text_files",
        f"--config.data.path={folder}",
        f"--output={output / 'shards'}",
    )
    return name, f"{used.seconds:.1f}", f"{used.memory:.2f}"


def _bytes(output: Path) -> Iterator[Sequence[str]]:
    yield "text", "CPU s", "memory, GiB"
    for megabytes in (10, 100, 1000):
        yield _prepared(output, f"{megabytes} MB", megabytes, 10**6)


def _files(output: Path) -> Iterator[Sequence[str]]:
    yield "files of 1 kB", "CPU s", "memory, GiB"
    for files in (1000, 10_000, 100_000):
        yield _prepared(output, str(files), files, 1000)


def _outcomes(output: Path) -> Iterator[Sequence[str]]:
    yield "runs", "CPU s", "memory, GiB"
    for count in (50, 500, 5000):
        grid = f"--grid=optimizer.beta1={','.join(f'0.{n:05d}' for n in range(1, count // 5 + 1))}"
        words = "--config=configs/tiny.py", f"--output={output}", "--seeds=5", grid
        listed = subprocess.run(
            [sys.executable, "-m", "t5x_diffeq.sweep", *words, "--dry_run"],
            check=True,
            stdout=subprocess.PIPE,
            text=True,
        )
        names = [
            line.partition("--workdir=")[2].split()[0].rpartition("/")[2]
            for line in listed.stdout.splitlines()
        ]
        numbers = dict.fromkeys(("seconds", "first", "perplexity", "lowest"), 1.0)
        lines = (
            {"run": name, "verb": "train", **numbers, "loss": 2.0 + n % 7 / 10}
            for n, name in enumerate(names)
        )
        (output / "results.jsonl").write_text("".join(f"{json.dumps(each)}\n" for each in lines))
        used = measure("sweep", *words)
        yield str(count), f"{used.seconds:.1f}", f"{used.memory:.2f}"


class _Timed(NamedTuple):
    seconds: float
    cpu_seconds: float


@contextmanager
def _timing(times: list[_Timed]) -> Iterator[None]:
    started, cpu = time.perf_counter(), time.process_time()
    yield
    times.append(_Timed(time.perf_counter() - started, time.process_time() - cpu))


def save_and_restore(folder: Path, gigabytes: float) -> tuple[_Timed, _Timed, list[float]]:
    """The times of a save and of a restore of so large a state, and the process's memory.

    Memory is the largest so far, in GiB: before the save, after it, and after the restore, before
    which the state is deleted.
    """
    size = int(gigabytes * 1e9) // (15 * 4)
    rng = np.random.default_rng(0)
    arrays = {str(n): jnp.asarray(rng.standard_normal(size, np.float32)) for n in range(15)}
    state = TrainState(jnp.int32(0), arrays, {})
    memory, times = [_peak()], list[_Timed]()
    with Checkpoints(folder, keep=1) as checkpoints:
        with _timing(times):
            checkpoints.save(1, state, RunFacts("noise"))
            checkpoints.wait()
        memory.append(_peak())
        shapes = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state
        )
        del state, arrays
        with _timing(times):
            jax.block_until_ready(checkpoints.restore(shapes, "noise"))
    return times[0], times[1], [*memory, _peak()]


def _peak() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def _saves(output: Path) -> Iterator[Sequence[str]]:
    times = "dd, s", "save, s", "CPU s", "restore, s", "CPU s"
    yield "state", *times, "memory, GiB", "after the save", "after the restore"
    for gigabytes in (0.1, 1.0, 5.0):
        shutil.rmtree(output, ignore_errors=True)
        output.mkdir(parents=True)
        zeros = "if=/dev/zero", f"of={output / 'zeros'}", "bs=1M", f"count={gigabytes * 954:.0f}"
        started = time.perf_counter()
        measure_command("dd", *zeros, "conv=fsync", "status=none")
        dd = time.perf_counter() - started
        with ProcessPoolExecutor(1, get_context("spawn")) as pool:  # whose memory is this state's
            saved, restored, memory = pool.submit(save_and_restore, output, gigabytes).result()
        numbers = (*saved, *restored, *memory)
        yield f"{gigabytes} GB", f"{dd:.2f}", *(f"{number:.2f}" for number in numbers)


def _processes(output: Path) -> Iterator[Sequence[str]]:
    yield "processes", "CPU s", "seconds", "memory of one, GiB"
    for processes in (1, 2, 4, 8, 16):
        started = time.perf_counter()
        used = measure_command(
            *(sys.executable, "launch/local_processes.py", f"--processes={processes}"),
            *(f"--devices_per_process={16 // processes}", "--"),
            *(sys.executable, "-m", "t5x_diffeq.train", "--quiet", "--config=configs/tiny.py"),
            f"--workdir={output / str(processes)}",
            "--config.train.total_steps=8",
            "--config.train.batch_size=16",
            "--config.train.eval_every=8",
            "--config.train.eval_batches=1",
            "--config.train.checkpoint_every=8",
            "--config.data.tokenizer=bytes",
        )
        seconds = time.perf_counter() - started
        yield str(processes), f"{used.seconds:.0f}", f"{seconds:.0f}", f"{used.memory:.2f}"


WHAT = {
    "steps": _steps,
    "bytes": _bytes,
    "files": _files,
    "outcomes": _outcomes,
    "saves": _saves,
    "processes": _processes,
}


def main() -> None:
    """The command."""
    output = local_path(flag_values.parse_folder(_OUTPUT, "scale"), "output")
    if _WHAT.value not in WHAT:
        raise InputError(f"--what={_WHAT.value} must be {', '.join(WHAT)}")
    check_new_folder(output, "output")  # since what is in it is deleted between measurements
    output.mkdir(parents=True, exist_ok=True)
    for n, row in enumerate(WHAT[_WHAT.value](output)):
        print(f"| {' | '.join(row)} |", flush=True)
        if n == 0:
            print("|---" * len(row) + "|", flush=True)


if __name__ == "__main__":
    command_line.run(main, __doc__, FLAGS)
