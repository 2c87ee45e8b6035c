"""Checks once on each machine that token shards match their manifest.

Hashing all shards at each start would take as long as reading them. So what was checked is stored
in a small file in the user's cache (`staging.cache_folder`): each file's size, modification time
and hash. A file for which these are unchanged is not hashed again.
"""

import fcntl
import io
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from tokenize import TokenError

import grain
import numpy as np
from jaxtyping import Integer

from t5x_diffeq.data.manifest import MANIFEST, damage_error
from t5x_diffeq.runtime.console import format_count, say
from t5x_diffeq.runtime.errors import InputError, RunError
from t5x_diffeq.runtime.files import (
    AnyPath,
    absolute_path,
    describe_error,
    digest,
    file_digest,
    is_in_bucket,
    write_whole,
)
from t5x_diffeq.runtime.staging import cache_folder

_THREADS = 8
_RECORDS_AT_ONCE = 1024
_SAID_FROM = 10**9  # bytes; fewer are hashed in a second or two
_CheckedFiles = dict[str, list]  # by file: its size, time of change, hash, and the vocabulary


def verify(folder: AnyPath, split: str, manifest: dict) -> None:
    """Checks the shards of a split against the manifest, unless this machine has done so.

    Copies of shards in a bucket are checked where they are made (`staging`).

    Raises:
      InputError: if a shard is missing, changed, or holds a token beyond the vocabulary; names it.
    """
    largest = manifest[split].get("largest_token") or [None] * len(manifest[split]["names"])
    for name, token in zip(manifest[split]["names"], largest, strict=True):
        _check_largest(folder, name, token or 0, manifest["vocab_size"])
    if is_in_bucket(folder):
        return
    with _open_record(folder, split) as stamp:
        now, before = _facts_now(folder, split, manifest), _read_stamp(stamp)
        names = [
            name
            for name in manifest[split]["names"]
            if any(before.get(file) != now[file] for file in _shard_files(name))
        ]
        if not names:
            return
        size = sum(now[file][0] for name in names for file in _shard_files(name))
        if size >= _SAID_FROM:
            say(f"checking {format_count(size)} bytes of shards in {folder}, once on this machine")
        with ThreadPoolExecutor(_THREADS) as pool:
            list(pool.map(lambda name: _check_shard(folder, split, name, manifest), names))
        _write_stamp(stamp, now)


def remember(folder: AnyPath, split: str, manifest: dict) -> None:
    """Records that the shards of a split have just been checked."""
    if is_in_bucket(folder):
        return
    with _open_record(folder, split) as stamp:
        _write_stamp(stamp, _facts_now(folder, split, manifest))


@contextmanager
def _open_record(folder: AnyPath, split: str) -> Iterator[Path | None]:
    """A context with the file that records what was checked, locked; None if there is no cache."""
    name = f"verified-{digest([str(absolute_path(folder)).encode(), split.encode()])[:32]}"
    try:
        cache_folder().mkdir(parents=True, exist_ok=True, mode=0o700)
        lock = (cache_folder() / f"{name}.lock").open("w")
        fcntl.flock(lock, fcntl.LOCK_EX)
    except OSError as error:
        say(
            f"warning: T5X_DIFFEQ_CACHE={cache_folder()}: {describe_error(error)}; shards are "
            f"checked anew"
        )
        yield None
        return
    with lock:
        yield cache_folder() / f"{name}.json"


def _read_stamp(stamp: Path | None) -> _CheckedFiles:
    try:
        found = json.loads(stamp.read_text()) if stamp else {}
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _write_stamp(stamp: Path | None, checked: _CheckedFiles) -> None:
    if stamp is None:
        return
    try:
        write_whole(stamp, json.dumps(checked).encode())
    except RunError as error:
        say(f"warning: {error}; shards are checked anew at the next start")


def _shard_files(name: str) -> tuple[str, str]:
    return f"{name}.array_record", f"{name}.lengths.npy"


