"""Checks once on each machine that token shards match their manifest.

Hashing all shards at each start would take as long as reading them. So what was checked is stored
in a small file in the user's cache (`staging.cache_folder`): each file's size, modification time
and hash. A file for which these are unchanged is not hashed again.
"""

import io
import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grain
import numpy as np
from jaxtyping import Integer

from t5x_diffeq.data.manifest import MANIFEST, damage_error
from t5x_diffeq.system.console import format_count, say
from t5x_diffeq.system.errors import InputError, RunError
from t5x_diffeq.system.files import (
    AnyPath,
    absolute_path,
    describe_error,
    digest,
    file_digest,
    is_in_bucket,
    parse_json,
    write_whole,
)
from t5x_diffeq.system.staging import cache_folder

_THREADS = 8
_SAID_FROM = 10**9  # bytes; fewer are hashed in a second or two
_CheckedFiles = dict[str, list]  # by file: its size, time of change, and hash


def verify(folder: AnyPath, split: str, manifest: dict) -> None:
    """Checks the shards of a split against the manifest, unless this machine has done so.

    Copies of shards in a bucket are checked where they are made (`staging`).

    Raises:
      InputError: if a shard is missing, changed, or holds a token beyond the vocabulary; names it.
    """
    vocab_size = manifest["vocab_size"]
    for name, token in zip(manifest[split]["names"], manifest[split]["largest_token"], strict=True):
        if token >= vocab_size:
            raise InputError(
                f"shard {name} of {folder} holds token {token}, but its tokenizer has "
                f"{vocab_size} tokens; prepare the shards again with the right tokenizer"
            )
    if is_in_bucket(folder):
        return
    record = _record_of(folder, split)
    now, before = _files_now(folder, manifest[split]), _read_record(record)
    changed = [file for file in now if before.get(file) != now[file]]
    if not changed:
        return
    size = sum(now[file][0] for file in changed)
    if size >= _SAID_FROM:
        say(f"checking {format_count(size)} bytes of shards in {folder}, once on this machine")
    with ThreadPoolExecutor(_THREADS) as pool:
        list(pool.map(lambda file: _check_hash(folder / file, now[file][-1]), changed))
    _write_record(record, now)


def remember(folder: AnyPath, split: str, manifest: dict) -> None:
    """Records that the shards of a split have just been checked."""
    if not is_in_bucket(folder):
        _write_record(_record_of(folder, split), _files_now(folder, manifest[split]))


def _record_of(folder: AnyPath, split: str) -> Path:
    """The file that records what was checked."""
    name = digest([str(absolute_path(folder)).encode(), split.encode()])[:32]
    return cache_folder() / f"verified-{name}.json"


def _read_record(record: Path) -> _CheckedFiles:
    try:
        checked = parse_json(record.read_bytes())
    except (OSError, ValueError):
        return {}
    return checked if isinstance(checked, dict) else {}


def _write_record(record: Path, checked: _CheckedFiles) -> None:
    try:
        record.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        write_whole(record, json.dumps(checked).encode())
    except (OSError, RunError) as error:
        say(
            f"warning: T5X_DIFFEQ_CACHE={cache_folder()}: {describe_error(error)}; shards are "
            "checked again at the next start"
        )


def _files_now(folder: AnyPath, facts: dict) -> _CheckedFiles:
    """Each file's size and modification time, and the hash that the manifest gives it."""
    files = {}
    for end, key in ((".array_record", "sha256"), (".lengths.npy", "lengths_sha256")):
        for name, sha256 in zip(facts["names"], facts[key], strict=True):
            path = folder / f"{name}{end}"
            try:
                stat = path.stat()
            except OSError as error:
                raise InputError(
                    f"shard {path} can't be read: {describe_error(error)}; restore it, or prepare "
                    "it again"
                ) from error
            files[path.name] = [stat.st_size, stat.st_mtime_ns, sha256]
    return files


def _check_hash(file: AnyPath, expected: str) -> None:
    sha256 = file_digest(file)
    if sha256 != expected:
        raise InputError(
            f"shard {file} is not the one that {MANIFEST} names: its sha256 is {sha256[:12]}..., "
            f"not {expected[:12]}...; restore it, or prepare it again"
        )


def load_lengths(path: AnyPath) -> Integer[np.ndarray, " documents"]:
    """The lengths of a shard's documents.

    Raises:
      InputError: if they can't be read.
    """
    try:
        lengths = np.load(io.BytesIO(path.read_bytes()))
    except Exception as error:  # NumPy raises errors of many classes
        raise InputError(
            f"{path} can't be read: {describe_error(error)}; prepare that shard again"
        ) from error
    if lengths.ndim != 1 or lengths.dtype.kind != "u":
        raise InputError(f"{path} holds no lengths of documents; prepare that shard again")
    return lengths


def check_amounts(folder: AnyPath, split: str, facts: dict, lengths: np.ndarray) -> None:
    """Checks the manifest's numbers of documents and tokens.

    Raises:
      InputError: if they are wrong; gives both numbers.
    """
    amounts = {"documents": len(lengths), "tokens": int(lengths.sum(dtype=np.int64))}
    for key, amount in amounts.items():
        if facts[key] != amount:
            fault = f"it says {facts[key]} {key} of {split}, and its shards hold {amount}"
            raise InputError(damage_error(folder, fault))


def check_records(path: AnyPath, expected: int) -> None:
    """Checks that a shard can be opened and holds as many records as its lengths imply.

    Raises:
      InputError: if it can't be opened, or the number of records differs.
    """
    try:
        records = len(grain.sources.ArrayRecordDataSource([str(path)]))
    except (RuntimeError, OSError) as error:
        raise InputError(f"shard {path} can't be read: {cause(error)}; prepare it again") from error
    if records != expected:
        raise InputError(
            f"shard {path} holds {records} records, and its lengths are of {expected}; prepare it "
            "again"
        )


def cause(error: Exception) -> str:
    """The library's error message, which may be just `;`."""
    return describe_error(error).strip("; ") or "it is damaged or cut off"
