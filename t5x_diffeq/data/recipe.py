"""The tokenizer of `config.data`: how it is made, and the recipe that its folder keeps of that."""

import json
from collections.abc import Iterator
from dataclasses import replace

from t5x_diffeq.config.config import DataKeys
from t5x_diffeq.data import chat_template
from t5x_diffeq.data.conversations import find_text_fault, text_of_conversation
from t5x_diffeq.data.documents import Documents
from t5x_diffeq.data.file_tokenizers import SentencePieceTokenizer
from t5x_diffeq.data.tokenizer import ByteTokenizer, Tokenizer
from t5x_diffeq.data.tokenizer_folder import load_tokenizer, read_tokenizer
from t5x_diffeq.system.console import Progress, log
from t5x_diffeq.system.errors import InputError
from t5x_diffeq.system.extras import need_package
from t5x_diffeq.system.files import AnyPath, parse_json, parse_path, remove_folder, write_whole

_RECIPE = "recipe.json"
_TRAINING_DOCUMENTS = 1_000_000  # at most this many, evenly spaced, train a tokenizer
_TRAINING_CHARACTERS = 100_000  # of each, from its beginning


def _training_texts(documents: Documents, conversations: bool) -> Iterator[str]:
    for number in range(0, len(documents), -(-len(documents) // _TRAINING_DOCUMENTS) or 1):
        text = documents[number]
        if conversations and text:  # that of an unreadable row is empty
            text = text_of_conversation(text)
        text = text[:_TRAINING_CHARACTERS]
        if find_text_fault(text) is None:
            yield text


def make_tokenizer(data: DataKeys, documents: Documents) -> Tokenizer:
    """The tokenizer of `config.data`; an InputError if it can't be read or made."""
    if data.chat_template is not None:
        need_package("transformers", "data.chat_template")  # before a tokenizer is trained
    return with_template(_make_tokenizer(data, documents), data)


def _make_tokenizer(data: DataKeys, documents: Documents) -> Tokenizer:
    if data.tokenizer in ("bytes", "sentencepiece") and data.end_of_text is not None:
        raise InputError(
            f"data.end_of_text={data.end_of_text} names a token of a tokenizer that is a file, and "
            f"data.tokenizer is {data.tokenizer}; leave it out"
        )
    if data.tokenizer == "bytes":
        return ByteTokenizer()
    if data.tokenizer == "sentencepiece":
        log("training the tokenizer")
        with Progress("training the tokenizer"):
            texts = _training_texts(documents, data.loss_on == "completion")
            tokenizer = SentencePieceTokenizer.train(texts, data.tokenizer_vocab_size)
        if tokenizer.vocab_size < data.tokenizer_vocab_size:
            log(
                f"data.tokenizer_vocab_size={data.tokenizer_vocab_size}: the text is too short for "
                f"so many tokens; the tokenizer has {tokenizer.vocab_size}"
            )
        return tokenizer
    path = parse_path(data.tokenizer, "data.tokenizer")
    if not path.is_file():
        raise InputError(
            f"data.tokenizer is {data.tokenizer!r}; it can be sentencepiece (trained on the data), "
            "bytes, or the path of a sentencepiece model or a tokenizer.json"
        )
    return read_tokenizer(path, data.end_of_text)


def with_template(tokenizer: Tokenizer, data: DataKeys) -> Tokenizer:
    """The tokenizer with the template of `data.chat_template`, if that is set."""
    if data.chat_template == "plain":
        template = chat_template.PLAIN_TEMPLATE
        tokenizer.chat = replace(tokenizer.chat, template=template, origin="plain")
    elif data.chat_template is not None:
        path = parse_path(data.chat_template, "data.chat_template")
        tokenizer.chat = chat_template.read_template(path, tokenizer.chat.tokens)
    return tokenizer


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
        before = made_by.get(key)
        if key != "text" and before != value:
            return f"was made with data.{key} {before!r}, not {value!r}"
        if key == "text" and before not in (None, value):
            return "was trained on other text"
    return None


def tokenizer_in(
    folder: AnyPath,
    data: DataKeys,
    documents: Documents,
    text: str | None = None,
    discard: bool = False,
) -> Tokenizer:
    """The tokenizer of `config.data`, made and saved in `folder` if it isn't there yet.

    It is trained on `documents`, whose fingerprint is `text`. `discard` removes one made by another
    config, left over from a failed start.

    Raises:
      InputError: if `folder` holds one made by another config, or trained on other text.
    """
    if there := load_tokenizer(folder):
        if not (fault := _recipe_difference(folder, data, text)):
            return there
        if not discard:
            raise InputError(
                f"the tokenizer in {folder} {fault}; choose another folder, or delete this one"
            )
        log(f"replacing {folder}: it is left over from a run that never started, and {fault}")
        remove_folder(folder)
    tokenizer = make_tokenizer(data, documents)  # deterministic: the same on any machine
    write_whole(folder / _RECIPE, json.dumps(_recipe_of(data, text), indent=2).encode())
    tokenizer.save(folder)
    return tokenizer
