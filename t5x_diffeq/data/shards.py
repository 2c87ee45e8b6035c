"""Token shards: ArrayRecord files of tokenised documents, with a manifest.

A folder of shards holds, for each split, files `train-00003-of-00016.array_record` (a record per
document: its tokens and `end_of_text`, little-endian uint16 or uint32), beside each the documents'
lengths (`.lengths.npy`) and its facts (`.json`), written last: a shard without facts isn't whole.
`manifest.json` is written when every shard was checked; `tokenizer/` travels along.
"""

import hashlib
import json
import os
from collections.abc import Iterable, Sequence
from itertools import accumulate
from pathlib import Path

import grain
import numpy as np
from array_record.python.array_record_module import ArrayRecordWriter
from jaxtyping import Integer

from t5x_diffeq.errors import InputError
from t5x_diffeq.files import save_array, write_whole

MANIFEST = "manifest.json"
SPLITS = ("train", "validation")
TokenRow = Integer[np.ndarray, " length"]


def stem(split: str, index: int, count: int) -> str:
    """`train-00003-of-00016`."""
    return f"{split}-{index:05}-of-{count:05}"


def token_dtype(vocab_size: int) -> np.dtype:
    """The smallest that holds every token."""
    return np.dtype("<u2" if vocab_size <= 2**16 else "<u4")


def write_shard(folder: Path, name: str, documents: Iterable[TokenRow], facts: dict) -> dict:
    """Writes one shard; killed at any moment, it is either whole or begun again.

    Args:
      folder: of the shards.
      name: of the shard (`stem`).
      documents: each document's tokens, in the dtype of the file.
      facts: what decides the shard's content, kept with it.

    Returns:
      The shard's facts.
    """
    partial = folder / f".{name}.{os.getpid()}.partial"
    writer = ArrayRecordWriter(str(partial), "group_size:1")
    lengths = []
    for tokens in documents:
        writer.write(tokens.tobytes())
        lengths.append(len(tokens))
    writer.close()
    save_array(folder / f"{name}.lengths.npy", np.asarray(lengths, np.uint32))
    os.replace(partial, folder / f"{name}.array_record")
    facts = {
        **facts,
        "documents": len(lengths),
        "tokens": sum(lengths),
        "sha256": file_digest(folder / f"{name}.array_record"),
    }
    write_whole(folder / f"{name}.json", json.dumps(facts, indent=2).encode())
    return facts


def file_digest(path: Path) -> str:
    """SHA-256 of a file, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def read_facts(folder: Path, name: str) -> dict | None:
    """A whole shard's facts; None if it isn't whole."""
    path = folder / f"{name}.json"
    whole = path.exists() and (folder / f"{name}.array_record").exists()
    return json.loads(path.read_text()) if whole else None


def merge(folder: Path, count: int, facts: dict) -> dict:
    """Checks every shard against its facts and writes the manifest.

    Args:
      folder: of the shards.
      count: shards of each split.
      facts: what every shard must have been made from.

    Returns:
      The manifest.

    Raises:
      InputError: naming a shard that is missing, damaged, or made from something else.
    """
    manifest = {**facts, "shards": count}
    for split in SPLITS:
        names = [stem(split, index, count) for index in range(count)]
        found = [checked(folder, name, facts) for name in names]
        manifest[split] = {
            "names": names,
            "sha256": [shard["sha256"] for shard in found],
            "documents": sum(shard["documents"] for shard in found),
            "tokens": sum(shard["tokens"] for shard in found),
        }
    for left_over in folder.glob(".*.partial"):  # of processes that were killed
        left_over.unlink()
    write_whole(folder / MANIFEST, json.dumps(manifest, indent=2).encode())
    return manifest


def checked(folder: Path, name: str, facts: dict) -> dict:
    """A shard's facts, if it is whole and was made from `facts`."""
    found = read_facts(folder, name)
    if found is None:
        raise InputError(f"shard {name} of {folder} is missing or not whole; prepare it again")
    for key, value in facts.items():
        if found.get(key) != value:
            raise InputError(
                f"shard {name} of {folder} was made with {key} {found.get(key)!r}, not {value!r}; "
                "delete it, or choose another --output"
            )
    if file_digest(folder / f"{name}.array_record") != found["sha256"]:
        raise InputError(
            f"shard {name} of {folder} is damaged: its content is not what was written; delete "
            f"{name}.json and prepare it again"
        )
    return found


def read_manifest(folder: Path) -> dict:
    """The manifest of a folder of shards.

    Raises:
      InputError: if there is none.
    """
    try:
        return json.loads((folder / MANIFEST).read_text())
    except (OSError, ValueError) as error:
        raise InputError(
            f"data.path={folder} holds no {MANIFEST}; data.source=tokens needs a folder that "
            "`python -m t5x_diffeq.prepare_data` has finished"
        ) from error


class ShardedDocuments(Sequence):
    """The tokenised documents of a split, by number.

    Attributes:
      lengths: tokens of each document.
    """

    def __init__(self, folder: Path, names: Sequence[str]):
        self.paths = [folder / f"{name}.array_record" for name in names]
        lengths = [np.load(folder / f"{name}.lengths.npy") for name in names]
        self.lengths = np.concatenate(lengths)
        self.firsts = np.array([0, *accumulate(map(len, lengths))])
        self.dtype = token_dtype(json.loads((folder / MANIFEST).read_text())["vocab_size"])
        for path in self.paths:
            try:
                len(grain.sources.ArrayRecordDataSource([str(path)]))
            except (RuntimeError, OSError) as error:
                raise InputError(
                    f"shard {path} can't be read: {error}; prepare it again"
                ) from error
        self.records = grain.sources.ArrayRecordDataSource([str(path) for path in self.paths])
        count = len(self.records)
        if count != len(self.lengths):
            raise InputError(
                f"the shards of {folder} hold {count} documents, and their lengths are of "
                f"{len(self.lengths)}; prepare them again"
            )

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, number: int) -> TokenRow:
        """The tokens of document `number`.

        Raises:
          InputError: naming the shard, if the record is damaged.
        """
        try:
            record = self.records[number]
        except RuntimeError as error:
            shard = int(np.searchsorted(self.firsts, number, side="right")) - 1
            raise InputError(
                f"{self.paths[shard]}: document {number - self.firsts[shard]} can't be read: "
                f"{error}"
            ) from error
        return np.frombuffer(record, self.dtype)
