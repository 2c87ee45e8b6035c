"""Checkpoints on a local disk or in memory: the newest two, each process with its own shards.

They are cheap enough to be saved often. If a machine is lost, the workdir's checkpoints remain.
A process writes the parts of each array that its devices hold into

    FOLDER/<run>/process_<i>_of_<n>/<step>/arrays/{<leaf>.bin, index.json, checksums/rest.json}

and reads them back onto the same parts. `<run>` identifies the run, so that nothing is ever
restored from another one. CONTRIBUTING.md says why Orbax's emergency managers aren't used.
"""

import json
import os
import shutil
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import jax
import numpy as np

from t5x_diffeq.checkpoints import checksums
from t5x_diffeq.checkpoints.writing import FinishedSave
from t5x_diffeq.system.console import write
from t5x_diffeq.system.errors import InputError
from t5x_diffeq.system.files import (
    BUCKETS,
    AnyPath,
    absolute_path,
    describe_error,
    digest,
    parse_json,
)
from t5x_diffeq.system.foreign_files import read_inside

KEY = "train.local_checkpoints"
_KEEP = 2  # a process may be lost while it writes a checkpoint that the others have finished
_ITEM = "arrays"
_INDEX = "index.json"
_PARTIAL = ".partial"
Part = tuple[tuple[int, int], ...]  # start and stop of each axis


class LocalCheckpoints:
    """The local checkpoints of one process; nothing in here waits for another process.

    The folder is `train.local_checkpoints`; `run_id` and the workdir's path identify the run.
    """

    def __init__(self, folder: str, workdir: AnyPath, run_id: str, verify: bool = True):
        if folder.startswith(BUCKETS):
            raise InputError(
                f"{KEY}={folder} is in a bucket; name a folder on a local disk or in memory, such "
                "as /dev/shm/checkpoints, or None"
            )
        self.root = Path(os.path.expanduser(folder)).absolute()
        run = digest([run_id.encode(), str(absolute_path(workdir)).encode()])[:16]
        process = f"process_{jax.process_index()}_of_{jax.process_count()}"
        self.folder = self.root / run / process
        self.verify = verify
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InputError(
                f"{KEY}={folder} can't be used: {describe_error(error)}; name a folder that can be "
                "written, or None"
            ) from error
        for path in self.folder.glob(f"*{_PARTIAL}"):
            shutil.rmtree(path)
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="local_checkpoints")
        self._saving: Future | None = None

    def steps(self) -> list[int]:
        """The steps of the complete checkpoints, oldest first."""
        return sorted(int(path.name) for path in self.folder.iterdir() if path.name.isdecimal())

    # -------------------------------------------------------------------------- saving

    def save(
        self,
        step: int,
        state: Mapping[str, Any],
        data: dict,
        report: Callable[[FinishedSave], object],
    ) -> None:
        """Starts to save, once the previous save has finished.

        When it returns, the state is copied and its buffers may be reused. If a checkpoint can't be
        written, that is a warning: the workdir still has its own. `report` is called in another
        thread.
        """
        started = time.perf_counter()
        self.wait()
        leaves = jax.tree.leaves(state)
        for leaf in leaves:
            for shard in _shards(leaf):
                shard.data.copy_to_host_async()
        arrays = [[_host_copy(shard) for shard in _shards(leaf)] for leaf in leaves]
        described = {name: _describe_parts(part) for name, part in state.items()}
        index = {"step": step, "data": data, "state": described}
        waited = time.perf_counter() - started

        def write_and_report() -> None:
            try:
                size = self._write(step, arrays, index)
            except Exception as error:
                reason = describe_error(error)
                write(
                    f"warning: process {jax.process_index()}: local checkpoint {step} can't be "
                    f"written to {self.folder}: {reason}; the run goes on, and the workdir has its "
                    "own checkpoints"
                )
                return
            seconds = time.perf_counter() - started
            report(FinishedSave(step, "local", size, waited, seconds))

        self._saving = self._writer.submit(write_and_report)

    def _write(self, step: int, arrays: Iterable[Sequence[np.ndarray]], index: dict) -> int:
        """Writes a checkpoint, then deletes those that it makes needless; returns its bytes."""
        partial = self.folder / f"{step}{_PARTIAL}"
        try:
            item = partial / _ITEM
            item.mkdir(parents=True)
            for number, parts in enumerate(arrays):
                with (item / f"{number}.bin").open("wb") as file:
                    for part in parts:
                        file.write(np.ascontiguousarray(part).reshape(-1).view(np.uint8).data)
            (item / _INDEX).write_text(json.dumps(index), "utf-8")
            checksums.save_sums(item, checksums.REST, checksums.names_in(item))
            size = sum(path.stat().st_size for path in item.rglob("*"))
            target = self.folder / str(step)
            shutil.rmtree(target, ignore_errors=True)
            partial.rename(target)
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise
        for old in self.steps()[:-_KEEP]:
            shutil.rmtree(self.folder / str(old))
        return size

    def wait(self) -> None:
        """Returns when the last save has finished or failed."""
        if self._saving:
            self._saving.result()

    # -------------------------------------------------------------------------- restoring

    def read(self, step: int, abstract_state: Mapping[str, Any]) -> tuple[dict, dict] | str:
        """The state and the data's state of a checkpoint, or what is wrong with it.

        Shapes, dtypes and shardings of each part must be the saved ones. A part of the state that
        the checkpoint doesn't have is left out.
        """
        folder = self.folder / str(step)
        try:
            damage = checksums.find_damage(folder, (_ITEM,)) if self.verify else None
            if damage:
                return damage
            index = parse_json(read_inside(folder / _ITEM / _INDEX))
            if index["step"] != step:
                return f"it is of step {index['step']}"
            state, first = {}, 0
            for name, described in sorted(index["state"].items()):  # as jax.tree orders them
                if name in abstract_state:
                    if described != _describe_parts(abstract_state[name]):
                        return "it was saved from another mesh or another order of devices"
                    leaves, tree = jax.tree.flatten(abstract_state[name])
                    files = (folder / _ITEM / f"{first + n}.bin" for n in range(len(leaves)))
                    read = [_read_array(*each) for each in zip(files, leaves, strict=True)]
                    state[name] = jax.tree.unflatten(tree, read)
                first += len(described)
            return state, index["data"]
        except (OSError, ValueError, KeyError, TypeError) as error:
            return describe_error(error)

    def remove_after(self, step: int) -> None:
        """Removes the checkpoints of later steps, which the run will reach again."""
        for later in self.steps():
            if later > step:
                shutil.rmtree(self.folder / str(later))

    def remove(self) -> None:
        """Removes all checkpoints of this process, and the run's folder once it is empty."""
        shutil.rmtree(self.folder, ignore_errors=True)
        with suppress(OSError):  # another process of this machine still has its own there
            self.folder.parent.rmdir()


