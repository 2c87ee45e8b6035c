"""Makes the tokenizer of `config.data`, and stores the recipe that made it in its folder."""

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
from t5x_diffeq.system.files import (
    AnyPath,
    digest,
    parse_path,
    read_json_object,
    write_whole,
)

TRAINED = "sentencepiece"  # the data.tokenizer that stands for a tokenizer trained on the data
_RECIPE = "recipe.json"
_CONTENTS = {"text": "was trained on other text", "files": "was made of files that have changed"}
_TRAINING_DOCUMENTS = 1_000_000  # at most this many, evenly spaced, train a tokenizer
_TRAINING_CHARACTERS = 100_000  # at most this many of each document, from its beginning


def _training_texts(documents: Documents, conversations: bool) -> Iterator[str]:
    for number in range(0, len(documents), -(-len(documents) // _TRAINING_DOCUMENTS) or 1):
        text = documents[number]
        if conversations and text:  # the text of an unreadable row is empty
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
    if data.tokenizer in ("bytes", TRAINED) and data.end_of_text is not None:
        raise InputError(
            f"data.end_of_text={data.end_of_text} names a token of a tokenizer that is a file, and "
            f"data.tokenizer is {data.tokenizer}; leave it out"
        )
    if data.tokenizer == "bytes":
        return ByteTokenizer()
    if data.tokenizer == TRAINED:
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
        missing = ", and there is no such file" if "/" in data.tokenizer else ""
        missing = ", and that is a folder; name the file in it" if path.is_dir() else missing
        raise InputError(
            f"data.tokenizer is {data.tokenizer!r}{missing}; it can be sentencepiece (trained on "
            "the data), bytes, or the path of a sentencepiece model or a tokenizer.json"
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


def adopt_tokenizer(tokenizer: Tokenizer, folder: AnyPath, data: DataKeys) -> None:
    """Saves another run's tokenizer as the one for `config.data`, with its chat template if any."""
    _save(with_template(tokenizer, data), folder, {**_keys_of(data), "adopted": True})


def whole_fingerprint(tokenizer: Tokenizer) -> str:
    """A hash of a tokenizer's tokens, its opener and its chat template."""
    return digest(
        map(str.encode, (tokenizer.fingerprint, str(tokenizer.opener), tokenizer.chat.fingerprint))
    )


def _save(tokenizer: Tokenizer, folder: AnyPath, recipe: dict) -> None:
    """Saves the tokenizer, and its recipe last: a folder without a recipe is half made."""
    tokenizer.save(folder)
    write_whole(folder / _RECIPE, json.dumps(recipe, indent=2).encode())


def _keys_of(data: DataKeys) -> dict:
    """The keys that determine the tokenizer of `config.data`."""
    return {
        "tokenizer": data.tokenizer,
        "tokenizer_vocab_size": data.tokenizer_vocab_size if data.tokenizer == TRAINED else None,
        "end_of_text": data.end_of_text,
        "chat_template": data.chat_template,
    }


def _read_recipe(path: AnyPath) -> dict:
    try:
        return read_json_object(path)
    except ValueError as error:
        raise InputError(
            f"{path} is damaged: {error}; restore it, or start in a new --workdir"
        ) from error


def _difference(made_by: dict, recipe: dict) -> str | None:
    """How the recipe of a stored tokenizer differs from the present one; None if it doesn't.

    Earlier versions did not store `files`, nor the oldest ones `text`.
    """
    if made_by.get("adopted"):
        return "is that of a run to be fine-tuned"
    for key, value in recipe.items():
        before = made_by.get(key)
        if key in _CONTENTS and before not in (None, value):
            return _CONTENTS[key]
        if key not in _CONTENTS and before != value:
            return f"was made with data.{key} {before!r}, not {value!r}"
    return None


def tokenizer_in(
    folder: AnyPath,
    data: DataKeys,
    documents: Documents,
    text: str | None = None,
    discard: bool = False,
) -> Tokenizer:
    """The tokenizer of `config.data`, made and saved in `folder` if it isn't there yet.

    A tokenizer that is to be trained is trained on `documents`, whose fingerprint is `text`. A
    tokenizer in the folder is used only if it was made with the same keys, text and files. With
    `discard`, another tokenizer is replaced: a failed start has left it.

    Raises:
      InputError: if `folder` holds another tokenizer, without `discard`.
    """
    trained = data.tokenizer == TRAINED
    # `named` has the content of the files that the config names, as they are now. If the tokenizer
    # is to be trained, only the chat template is such a file, and a tokenizer of bytes carries it.
    named = with_template(ByteTokenizer(), data) if trained else make_tokenizer(data, documents)
    files = whole_fingerprint(named)
    recipe = {**_keys_of(data), "text": text if trained else None, "files": files}
    path = folder / _RECIPE
    if path.exists() and (stored := load_tokenizer(folder)):
        if not (fault := _difference(_read_recipe(path), recipe)):
            return stored
        if not discard:
            raise InputError(
                f"the tokenizer in {folder} {fault}; choose another folder, or delete this one"
            )
        log(f"replacing {folder}: it is left over from a run that never started, and {fault}")
    # Training is deterministic: it makes the same tokenizer on any machine.
    tokenizer = make_tokenizer(data, documents) if trained else named
    _save(tokenizer, folder, recipe)
    return tokenizer