def _facts_now(folder: AnyPath, split: str, manifest: dict) -> _CheckedFiles:
    """Each file's size and modification time, and what the manifest says about it."""
    facts, made = {}, manifest[split]
    of_lengths = made.get("lengths_sha256") or [None] * len(made["names"])
    for name, *hashes in zip(made["names"], made["sha256"], of_lengths, strict=True):
        for file, sha256 in zip(_shard_files(name), hashes, strict=True):
            try:
                stat = (folder / file).stat()
            except OSError as error:
                raise InputError(
                    f"shard {folder / file} can't be read: {describe_error(error)}; restore it, or "
                    "prepare it again"
                ) from error
            facts[file] = [stat.st_size, stat.st_mtime_ns, sha256, manifest["vocab_size"]]
    return facts


def _check_shard(folder: Path, split: str, name: str, manifest: dict) -> None:
    """Checks that a shard's files have the manifest's hashes, and were made with its tokenizer."""
    made = manifest[split]
    number = made["names"].index(name)
    hashes = made["sha256"][number], (made.get("lengths_sha256") or {number: None})[number]
    for file, expected in zip(_shard_files(name), hashes, strict=True):
        found = expected and file_digest(folder / file)
        if found != expected:
            raise InputError(
                f"shard {folder / file} is not the one that {MANIFEST} names: its sha256 is "
                f"{found[:12]}..., not {expected[:12]}...; restore it, or prepare it again"
            )
    _check_facts(folder, name, manifest)
    if not made.get("largest_token"):
        token = _largest_token(folder / _shard_files(name)[0], manifest["vocab_size"])
        _check_largest(folder, name, token, manifest["vocab_size"])


def _check_facts(folder: Path, name: str, manifest: dict) -> None:
    """Checks that the facts beside a shard, if they exist, agree with the manifest."""
    try:
        facts = json.loads((folder / f"{name}.json").read_text())
    except (OSError, ValueError):
        return  # only making shards needs them
    for key in ("tokenizer", "vocab_size", "record_tokens"):
        if facts.get(key) != manifest[key]:
            raise InputError(
                f"{folder / MANIFEST} says that {key} is {manifest[key]!r}, and shard {name} was "
                f"made with {facts.get(key)!r}; restore the manifest, or prepare the shards again"
            )


def _largest_token(path: Path, vocab_size: int) -> int:
    """The largest token of a shard from before this was written beside it."""
    records = grain.sources.ArrayRecordDataSource([str(path)])
    dtype, largest = np.dtype("<u2" if vocab_size <= 2**16 else "<u4"), 0
    for start in range(0, len(records), _RECORDS_AT_ONCE):
        numbers = range(start, min(start + _RECORDS_AT_ONCE, len(records)))
        tokens = np.frombuffer(b"".join(records.__getitems__(numbers)), dtype)
        largest = max(largest, int(tokens.max(initial=0)))
    return largest


def _check_largest(folder: AnyPath, name: str, token: int, vocab_size: int) -> None:
    """Checks that no token of a shard is beyond the vocabulary."""
    if token >= vocab_size:
        raise InputError(
            f"shard {name} of {folder} holds token {token}, and its tokenizer has {vocab_size}; "
            "prepare the shards again with the tokenizer that they are to have"
        )


def load_lengths(path: AnyPath) -> Integer[np.ndarray, " documents"]:
    """The lengths of a shard's documents.

    Raises:
      InputError: if they can't be read.
    """
    try:
        lengths = np.load(io.BytesIO(path.read_bytes()))
    except (OSError, ValueError, EOFError, TokenError) as error:  # TokenError: NumPy's header
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
    found = {"documents": len(lengths), "tokens": int(lengths.sum(dtype=np.int64))}
    for key, number in found.items():
        if facts[key] != number:
            fault = f"it says {facts[key]} {key} of {split}, and its shards hold {number}"
            raise InputError(damage_error(folder, fault))


def check_records(path: AnyPath, expected: int) -> None:
    """Checks that a shard can be opened and holds as many records as its lengths imply.

    Raises:
      InputError: if it can't be opened, or the number of records differs.
    """
    try:
        found = len(grain.sources.ArrayRecordDataSource([str(path)]))
    except (RuntimeError, OSError) as error:
        raise InputError(f"shard {path} can't be read: {cause(error)}; prepare it again") from error
    if found != expected:
        raise InputError(
            f"shard {path} holds {found} records, and its lengths are of {expected}; prepare it "
            "again"
        )


def cause(error: Exception) -> str:
    """What the library says is wrong, which may be just `;`."""
    return describe_error(error).strip("; ") or "it is damaged or cut off"
