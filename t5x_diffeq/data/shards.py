"""Writes and reads token shards: ArrayRecord files of tokenised documents, with a manifest.

A folder of shards holds, for each split, files `train-00003-of-00016.array_record` (records of a
document's tokens and `end_of_text`, little-endian uint16 or uint32; a long document takes several).
The records of conversations hold codes instead, little-endian int32, which also say which tokens
are trained on (see `encoding`). Beside each file are the documents' lengths (`.lengths.npy`) and
the shard's facts (`.json`), written last: a shard without facts is incomplete. `manifest.json` is
written when every shard has been checked; `tokenizer/` holds the tokenizer.
"""

import io
import json
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from itertools import accumulate
from pathlib import Path

import grain
import numpy as np
from array_record.python.array_record_module import ArrayRecordWriter
from jaxtyping import Integer

from t5x_diffeq.data import manifest as checks
from t5x_diffeq.data.encoding import CODE_DTYPE, is_trained, token_dtype, tokens_of
from t5x_diffeq.data.manifest import MANIFEST, MASKS, SPLITS, TRAINED, read_manifest
from t5x_diffeq.data.rows import FAULTS, Skipped
from t5x_diffeq.system.console import log
from t5x_diffeq.system.errors import InputError, RunError
from t5x_diffeq.system.files import AnyPath, atomic_file, file_digest, read_json_object, write_whole
from t5x_diffeq.system.foreign_files import check_inside
from t5x_diffeq.system.staging import NoRoomError, stage

_OF_SHARD = ("source", "fingerprint", "documents", "tokens", "skipped", "sha256", "lengths_sha256")
IN_MEMORY_TOKENS = 64_000_000  # a split up to this size is read at once, in less than a second
RECORD_TOKENS = 4096  # per record: a window of a long document reads little more than it needs
TokenArray = Integer[np.ndarray, " length"]


def stem(split: str, index: int, count: int) -> str:
    """`train-00003-of-00016`."""
    return f"{split}-{index:05}-of-{count:05}"


def write_shard(
    folder: AnyPath, name: str, documents: Iterable[TokenArray], facts: dict, skipped: Skipped
) -> None:
    """Writes one shard; if the process is killed, the shard is complete or will be made again.

    The documents are in the dtype of the file; `skipped` is filled as they are taken. The `facts`
    are what determines the shard's content, and are stored with it.

    Raises:
      RunError: if it can't be written; existing files are kept.
    """
    try:
        with atomic_file(folder / f"{name}.array_record") as partial:
            lengths, largest, trained = _write_records(partial, documents)
            sha256 = file_digest(partial)
    except (RuntimeError, OSError) as error:
        raise RunError(
            f"shard {name} of {folder} can't be written: {error}; the finished shards are kept: "
            "free space or fix this, and run again"
        ) from error
    lengths_file = folder / f"{name}.lengths.npy"
    array = io.BytesIO()
    np.save(array, np.asarray(lengths, np.uint32))
    write_whole(lengths_file, array.getvalue())
    facts = {
        **facts,
        **skipped.as_json(),
        "documents": len(lengths),
        "tokens": sum(lengths),
        "largest_token": largest,
        **({TRAINED: trained} if facts.get(MASKS) else {}),
        "sha256": sha256,
        "lengths_sha256": file_digest(lengths_file),
    }
    write_whole(folder / f"{name}.json", json.dumps(facts, indent=2).encode())


def _write_records(path: Path, documents: Iterable[TokenArray]) -> tuple[list[int], int, int]:
    """Writes the records.

    Returns the documents' lengths, the largest token, and how many tokens are trained on.
    """
    # Each record is a group by itself, because the library reads a whole group to read a record.
    writer = ArrayRecordWriter(str(path), "group_size:1")
    lengths, largest, trained = [], 0, 0
    try:
        for tokens in documents:
            for first in range(0, len(tokens), RECORD_TOKENS):
                writer.write(tokens[first : first + RECORD_TOKENS].tobytes())
            lengths.append(len(tokens))
            largest = max(largest, int(tokens_of(tokens).max(initial=0)))
            trained += int(is_trained(tokens).sum())
    finally:
        writer.close()
    return lengths, largest, trained


def read_shard_facts(folder: AnyPath, name: str) -> dict | None:
    """A shard's facts; None if it is incomplete."""
    path = folder / f"{name}.json"
    if not (path.exists() and (folder / f"{name}.array_record").exists()):
        return None
    try:
        facts = read_json_object(path)
    except ValueError:
        return None
    return facts if {*_OF_SHARD} <= facts.keys() else None


