"""The tokenizer in a folder, and the recipe that it was made by."""

import json

from t5x_diffeq.config.config import DataKeys
from t5x_diffeq.data.documents import Documents
from t5x_diffeq.data.tokenizer import Tokenizer, load_tokenizer, make_tokenizer, with_template
from t5x_diffeq.system.console import say
from t5x_diffeq.system.errors import InputError
from t5x_diffeq.system.files import AnyPath, parse_json, remove_folder, write_whole

_RECIPE = "recipe.json"


def _recipe_of(data: DataKeys, text: str | None = None) -> dict:
    """What determines the tokenizer of `config.data`; `text` is the documents' fingerprint."""
    trained = data.tokenizer == "sentencepiece"
    return {
        "tokenizer": data.tokenizer,
        "tokenizer_vocab_size": data.tokenizer_vocab_size if trained else None,
        "end_of_text": data.end_of_text,
        "chat_template": data.chat_template,
        "text": text if trained else None,
    }


def adopt_tokenizer(tokenizer: Tokenizer, folder: AnyPath, data: DataKeys) -> None:
    """Saves another run's tokenizer as the one for `config.data`, with its chat template if any."""
    put_tokenizer(with_template(tokenizer, data), folder)
    write_whole(folder / _RECIPE, json.dumps(_recipe_of(data), indent=2).encode())


def put_tokenizer(tokenizer: Tokenizer, folder: AnyPath) -> None:
    """Saves the tokenizer as the only one in `folder`; a failed start may have left another."""
    there = load_tokenizer(folder)
    if there is not None and fingerprints(there) != fingerprints(tokenizer):
        remove_folder(folder)
    tokenizer.save(folder)


def fingerprints(tokenizer: Tokenizer) -> tuple[str, str]:
    """Hashes of everything that determines its tokens, and of how it writes conversations."""
    return tokenizer.fingerprint, tokenizer.chat.fingerprint


def _recipe_difference(folder: AnyPath, data: DataKeys, text: str | None) -> str | None:
    """How the recipe of the tokenizer in `folder` differs from `config.data`; None if it doesn't.

    The text of a tokenizer that was adopted, or trained by an earlier version, is not known.
    """
    path = folder / _RECIPE
    made_by = parse_json(path.read_bytes()) if path.exists() else {}
    for key, value in _recipe_of(data, text).items():
        if key == "text" and made_by.get(key) is None:
            continue
        if made_by.get(key) != value:
            return (
                "was trained on other text"
                if key == "text"
                else f"was made with data.{key} {made_by.get(key)!r}, not {value!r}"
            )
    return None


def tokenizer_in(
    folder: AnyPath,
    data: DataKeys,
    documents: Documents,
    text: str | None = None,
    discard: bool = False,
) -> Tokenizer:
    """The tokenizer of `config.data`, made and saved in `folder` if it isn't there yet.

    Args:
      folder: the tokenizer's folder.
      data: `config.data`.
      documents: the documents to train it on.
      text: their fingerprint.
      discard: whether to remove one made by another config, left over from a failed start.

    Raises:
      InputError: if `folder` holds one made by another config, or trained on other text.
    """
    there = load_tokenizer(folder)
    fault = _recipe_difference(folder, data, text) if there else None
    if there and not fault:
        return there
    if fault and not discard:
        raise InputError(
            f"the tokenizer in {folder} {fault}; choose another folder, or delete this one"
        )
    if fault:
        say(f"replacing {folder}: it is left over from a run that never started, and {fault}")
        remove_folder(folder)
    tokenizer = make_tokenizer(data, documents)  # deterministic: the same on any machine
    write_whole(folder / _RECIPE, json.dumps(_recipe_of(data, text), indent=2).encode())
    tokenizer.save(folder)
    return tokenizer
