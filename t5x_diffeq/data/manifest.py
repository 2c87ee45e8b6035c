"""The manifest of a folder of token shards, and checks that the shards match it.

The manifest says what the shards were made from, and the hash of each. Hashing all shards at each
start would take as long as reading them. So the results of a check are stored in a small file in
the user's cache (`staging.cache_folder`): each file's size, modification time and hash. A file for
which these are unchanged is not hashed again on this machine.
"""

import io
import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grain
import numpy as np
from jaxtyping import Integer

from t5x_diffeq.system import files
from t5x_diffeq.system.console import format_count, log
from t5x_diffeq.system.errors import InputError, RunError
from t5x_diffeq.system.files import AnyPath, describe_error
from t5x_diffeq.system.foreign_files import MOST_BYTES_OF_ARRAYS, read_inside
from t5x_diffeq.system.staging import cache_folder

MANIFEST = "manifest.json"
SPLITS = ("train", "validation")
MASKS = "masks"  # true if the shards say which tokens are trained on; without it, all are
TRAINED = "trained_tokens"  # the number of tokens that are trained on, in a shard or a split
_FACTS = {"source": str, "tokenizer": str, "vocab_size": int, "record_tokens": int}
_SPLIT_TYPES = {"documents": int, "tokens": int}
_SHARD_TYPES = {"names": str, "sha256": str, "lengths_sha256": str, "largest_token": int}
_THREADS = 8
_LOGGED_FROM = 10**9  # bytes; fewer are hashed in a second or two
_CheckedFiles = dict[str, list]  # by file: its size, time of change, and hash


def read_manifest(folder: AnyPath) -> dict:
    """The manifest of a folder of shards; an InputError if there is none, or it is damaged."""
    try:
        manifest = files.parse_json(read_inside(folder / MANIFEST))
        _check(manifest)
    except PermissionError as error:
        raise InputError(f"{folder / MANIFEST} can't be read: {error.strerror}") from error
    except OSError as error:
        raise InputError(
            f"data.path={folder} holds no {MANIFEST}; data.source=tokens needs a folder that "
            "`python -m t5x_diffeq.prepare_data` has finished"
        ) from error
    except ValueError as error:
        raise InputError(_damage_error(folder, str(error))) from error
    return manifest


def _damage_error(folder: AnyPath, fault: str) -> str:
    return f"{folder / MANIFEST} is damaged: {fault}; restore it, or prepare the shards again"


def _check(manifest: Any) -> None:
    """Raises a ValueError that names the first entry that is missing or has the wrong type."""
    _check_types("it", manifest, {**_FACTS, **dict.fromkeys(SPLITS, dict)})
    masks = manifest.get(MASKS, False)
    if not isinstance(masks, bool):
        raise ValueError(f"its {MASKS!r} is {masks!r:.60}")
    types = {
        **_SPLIT_TYPES,
        **dict.fromkeys(_SHARD_TYPES, list),
        **({TRAINED: int} if masks else {}),
    }
    for split in SPLITS:
        facts = manifest[split]
        _check_types(split, facts, types)
        for key, kind in _SHARD_TYPES.items():
            if any(type(value) is not kind for value in facts[key]):
                raise ValueError(f"{key!r} of {split} is not a list of {kind.__name__}")
            if len(facts[key]) != len(facts["names"]):
                raise ValueError(f"{key!r} of {split} has another length than 'names'")


def _check_types(what: str, facts: object, types: dict[str, type]) -> None:
    if not isinstance(facts, dict):
        raise ValueError(f"{what} is a {type(facts).__name__}, not a JSON object")
    for key, kind in types.items():
        if key not in facts:
            raise ValueError(f"{what} lacks {key!r}")
        least = 1 if key in _FACTS else 0
        if type(facts[key]) is not kind or (kind is int and facts[key] < least):
            raise ValueError(f"{key!r} of {what} is {facts[key]!r:.60}")


