"""Writes a tokenizer in the files that Hugging Face's library reads.

Every tokenizer that a `tokenizer.json` can express is written as one, so that reading it takes no
other library. A sentencepiece model is also written as `tokenizer.model`. The settings beside these
files are those of the folder that a run was converted from. Only the settings that say how to read
the files are ours, so that `AutoTokenizer` makes the run's tokens.
"""

import json
from pathlib import Path
from typing import NamedTuple

from t5x_diffeq.data.fast_tokenizer import fast_tokenizer
from t5x_diffeq.data.file_tokenizers import JSON_FILE, HuggingFaceTokenizer, SentencePieceTokenizer
from t5x_diffeq.data.tokenizer import Tokenizer
from t5x_diffeq.data.tokenizer_folder import SENTENCEPIECE_FILE
from t5x_diffeq.data.tokenizer_settings import CONFIG_FILE, settings_in_json


class _TokenizerFiles(NamedTuple):
    """A tokenizer in Hugging Face's forms."""

    json: bytes | None = None  # content of `tokenizer.json`, if there can be one
    model: bytes | None = None  # content of `tokenizer.model`, if it is a sentencepiece model
    settings: dict[str, object] = {}  # noqa: RUF012  # how `tokenizer_config.json` says to read them
    lacking: str | None = None  # a note for the user on what these files can't express


def write_tokenizer(tokenizer: Tokenizer, folder: Path, max_length: int) -> str | None:
    """Writes the tokenizer's files; returns what a user must know, or None."""
    files, chat = _convert_tokenizer(tokenizer), tokenizer.chat
    end = tokenizer.special_tokens.get("eos_token")  # None for bytes: a text may contain any byte
    config = {
        "clean_up_tokenization_spaces": False,
        "add_bos_token": tokenizer.opener is not None,
        "add_eos_token": False,
        **settings_in_json(files.json),  # transformers 4.53 makes tokenizer.json obey these
    }
    if imported := tokenizer.imported.get(CONFIG_FILE):
        config |= imported
    elif end is not None:
        opener = end if tokenizer.opener is None else tokenizer.special_tokens["bos_token"]
        config |= {"bos_token": opener, "eos_token": end}
    if chat.template is not None:  # the template can name special tokens
        config |= {"chat_template": chat.template, **tokenizer.special_tokens, **chat.tokens}
    # Other classes would make another tokenizer from the vocabulary of these files.
    read_by = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": max_length}
    config |= read_by | files.settings
    for name, content in ((JSON_FILE, files.json), (SENTENCEPIECE_FILE, files.model)):
        if content:
            (folder / name).write_bytes(content)
    (folder / CONFIG_FILE).write_text(json.dumps(config, indent=2, ensure_ascii=False), "utf-8")
    return files.lacking


def _convert_tokenizer(tokenizer: Tokenizer) -> _TokenizerFiles:
    if isinstance(tokenizer, HuggingFaceTokenizer):
        return _TokenizerFiles(json=tokenizer.model)
    reads_names = tokenizer.chat.template is not None
    fast = fast_tokenizer(tokenizer, reads_names=reads_names)
    content = None if fast is None else fast.to_str(pretty=True).encode()
    if not isinstance(tokenizer, SentencePieceTokenizer):
        return _TokenizerFiles(content)
    settings: dict[str, object] = {} if reads_names else {"split_special_tokens": True}
    if content is None:
        settings["legacy"] = True  # a space before every part, as sentencepiece puts it
        note = (
            "the tokenizer is not a plain byte-pair encoding, so there is no tokenizer.json: use "
            "tokenizer.model with the library sentencepiece; transformers takes the names of "
            "special tokens and bytes in a text for these tokens"
        )
        return _TokenizerFiles(None, tokenizer.model, settings, note)
    lacking: str | None = None
    if reads_names:
        lacking = (
            "the name of a special token in a text is that token, as the chat template needs it; "
            "in the run it is text"
        )
    return _TokenizerFiles(content, tokenizer.model, settings, lacking)
