"""Tokenizers in the files that Hugging Face's library reads and writes.

Every tokenizer that a `tokenizer.json` can express is written as one, so that reading it takes no
other library. A sentencepiece model is also written as `tokenizer.model`.

A folder also says what training doesn't change: which tokens begin and end a text and stop a
generation, how tokens are drawn by default, how the library's tokenizer behaves. `convert` keeps
that beside the run's tokenizer, and `export` writes it again.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from t5x_diffeq.data.chat import fast_tokenizer, parse_sentencepiece
from t5x_diffeq.data.chat_template import read_settings
from t5x_diffeq.data.file_tokenizers import HuggingFaceTokenizer, SentencePieceTokenizer
from t5x_diffeq.data.tokenizer import Tokenizer
from t5x_diffeq.system.errors import InputError

_MODEL_FILE = "tokenizer.model"
_JSON_FILE = "tokenizer.json"
_CONFIG_FILE = "tokenizer_config.json"
_ADDED_FILE = "added_tokens.json"
GENERATION_FILE = "generation_config.json"


class _TokenizerFiles(NamedTuple):
    """A tokenizer in Hugging Face's forms."""

    json: bytes | None = None  # content of `tokenizer.json`, if there can be one
    model: bytes | None = None  # content of `tokenizer.model`, if it is a sentencepiece model
    settings: dict[str, object] = {}  # noqa: RUF012  # further keys of `tokenizer_config.json`
    lacking: str | None = None  # a note for the user on what these files can't express


def write_tokenizer(tokenizer: Tokenizer, folder: Path, max_length: int) -> str | None:
    """Writes the tokenizer's files; returns what a user must know, or None."""
    files, chat = _convert_tokenizer(tokenizer), tokenizer.chat
    end = tokenizer.special_tokens.get("eos_token")  # bytes have none that no text could contain
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast" if files.json else "LlamaTokenizer",
        "model_max_length": max_length,
        "clean_up_tokenization_spaces": False,
        "add_bos_token": tokenizer.opener is not None,
        "add_eos_token": False,
        **files.settings,
    }
    if imported := tokenizer.imported.get(_CONFIG_FILE):
        config |= imported
    elif end is not None:
        opener = end if tokenizer.opener is None else tokenizer.special_tokens["bos_token"]
        config |= {"bos_token": opener, "eos_token": end}
    if chat.template is not None:  # which can name the special tokens
        config |= {"chat_template": chat.template, **tokenizer.special_tokens, **chat.tokens}
    for name, content in ((_JSON_FILE, files.json), (_MODEL_FILE, files.model)):
        if content:
            (folder / name).write_bytes(content)
    (folder / _CONFIG_FILE).write_text(json.dumps(config, indent=2, ensure_ascii=False), "utf-8")
    return files.lacking


def _convert_tokenizer(tokenizer: Tokenizer) -> _TokenizerFiles:
    if isinstance(tokenizer, HuggingFaceTokenizer):
        return _TokenizerFiles(json=tokenizer.model)
    made = fast_tokenizer(tokenizer)
    if not isinstance(tokenizer, SentencePieceTokenizer):
        return _TokenizerFiles(json=_encode(made))
    if made is None:
        lacking = (
            "the tokenizer is not a plain byte-pair encoding, so there is no tokenizer.json: use "
            "tokenizer.model with the library sentencepiece"
        )
        return _TokenizerFiles(model=tokenizer.model, lacking=lacking)
    rules = parse_sentencepiece(tokenizer).normalizer_spec
    settings = {"add_prefix_space": rules.add_dummy_prefix, "legacy": False}
    if tokenizer.opener is not None:
        from tokenizers.processors import TemplateProcessing

        opener = tokenizer.token_name(tokenizer.opener)
        made.post_processor = TemplateProcessing(
            f"{opener} $A", special_tokens=[(opener, tokenizer.opener)]
        )
    return _TokenizerFiles(_encode(made), tokenizer.model, settings)


def _encode(tokenizer: Any) -> bytes:
    return tokenizer.to_str(pretty=True).encode()


def tokenizer_file(folder: Path) -> Path | None:
    """The folder's tokenizer file, which `data.tokenizer` can name; None if it has none.

    If there are both, it is `tokenizer.model`, unless `tokenizer.json` has tokens that it lacks:
    those that were added for chats, for example.

    Raises:
      InputError: if `added_tokens.json` has tokens that neither file has, or a file is damaged.
    """
    model, complete = folder / _MODEL_FILE, folder / _JSON_FILE
    if not model.exists():
        return complete if complete.exists() else None
    known = _pieces_of(model)
    if complete.exists():
        content = read_settings(complete)
        vocabulary = content.get("model", {}).get("vocab", {})
        names = vocabulary if isinstance(vocabulary, dict) else (each[0] for each in vocabulary)
        added = (each["content"] for each in content.get("added_tokens", ()))
        return model if known.issuperset((*names, *added)) else complete
    lacking = sorted(read_settings(folder / _ADDED_FILE).keys() - known)
    if lacking:
        raise InputError(
            f"--input={folder}: {_MODEL_FILE} doesn't have {len(lacking)} tokens of {_ADDED_FILE}, "
            f"such as {lacking[0]}; write a {_JSON_FILE} with all of them "
            "(AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER))"
        )
    return model


def _pieces_of(model: Path) -> set[str]:
    import sentencepiece

    try:
        processor = sentencepiece.SentencePieceProcessor(model_file=str(model))
    except (RuntimeError, OSError) as error:
        raise InputError(f"{model} can't be read: {error}; restore it") from error
    return set(processor.id_to_piece(list(range(processor.get_piece_size()))))


def token_of_id(file: Path, number: int) -> str:
    """The name of the token with this number in a tokenizer's file.

    Raises:
      InputError: if the file has no such token, or is not a tokenizer's.
    """
    try:
        if file.suffix == ".json":
            import tokenizers

            token = tokenizers.Tokenizer.from_file(str(file)).id_to_token(number)
        else:
            import sentencepiece

            model = sentencepiece.SentencePieceProcessor(model_file=str(file))
            token = model.id_to_piece(number) if number < model.get_piece_size() else None
    except Exception as error:  # the libraries raise bare ones
        raise InputError(f"{file} can't be read: {error}; restore it") from error
    if token is None:
        raise InputError(
            f"--input: eos_token_id is {number}, and {file.name} has no such token; restore one"
        )
    return token


_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")  # in `config.json`
# What the run decides, or would name code; and what says which version wrote the file.
_NOT_KEPT = {
    GENERATION_FILE: ("transformers_version", "_from_model_config"),
    _CONFIG_FILE: ("chat_template", "model_max_length", "auto_map", "name_or_path"),
}


def read_imported(folder: Path, config_json: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """The folder's settings that are kept, by file and key; InputError if a file is damaged."""
    kept = {"config.json": {key: config_json[key] for key in _IDS if key in config_json}}
    for file, left_out in _NOT_KEPT.items():
        content = read_settings(folder / file)
        kept[file] = {key: value for key, value in content.items() if key not in left_out}
    return kept