def merge_shards(
    folder: AnyPath, count: int, facts: dict, max_unreadable: float, is_sample: bool = False
) -> dict:
    """Checks that every shard was made from `facts`, writes the manifest, and returns it.

    If the documents are a sample (`is_sample`), training reads more rows. Unreadable rows are then
    judged as in a source without end.

    Raises:
      InputError: if a shard is missing, damaged, or made from other data, or if too many rows are
        unreadable; it names the shard, or the first such row.
    """
    check_inside(folder.resolve())
    manifest, skipped = {**facts, "shards": count}, Skipped()
    for split in SPLITS:
        names = [stem(split, index, count) for index in range(count)]
        shards = [_read_checked_facts(folder, name, facts) for name in names]
        for shard in shards:
            skipped.add(shard["skipped"], shard.get(FAULTS, {}))
        summed = ("documents", "tokens", *([TRAINED] if facts.get(MASKS) else []))
        manifest[split] = {
            "names": names,
            "sha256": [shard["sha256"] for shard in shards],
            **{key: sum(shard[key] for shard in shards) for key in summed},
            "largest_token": [shard["largest_token"] for shard in shards],
            "lengths_sha256": [shard["lengths_sha256"] for shard in shards],
        }
    manifest |= skipped.as_json()
    documents = sum(manifest[split]["documents"] for split in SPLITS)
    # If the sample has no document to train on, this is the only check that names a row.
    is_enough = is_sample and manifest["train"]["documents"] > 0
    check = skipped.check_endless if is_enough else skipped.check
    check(documents + skipped.total(), max_unreadable)
    if not manifest["train"]["documents"]:
        raise InputError(
            f"{facts['source']} has no document to train on (skipped: {skipped}; to validate on: "
            f"{documents}); check what data.path names"
        )
    for left_over in folder.glob(".*.partial"):  # from killed processes
        left_over.unlink()
    write_whole(folder / MANIFEST, json.dumps(manifest, indent=2).encode())
    for split in SPLITS:
        checks.remember(folder, split, manifest)
    return manifest


def _read_checked_facts(folder: AnyPath, name: str, facts: dict) -> dict:
    shard = read_shard_facts(folder, name)
    if shard is None:
        raise InputError(f"shard {name} of {folder} is missing or incomplete; prepare it again")
    for key, value in facts.items():
        if key != "source" and shard.get(key) != value:  # the same data may have moved
            raise InputError(
                f"shard {name} of {folder} was made with {key} {shard.get(key)!r}, not {value!r}; "
                "delete it, or choose another --output"
            )
    hashes = {"array_record": shard["sha256"], "lengths.npy": shard["lengths_sha256"]}
    if any(file_digest(folder / f"{name}.{end}") != hash for end, hash in hashes.items()):
        raise InputError(
            f"shard {name} of {folder} is damaged: its content isn't what was written; delete "
            f"{name}.json and prepare it again"
        )
    return shard


class ShardedDocuments:
    """Random access to the tokenised documents of a split; an InputError names a bad shard."""

    def __init__(self, folder: AnyPath, split: str):
        facts = read_manifest(folder)
        names = facts[split]["names"]
        checks.verify(folder, split, facts)
        self.paths: Sequence[AnyPath] = [folder / f"{name}.array_record" for name in names]
        try:
            self.paths = stage(self.paths, facts[split]["sha256"])
        except NoRoomError as error:  # reading from the bucket is slower, but needs no disk
            log(f"reading the shards from the bucket, record by record: {error}")
        lengths = [checks.load_lengths(folder / f"{name}.lengths.npy") for name in names]
        self.lengths = np.concatenate(lengths)
        checks.check_amounts(folder, split, facts[split], self.lengths)
        self.dtype = CODE_DTYPE if facts.get(MASKS) else token_dtype(facts["vocab_size"])
        self.record_tokens = facts["record_tokens"]
        self.trained_tokens = facts[split].get(TRAINED, facts[split]["tokens"])
        records = [-(-each.astype(np.int64) // self.record_tokens) for each in lengths]
        self.first_records = np.cumsum(np.concatenate([[0], *records]), dtype=np.int64)
        self.shard_records = [0, *accumulate(int(each.sum()) for each in records)]
        for path, expected in zip(self.paths, map(np.sum, records), strict=True):
            checks.check_records(path, int(expected))
        self.records = grain.sources.ArrayRecordDataSource([str(path) for path in self.paths])
        self.ends = np.cumsum(self.lengths, dtype=np.int64)
        small = len(self.lengths) > 0 and self.ends[-1] <= IN_MEMORY_TOKENS
        numbers = range(self.first_records[-1])
        # All documents of a small split in one array; None: records are read as they are needed.
        self.row = np.concatenate(list(map(self._record, numbers))) if small else None

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, number: int) -> TokenArray:
        return tokens_of(self.slice(number, 0, int(self.lengths[number])))

    def slice(self, number: int, start: int, stop: int) -> TokenArray:
        """Codes `start` to `stop` (or the end) of document `number`."""
        if self.row is not None:
            begin, end = self.ends[number] - self.lengths[number], self.ends[number]
            return self.row[begin + start : min(begin + stop, end)]
        first = start // self.record_tokens
        last = (min(stop, int(self.lengths[number])) - 1) // self.record_tokens
        base = int(self.first_records[number])
        records = [self._record(base + n) for n in range(first, last + 1)]
        tokens = records[0] if len(records) == 1 else np.concatenate(records)
        skipped = first * self.record_tokens
        return tokens[start - skipped : stop - skipped]

    def _record(self, number: int) -> TokenArray:
        try:
            return np.frombuffer(self.records[number], self.dtype)
        except (RuntimeError, ValueError) as error:
            shard = bisect_right(self.shard_records, number) - 1
            raise InputError(
                f"{self.paths[shard]}: record {number - self.shard_records[shard]} can't be read: "
                f"{checks.cause(error)}; prepare that shard again"
            ) from error
