"""The base class of tokenizers, from text to integers and back, and the tokenizer of bytes."""

import json
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from itertools import pairwise
from typing import Any, ClassVar, NamedTuple

import jax
import numpy as np
from jaxtyping import Integer

from t5x_diffeq.data.chat_template import ChatFormat
from t5x_diffeq.system.arguments import checked
from t5x_diffeq.system.errors import InputError
from t5x_diffeq.system.files import AnyPath, write_whole

BYTES_FILE = "bytes"
MODEL_FILES = ("sentencepiece.model", "tokenizer.json", BYTES_FILE)
END_FILE = "end_of_text.json"
IMPORTED_FILE = "imported.json"
OPENER_FILE = "opener.json"
TokenSequence = list[int] | Integer[np.ndarray, " length"] | Integer[jax.Array, " length"]


class Border(NamedTuple):
    """The tokens between two documents; most tokenizers have one for both.

    `end` closes a document, as a target; `opener` opens the next one, as an input.
    """

    end: int
    opener: int


def as_list(ids: Any) -> list[Any]:
    """The ids as a list; a folder can give a list, a single id or None."""
    return ids if isinstance(ids, list) else [] if ids is None else [ids]


def check_utf8(text: str, name: str) -> None:
    """Raises an InputError for a lone surrogate, which stands for a byte that isn't UTF-8."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise InputError(f"{name} is not UTF-8 text; correct it: {text!r:.60}") from error


class Tokenizer(ABC):
    """The base class of tokenizers, made of the content of a file.

    Attributes:
      end_of_text: the token that ends every document.
      opener: the token that the tokenizer's files put before every text; None if they put none.
      fingerprint: a hash of everything that determines the tokens of a text, but for the opener.
      special_tokens: the special tokens' names, by the names that chat templates have for them.
      chat: what its files say about conversations; the fingerprint doesn't depend on it.
      imported: the settings of tokenizer and generation in a converted folder, by file (see
        `hf.tokenizer_files`); the fingerprint doesn't depend on them.
    """

    vocab_size: int
    end_of_text: int
    fingerprint: str
    _file: ClassVar[str]

    def __init__(self, model: bytes, end: str | None):
        self.model, self._end = model, end
        self.threads = os.cpu_count() or 1
        self.special_tokens: Mapping[str, str] = {} if end is None else {"eos_token": end}
        self.chat = ChatFormat()
        self.opener: int | None = None
        self.imported: Mapping[str, Mapping[str, Any]] = {}

    @abstractmethod
    def _encode(self, texts: Sequence[str]) -> list[Integer[np.ndarray, " length"]]: ...

    @abstractmethod
    def _decode(self, tokens: TokenSequence) -> str: ...

    @checked
    def encode(self, texts: Sequence[str]) -> list[Integer[np.ndarray, " length"]]:
        """The tokens of each text, without `end_of_text`.

        Args:
          texts: the texts, such as ["one", "two"].
        """
        return self._encode(texts)

    @checked
    def decode(self, tokens: TokenSequence) -> str:
        """The text of the tokens.

        Args:
          tokens: the tokens of one text, such as [72, 105].

        Raises:
          InputError: if the vocabulary has no such token.
        """
        numbers = np.asarray(tokens)
        if numbers.size and not 0 <= numbers.min() <= numbers.max() < self.vocab_size:
            wrong = next(n for n in numbers.flat if not 0 <= n < self.vocab_size)
            raise InputError(
                f"tokens has {wrong}; the tokens of this vocabulary are 0 to {self.vocab_size - 1}"
            )
        return self._decode(tokens)

    @property
    def border(self) -> Border:
        """The tokens between two documents; without an opener, `end_of_text` is both of them."""
        return Border(self.end_of_text, self.end_of_text if self.opener is None else self.opener)

    @property
    def stops(self) -> frozenset[int]:
        """The tokens that end a continuation: `end_of_text`, and all stop ids of a folder."""
        named = (settings.get("eos_token_id") for settings in self.imported.values())
        return frozenset({self.end_of_text}.union(*map(as_list, named)))

    def read(
        self,
        text: str,
        name: str,
        limit: int | None = None,
        ask: Callable[[str], list[int]] | None = None,
    ) -> list[int]:
        """The tokens of a text as a model reads them: after the opener, if there is one.

        Args:
          name: what an error calls the text.
          limit: most tokens that the model takes; an empty text is then the start of a document.
            None: the text is a part of another one, so it can be empty and of any length.
          ask: writes the text as a message (see `Chat.ask`), perhaps with the opener.

        Raises:
          InputError: if the text is not UTF-8, or has more tokens than `limit`.
        """
        check_utf8(text, name)
        opener = [] if self.opener is None else [self.opener]
        tokens = ask(text) if ask else self.encode([text])[0].tolist()
        if not ask or tokens[:1] != opener:
            tokens = [*opener, *tokens]
        if limit is None:
            return tokens
        if len(tokens) > limit:
            raise InputError(
                f"{name} has {len(tokens)} tokens; the model takes 1 to {limit}: "
                f"shorten {text!r:.60}"
            )
        return tokens or [self.border.opener]

    def pieces(self, tokens: TokenSequence) -> list[str]:
        """The text of each token; a character of several tokens stands at the last of them."""
        texts = [""]
        for end in range(1, len(tokens) + 1):
            text = self._decode(tokens[:end])
            # A token can end within a character, which then decodes to the replacement character.
            complete = text.rstrip("\ufffd") if end < len(tokens) else text
            texts.append(max(texts[-1], complete, key=len))
        return [after[len(before) :] for before, after in pairwise(texts)]

    def save(self, folder: AnyPath) -> None:
        """Makes this the only tokenizer in `folder`, where `load_tokenizer` finds it.

        A folder without a model has no tokenizer. So another model is removed first, and this one
        is written last: an interrupted save leaves no tokenizer. Several processes may save the
        same tokenizer at once.
        """
        settings = {
            OPENER_FILE: self.opener,
            IMPORTED_FILE: self.imported or None,
            END_FILE: self._end,
        }
        files = dict(self.chat.files)
        for name, value in settings.items():
            if value is not None:
                files[name] = json.dumps(value, indent=2).encode()
        files[self._file] = self.model
        existing = [*folder.iterdir()] if folder.is_dir() else []
        for path in sorted(existing, key=lambda path: path.name not in MODEL_FILES):
            with suppress(FileNotFoundError):  # another process has removed it
                # A hidden file may be one that another process is writing.
                if path.name[0] != "." and path.read_bytes() != files.get(path.name):
                    path.unlink()
        for name, content in files.items():
            write_whole(folder / name, content)


class ByteTokenizer(Tokenizer):
    """The bytes of UTF-8. Byte 0, which no text contains, ends a document.

    Bytes that are not UTF-8 decode to the replacement character.
    """

    vocab_size = 256
    end_of_text = 0
    fingerprint = "bytes"
    _file = BYTES_FILE

    def __init__(self) -> None:
        super().__init__(b"", None)

    def _encode(self, texts: Sequence[str]) -> list[Integer[np.ndarray, " length"]]:
        return [np.frombuffer(text.encode("utf-8"), np.uint8) for text in texts]

    def _decode(self, tokens: TokenSequence) -> str:
        return bytes(list(tokens)).decode("utf-8", errors="replace")
