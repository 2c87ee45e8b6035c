"""Checksums of a checkpoint's files: saved with them, and compared before they are read.

Each process hashes the files that it wrote, in the thread that saves, into
`ITEM/checksums/process_<n>.json`. Process 0 hashes the rest, including those files, into
`ITEM/checksums/rest.json`, before Orbax commits the checkpoint. The hash is CRC-32C, which Google
Cloud Storage keeps for every object: in a bucket it is queried, and nothing is read.
"""

import json
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import jax
import orbax.checkpoint as ocp
from etils import epath

from t5x_diffeq.system.files import AnyPath, bucket_files, crc32c, is_in_bucket, parse_json
from t5x_diffeq.system.foreign_files import read_inside

ITEMS = ("state", "data")  # of a checkpoint
FOLDER = "checksums"
REST = f"{FOLDER}/rest.json"
_THREADS = 8
_HASHING = ThreadPoolExecutor(1, thread_name_prefix="checksums")


class Checksum(NamedTuple):
    """A file's size in bytes, and its CRC-32C in base64."""

    size: int
    crc32c: str


class ChecksumMixin(ocp.AsyncCheckpointHandler):
    """A mixin for an Orbax handler that saves checksums with the item."""

    async def async_save(self, directory: AnyPath, *args: object, **kwargs: object) -> list:
        """Saves, with one more future that is done when this process's files are hashed."""
        futures = await super().async_save(directory, *args, **kwargs) or []
        return [*futures, _HASHING.submit(save_local_sums, _plain_path(directory), futures)]

    def finalize(self, directory: AnyPath) -> None:
        """Finalizes, on process 0 when all processes have written; then hashes the rest."""
        super().finalize(directory)
        directory = _plain_path(directory)
        listed = {REST}
        for name in names_in(directory):
            if name.startswith(f"{FOLDER}/process_"):
                listed |= _read_sums(directory / name).keys()
        save_sums(directory, REST, [name for name in names_in(directory) if name not in listed])


class StateHandler(ChecksumMixin, ocp.PyTreeCheckpointHandler):
    """Saves a train state and its checksums.

    It compresses nothing: mantissas are noise, so zstd saves 8% of the bytes for twice to three
    times the processor time (docs/lab/step_cost.md).
    """

    typestr = ocp.StandardCheckpointHandler.typestr  # any program with Orbax can read it

    def __init__(self) -> None:
        super().__init__(use_compression=False)


class DataHandler(ChecksumMixin, ocp.JsonCheckpointHandler):
    """Saves a JSON object and its checksum."""

    typestr = ocp.JsonCheckpointHandler.typestr


def _plain_path(path: epath.Path) -> AnyPath:
    """An Orbax path as this package's kind: a local epath doesn't list folders."""
    return path if is_in_bucket(path) else Path(path)


def save_local_sums(directory: AnyPath, futures: Sequence[Any]) -> None:
    """Waits for the futures, then hashes the files that only this process writes."""
    for future in futures:
        future.result()
    process = jax.process_index()
    folders = (f"ocdbt.process_{process}/", f"array_metadatas/process_{process}")
    names = [name for name in names_in(directory) if name.startswith(folders)]
    if names:
        save_sums(directory, f"{FOLDER}/process_{process}.json", names)


def save_sums(directory: AnyPath, file: str, names: Sequence[str]) -> None:
    """Hashes the files `names` in `directory`, and writes the hashes to `file` there."""
    path = directory / file
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(sums_of(directory, names)), "utf-8")


def _read_sums(path: AnyPath) -> dict[str, Checksum]:
    try:
        return {name: Checksum(*values) for name, values in parse_json(read_inside(path)).items()}
    except (TypeError, AttributeError) as error:
        raise ValueError(f"{path} holds no checksums") from error


# ------------------------------------------------------------------------------ comparing


def find_damage(folder: AnyPath, part: int = 0, parts: int = 1) -> str | None:
    """What is wrong with the files of a checkpoint; or None.

    The sizes of all files are compared, and the hashes of part number `part` of `parts`: processes
    divide the files among them.
    """
    try:
        expected = expected_sums(folder)
    except FileNotFoundError as error:
        return f"{error.filename or error} is missing"
    except ValueError as error:
        return f"its checksums can't be read: {error}"
    sizes = sizes_in(folder)
    for name, known in expected.items():
        if name not in sizes:
            return f"{name} is missing"
        if sizes[name] != known.size:
            return f"{name} has {sizes[name]} bytes instead of {known.size}"
    # The largest files first, so that all processes get about as many bytes.
    mine = sorted(expected, key=lambda name: (-expected[name].size, name))[part::parts]
    actual = sums_of(folder, mine)
    wrong = [name for name in mine if actual[name] != expected[name]]
    return f"{wrong[0]} has changed since it was written" if wrong else None


def expected_sums(folder: AnyPath) -> dict[str, Checksum]:
    """The checksums of all files of a checkpoint's items."""
    expected: dict[str, Checksum] = {}
    for item in ITEMS:
        rest = _read_sums(folder / item / REST)
        listed = dict(rest)
        for name in rest:
            if name.startswith(f"{FOLDER}/"):
                listed |= _read_sums(folder / item / name)
        expected |= {f"{item}/{name}": known for name, known in listed.items()}
    return expected


# ------------------------------------------------------------------------------ hashing


def sums_of(folder: AnyPath, names: Sequence[str]) -> dict[str, Checksum]:
    """Size and hash of files in a folder."""
    if is_in_bucket(folder):
        facts = _object_facts(folder)
        return {name: Checksum(int(facts[name]["size"]), facts[name]["crc32c"]) for name in names}
    with ThreadPoolExecutor(_THREADS) as pool:
        return dict(zip(names, pool.map(lambda name: _sum_of(folder / name), names), strict=True))


def _sum_of(path: AnyPath) -> Checksum:
    return Checksum(path.stat().st_size, crc32c(path))


def names_in(folder: AnyPath) -> list[str]:
    """All files below a folder, as sorted relative paths."""
    return sorted(sizes_in(folder))


def sizes_in(folder: AnyPath) -> dict[str, int]:
    """The bytes of each file below a folder, by its relative path."""
    if is_in_bucket(folder):
        return {name: int(facts["size"]) for name, facts in _object_facts(folder).items()}
    return {
        file.relative_to(folder).as_posix(): file.stat().st_size
        for file in folder.rglob("*")
        if file.is_file()
    }


def _object_facts(folder: AnyPath) -> dict[str, Mapping]:
    """The bucket's metadata of each object below a folder, by its relative path."""
    prefix = str(folder).partition("://")[2].rstrip("/") + "/"
    objects = bucket_files().find(prefix, detail=True)
    return {name.removeprefix(prefix): facts for name, facts in objects.items()}
