"""The manifest of a folder of token shards: what they were made from, and the hash of each."""

from typing import Any

from t5x_diffeq.system.errors import InputError
from t5x_diffeq.system.files import AnyPath, parse_json

MANIFEST = "manifest.json"
SPLITS = ("train", "validation")
MASKS = "masks"  # true if the shards say which tokens are trained on; without it, all are
TRAINED = "trained_tokens"  # how many, in a shard and in a split
_FACTS = {"source": str, "tokenizer": str, "vocab_size": int, "record_tokens": int}
_OF_SPLIT = {"documents": int, "tokens": int}
_OF_SHARDS = {"names": str, "sha256": str, "lengths_sha256": str, "largest_token": int}


def read_manifest(folder: AnyPath) -> dict:
    """The manifest of a folder of shards.

    Raises:
      InputError: if there is no manifest, or it is damaged.
    """
    try:
        manifest = parse_json((folder / MANIFEST).read_bytes())
        _check(manifest)
    except OSError as error:
        raise InputError(
            f"data.path={folder} holds no {MANIFEST}; data.source=tokens needs a folder that "
            "`python -m t5x_diffeq.prepare_data` has finished"
        ) from error
    except ValueError as error:
        raise InputError(damage_error(folder, str(error))) from error
    return manifest


def damage_error(folder: AnyPath, fault: str) -> str:
    """The error message for a damaged manifest."""
    return f"{folder / MANIFEST} is damaged: {fault}; restore it, or prepare the shards again"


def _check(manifest: Any) -> None:
    """Raises a ValueError that names what is missing or has the wrong type."""
    _check_types("it", manifest, {**_FACTS, **dict.fromkeys(SPLITS, dict)})
    masks = manifest.get(MASKS, False)
    if not isinstance(masks, bool):
        raise ValueError(f"its {MASKS!r} is {masks!r:.60}")
    of_split = {**_OF_SPLIT, **dict.fromkeys(_OF_SHARDS, list), **({TRAINED: int} if masks else {})}
    for split in SPLITS:
        facts = manifest[split]
        _check_types(split, facts, of_split)
        for key, kind in _OF_SHARDS.items():
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