def verify(folder: AnyPath, split: str, manifest: dict) -> None:
    """Checks the shards of a split against the manifest, unless this machine has done so.

    Shards in a bucket are not hashed here: `staging` checks their copies when it makes them.

    Raises:
      InputError: if a shard is missing, changed or has a token beyond the vocabulary; names it.
    """
    vocab_size = manifest["vocab_size"]
    for name, token in zip(manifest[split]["names"], manifest[split]["largest_token"], strict=True):
        if token >= vocab_size:
            raise InputError(
                f"shard {name} of {folder} holds token {token}, but its tokenizer has "
                f"{vocab_size} tokens; prepare the shards again with the right tokenizer"
            )
    if files.is_in_bucket(folder):
        return
    record = _record_of(folder, split)
    now, before = _files_now(folder, manifest[split]), _read_record(record)
    changed = [file for file in now if before.get(file) != now[file]]
    if not changed:
        return
    size = sum(now[file][0] for file in changed)
    if size >= _LOGGED_FROM:
        log(f"checking {format_count(size)} bytes of shards in {folder}, once on this machine")
    with ThreadPoolExecutor(_THREADS) as pool:
        list(pool.map(lambda file: _check_hash(folder / file, now[file][-1]), changed))
    _write_record(record, now)


def remember(folder: AnyPath, split: str, manifest: dict) -> None:
    """Records that the shards of a split have just been checked."""
    if not files.is_in_bucket(folder):
        _write_record(_record_of(folder, split), _files_now(folder, manifest[split]))


def _record_of(folder: AnyPath, split: str) -> Path:
    name = files.digest([str(files.absolute_path(folder)).encode(), split.encode()])[:32]
    return cache_folder() / f"verified-{name}.json"


def _read_record(record: Path) -> _CheckedFiles:
    try:
        return files.read_json_object(record)
    except (OSError, ValueError):
        return {}


def _write_record(record: Path, checked: _CheckedFiles) -> None:
    try:
        record.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        files.write_whole(record, json.dumps(checked).encode())
    except (OSError, RunError) as error:
        log(
            f"warning: T5X_DIFFEQ_CACHE={cache_folder()}: {describe_error(error)}; shards are "
            "checked again at the next start"
        )


def _files_now(folder: AnyPath, facts: dict) -> _CheckedFiles:
    """Each file's size and modification time, and the hash that the manifest gives it."""
    now = {}
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
            now[path.name] = [stat.st_size, stat.st_mtime_ns, sha256]
    return now


def _check_hash(file: AnyPath, expected: str) -> None:
    sha256 = files.file_digest(file)
    if sha256 != expected:
        raise InputError(
            f"shard {file} is not the one that {MANIFEST} names: its sha256 is {sha256[:12]}..., "
            f"not {expected[:12]}...; restore it, or prepare it again"
        )


def load_lengths(path: AnyPath) -> Integer[np.ndarray, " documents"]:
    """The lengths of a shard's documents; an InputError if they can't be read."""
    try:
        lengths = np.load(io.BytesIO(read_inside(path, MOST_BYTES_OF_ARRAYS)))
    except Exception as error:  # NumPy raises errors of many classes
        raise InputError(
            f"{path} can't be read: {describe_error(error)}; prepare that shard again"
        ) from error
    if lengths.ndim != 1 or lengths.dtype.kind != "u":
        raise InputError(f"{path} holds no lengths of documents; prepare that shard again")
    return lengths


def check_amounts(folder: AnyPath, split: str, facts: dict, lengths: np.ndarray) -> None:
    """Raises an InputError unless the manifest has the documents and tokens that shards hold."""
    amounts = {"documents": len(lengths), "tokens": int(lengths.sum(dtype=np.int64))}
    for key, amount in amounts.items():
        if facts[key] != amount:
            fault = f"it says {facts[key]} {key} of {split}, and its shards hold {amount}"
            raise InputError(_damage_error(folder, fault))


def check_records(path: AnyPath, expected: int) -> None:
    """Raises an InputError unless a shard can be opened and holds as many records as expected."""
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
    """The library's error message, or a general one: the library's may be just `;`."""
    return describe_error(error).strip("; ") or "it is damaged or cut off"
