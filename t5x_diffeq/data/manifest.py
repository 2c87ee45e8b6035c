"""The manifest of a folder of token shards: what they were made from, and the hash of each."""

import json

from t5x_diffeq.runtime.errors import InputError
from t5x_diffeq.runtime.files import AnyPath

MANIFEST = "manifest.json"
SPLITS = ("train", "validation")
MASKS = "masks"  # true if the shards say which tokens are trained on; without it, all are
TRAINED = "trained_tokens"  # how many, in a shard and in a split
_FACTS = {"source": str, "tokenizer": str, "vocab_size": int, "record_tokens": int}
_OF_SPLIT = {"names": list, "sha256": list, "documents": int, "tokens": int}
_OF_SHARDS = {"names": str, "sha256": str, "lengths_sha256": str, "largest_token": int}


def read_manifest(folder: AnyPath) -> dict:
    """The manifest of a folder of shards.

    Raises:
      InputError: if there is no manifest, or it is damaged.
    """
    try:
        manifest = json.loads((folder / MANIFEST).read_text())
    except OSError as error:
        raise InputError(
            f"data.path={folder} holds no {MANIFEST}; data.source=tokens needs a folder that "
            "`python -m t5x_diffeq.prepare_data` has finished"
        ) from error
    except ValueError as error:
        raise InputError(damage_error(folder, str(error))) from error
    if fault := _fault_of(manifest):
        raise InputError(damage_error(folder, fault))
    return manifest


def damage_error(folder: AnyPath, fault: str) -> str:
    """The error message for a manifest that can't be used."""
    return f"{folder / MANIFEST} is damaged: {fault}; restore it, or prepare the shards again"


def _fault_of(manifest: object) -> str | None:
    if not isinstance(manifest, dict):
        return f"it is a {type(manifest).__name__}, not a JSON object"
    if fault := _fault_of_keys(manifest, _FACTS):
        return fault
    if not isinstance(manifest.get(MASKS, False), bool):
        return f"its {MASKS!r} is {manifest[MASKS]!r:.60}"
    splits = [split for split in SPLITS if split in manifest]
    if not splits:
        return f"it has neither {' nor '.join(SPLITS)}"
    for split in splits:
        facts = manifest[split]
        if not isinstance(facts, dict):
            return f"its {split} is no JSON object"
        needed = _OF_SPLIT | ({TRAINED: int} if manifest.get(MASKS) else {})
        if fault := _fault_of_keys(facts, needed):
            return f"of {split}, {fault}"
        if fault := _fault_of_shards(facts):
            return f"of {split}, {fault}"
    return None


def _fault_of_shards(facts: dict) -> str | None:
    """What is wrong with the lists of one value per shard: their length or type; or None."""
    shards = len(facts["names"])
    for key, kind in _OF_SHARDS.items():
        if key not in facts:
            continue  # a key that earlier versions did not write
        values = facts[key]
        if not isinstance(values, list) or not all(type(each) is kind for each in values):
            return f"its {key!r} is no list of {kind.__name__}"
        if len(values) != shards:
            return f"it has {shards} names and {len(values)} values in {key!r}"
    return None


def _fault_of_keys(facts: dict, types: dict[str, type]) -> str | None:
    """What is wrong with the keys: one is missing or its value has another type; or None."""
    for key, kind in types.items():
        if key not in facts:
            return f"it lacks {key!r}"
        if not isinstance(facts[key], kind) or isinstance(facts[key], bool):
            return f"its {key!r} is {facts[key]!r:.60}"
        if kind is int and facts[key] < (0 if key in (*_OF_SPLIT, TRAINED) else 1):
            return f"its {key!r} is {facts[key]}"
    return None
