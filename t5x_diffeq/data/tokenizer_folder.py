"""Reads the folder of a tokenizer: a folder of Hugging Face's, or one that a run has saved.

In a folder of Hugging Face's, `tokenizer.json` says how texts become tokens; without it,
`tokenizer.model` does, as the library sentencepiece reads it. Settings in the files beside them can
change the tokens: each setting is obeyed here, or refused by its name. A run saves the tokenizer
that results, so nothing in the run's folder changes the tokens again.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from t5x_diffeq.data.chat_template import (
    read_chat_format,
    read_settings,
)
from t5x_diffeq.data.fast_tokenizer import fast_tokenizer
from t5x_diffeq.data.file_tokenizers import (
    JSON_FILE,
    MODEL_FILE,
    FileTokenizer,
    HuggingFaceTokenizer,
    SentencePieceTokenizer,
)
from t5x_diffeq.data.tokenizer import (
    BYTES_FILE,
    END_FILE,
    IMPORTED_FILE,
    OPENER_FILE,
    ByteTokenizer,
    Tokenizer,
)
from t5x_diffeq.data.tokenizer_settings import CONFIG_FILE, obey_settings
from t5x_diffeq.system.errors import InputError
from t5x_diffeq.system.files import AnyPath, describe_error, parse_json
from t5x_diffeq.system.foreign_files import read_inside

SENTENCEPIECE_FILE = "tokenizer.model"  # in a folder of Hugging Face's
GENERATION_FILE = "generation_config.json"
_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")  # in `config.json`
# Keys that the run decides, that name code, or that say which version wrote the file.
_NOT_KEPT = {
    GENERATION_FILE: ("transformers_version", "_from_model_config"),
    CONFIG_FILE: ("chat_template", "model_max_length", "auto_map", "name_or_path"),
}


def tokenizer_file(folder: Path) -> Path | None:
    """The folder's tokenizer file, which `data.tokenizer` can name; None if it has none.

    It is `tokenizer.json`, unless `export` made that file of the `tokenizer.model` beside it.
    """
    model, complete = folder / SENTENCEPIECE_FILE, folder / JSON_FILE
    if not model.exists():
        return complete if complete.exists() else None
    return complete if complete.exists() and not _is_made_of(complete, model) else model


def _is_made_of(complete: Path, model: Path) -> bool:
    try:
        tokenizer = read_tokenizer(model)
    except InputError:
        return False
    fast = fast_tokenizer(tokenizer, reads_names=tokenizer.chat.template is not None)
    return fast is not None and json.loads(fast.to_str()) == read_settings(complete)


def token_names(file: Path, ids: list[Any]) -> list[str]:
    """The names of the tokens with these ids, a folder's `eos_token_id`, in a tokenizer's file.

    Raises:
      InputError: if the file has no such token, or is not a tokenizer's.
    """
    try:
        if file.suffix == ".json":
            import tokenizers

            vocabulary = tokenizers.Tokenizer.from_buffer(read_inside(file)).get_vocab()
            names = {number: name for name, number in vocabulary.items()}
        else:
            import sentencepiece

            model = sentencepiece.SentencePieceProcessor(model_proto=read_inside(file))
            names = dict(enumerate(map(model.id_to_piece, range(model.get_piece_size()))))
    except Exception as error:  # the libraries raise bare Exceptions
        raise InputError(f"{file} can't be read: {error}; restore it") from error
    for number in ids:
        if type(number) is not int or number not in names:
            raise InputError(
                f"--input: eos_token_id is {number!r}, and {file.name} has no such token; restore "
                "one"
            )
    return [names[number] for number in ids]


def read_imported(folder: Path, config_json: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """The folder's settings that are kept, by file and key; InputError if a file is damaged."""
    kept = {"config.json": {key: config_json[key] for key in _IDS if key in config_json}}
    for file, left_out in _NOT_KEPT.items():
        content = read_settings(folder / file)
        kept[file] = {key: value for key, value in content.items() if key not in left_out}
    return kept


def read_tokenizer(path: AnyPath, end_of_text: str | None = None) -> FileTokenizer:
    """The tokenizer in a file, a `tokenizer.json` or else a sentencepiece model.

    The files beside it are read, too: a chat template, and settings that change the tokens.

    Raises:
      InputError: if the file can't be read or has no token `end_of_text`, or a setting isn't
        supported.
    """
    tokenizer = _read_file(path, end_of_text)
    tokenizer.chat = read_chat_format(path.parent)
    return obey_settings(tokenizer, path)


def _read_file(path: AnyPath, end_of_text: str | None) -> FileTokenizer:
    kind = HuggingFaceTokenizer if path.suffix == ".json" else SentencePieceTokenizer
    try:
        if not (content := read_inside(path)):
            raise ValueError("it is empty")
        return kind(content, end_of_text)
    except InputError:  # it is a ValueError, too, and says what is wrong, such as `end_of_text`
        raise
    except (RuntimeError, ValueError, OSError) as error:
        # What sentencepiece says of a file that is no model is a line of its own source code.
        reason = "" if isinstance(error, RuntimeError) else f" ({describe_error(error)})"
        raise InputError(
            f"the tokenizer's file {path} is neither a sentencepiece model nor a tokenizer.json"
            f"{reason}; restore it, or name another (data.tokenizer)"
        ) from error


def load_tokenizer(folder: AnyPath) -> Tokenizer | None:
    """The tokenizer that a run saved in `folder`, or None; an InputError if it is damaged."""
    try:
        end, imported, opener = (
            parse_json(read_inside(folder / name)) if (folder / name).exists() else None
            for name in (END_FILE, IMPORTED_FILE, OPENER_FILE)
        )
    except ValueError as error:
        raise InputError(
            f"a JSON file in {folder} is damaged: {error}; restore it, or start in a new --workdir"
        ) from error
    files = [folder / name for name in (MODEL_FILE, JSON_FILE) if (folder / name).exists()]
    if not files and not (folder / BYTES_FILE).exists():
        return None
    tokenizer = _read_file(files[0], end) if files else ByteTokenizer()
    if isinstance(tokenizer, FileTokenizer):
        tokenizer.open_with(opener)
    tokenizer.chat, tokenizer.imported = read_chat_format(folder), imported or {}
    return tokenizer


def tokenizer_of_run(workdir: AnyPath, named: str = "workdir ") -> Tokenizer:
    """The tokenizer of a run; nothing else of the run's data is read.

    Raises:
      InputError: if it is lost or damaged; `named` stands before the workdir in the message.
    """
    if tokenizer := load_tokenizer(workdir / "tokenizer"):
        return tokenizer
    raise InputError(f"{named}{workdir} has lost its tokenizer/; restore it, or name another run")