def _describe_parts(state: Any) -> list[dict]:
    """Shape, dtype and this process's parts of each array, as JSON; also of an abstract state."""
    return [
        {
            "shape": list(leaf.shape),
            "dtype": str(leaf.dtype),
            "parts": [[list(axis) for axis in part] for part in _parts_of(leaf)],
        }
        for leaf in jax.tree.leaves(state)
    ]


def _part(index: Any, shape: Sequence[int]) -> Part:
    return tuple(axis.indices(size)[:2] for axis, size in zip(index, shape, strict=True))


def _parts_of(leaf: Any) -> list[Part]:
    """The parts of an array that this process holds, each once, in order."""
    indices = leaf.sharding.addressable_devices_indices_map(tuple(leaf.shape)).values()
    return sorted({_part(index, leaf.shape) for index in indices})


def _shards(leaf: jax.Array) -> list[Any]:
    """One shard for each of `_parts_of`, in the same order."""
    by_part = {_part(shard.index, leaf.shape): shard for shard in leaf.addressable_shards}
    return [by_part[part] for part in sorted(by_part)]


def _host_copy(shard: Any) -> np.ndarray:
    """A copy on the host; on a CPU, `np.asarray` would share what training donates."""
    return (np.array if shard.device.platform == "cpu" else np.asarray)(shard.data)


def _read_array(path: Path, leaf: Any) -> jax.Array:
    content, values, start = np.fromfile(path, np.uint8), {}, 0
    for part in _parts_of(leaf):
        shape = [stop - first for first, stop in part]
        size = int(np.prod(shape)) * leaf.dtype.itemsize
        values[part] = content[start : start + size].view(leaf.dtype).reshape(shape)
        start += size
    if start != len(content):
        raise ValueError(f"{path.name} has {len(content)} bytes instead of {start}")
    return jax.make_array_from_callback(
        tuple(leaf.shape), leaf.sharding, lambda index: values[_part(index, leaf.shape)]
    )
