"""Tokenizers: text to integers and back, behind one protocol."""

import io
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Protocol, runtime_checkable

import numpy as np
import sentencepiece
from jaxtyping import Integer
from ml_collections import ConfigDict

from t5x_diffeq.errors import InputError
from t5x_diffeq.files import digest, write_whole

MODEL_FILE = "sentencepiece.model"
BYTES_FILE = "bytes"
TokenRow = list[int] | Integer[np.ndarray, " length"]


@runtime_checkable
class Tokenizer(Protocol):
    """What the rest of the system asks of a tokenizer.

    Attributes:
      vocab_size: number of tokens.
      end_of_text: the token that ends every document.
      fingerprint: a hash of all that decides its output.
    """

    vocab_size: int
    end_of_text: int
    fingerprint: str

    def encode(self, texts: Sequence[str]) -> list[Integer[np.ndarray, " length"]]:
        """The tokens of each text, without `end_of_text`."""

    def decode(self, tokens: TokenRow) -> str:
        """The text of the tokens."""

    def save(self, folder: Path) -> None:
        """Writes what `load` needs into `folder`."""


class ByteTokenizer:
    """The bytes of UTF-8. Byte 0, which no text holds, ends a document."""

    vocab_size = 256
    end_of_text = 0
    fingerprint = "bytes"

    def encode(self, texts: Sequence[str]) -> list[Integer[np.ndarray, " length"]]:
        """The bytes of each text."""
        return [np.frombuffer(text.encode("utf-8"), np.uint8) for text in texts]

    def decode(self, tokens: TokenRow) -> str:
        """The text; bytes that are not UTF-8 become the replacement character."""
        return bytes(list(tokens)).decode("utf-8", errors="replace")

    def save(self, folder: Path) -> None:
        """A marker: there is nothing to keep."""
        (folder / MODEL_FILE).unlink(missing_ok=True)
        write_whole(folder / BYTES_FILE, b"")


class SentencePieceTokenizer:
    """A sentencepiece model (Kudo and Richardson 2018)."""

    def __init__(self, model: bytes):
        self.model = model
        self.processor = sentencepiece.SentencePieceProcessor(model_proto=model)
        self.vocab_size = self.processor.get_piece_size()
        self.end_of_text = self.processor.eos_id()
        self.fingerprint = digest([model])

    @classmethod
    def train(cls, texts: Iterable[str], vocab_size: int) -> "SentencePieceTokenizer":
        """Byte-pair encoding that gives text back as it was: newlines, indents, any character.

        But one: U+2581, sentencepiece's own sign for a space, comes back as a space.

        Raises:
          InputError: if the texts are too few for such a vocabulary.
        """
        model = io.BytesIO()
        try:
            sentencepiece.SentencePieceTrainer.train(
                sentence_iterator=(line for text in texts for line in text.splitlines()),
                model_writer=model,
                vocab_size=vocab_size,
                model_type="bpe",
                normalization_rule_name="identity",
                remove_extra_whitespaces=False,
                add_dummy_prefix=False,
                allow_whitespace_only_pieces=True,
                byte_fallback=True,
                split_digits=True,
                user_defined_symbols=["\n"],
                num_threads=os.cpu_count(),
                minloglevel=2,
            )
        except RuntimeError as error:
            raise InputError(
                f"data.tokenizer_vocab_size={vocab_size}: sentencepiece can't train it on this "
                f"text ({' '.join(str(error).split())}); choose a smaller one, or "
                "data.tokenizer=bytes"
            ) from error
        return cls(model.getvalue())

    def encode(self, texts: Sequence[str]) -> list[Integer[np.ndarray, " length"]]:
        """The tokens of each text, on all cores."""
        encoded = self.processor.encode(list(texts), num_threads=os.cpu_count())
        return [np.asarray(tokens, np.int32) for tokens in encoded]

    def decode(self, tokens: TokenRow) -> str:
        """The text of the tokens."""
        return self.processor.decode([int(token) for token in tokens])

    def save(self, folder: Path) -> None:
        """The model file, as sentencepiece reads it."""
        write_whole(folder / MODEL_FILE, self.model)


def make_tokenizer(data: ConfigDict, texts: Sequence[str]) -> Tokenizer:
    """The tokenizer that `config.data` describes, trained on `texts` where it says so.

    Raises:
      InputError: if there is no such tokenizer, or it can't be trained.
    """
    if data.tokenizer == "bytes":
        return ByteTokenizer()
    if data.tokenizer == "sentencepiece":
        return SentencePieceTokenizer.train(texts, data.tokenizer_vocab_size)
    raise InputError(f"data.tokenizer is {data.tokenizer!r}; it can be sentencepiece or bytes")


def load_tokenizer(folder: Path) -> Tokenizer | None:
    """The tokenizer saved in `folder`, or None.

    Raises:
      InputError: if what is there is none.
    """
    if (folder / MODEL_FILE).exists():
        try:
            return SentencePieceTokenizer((folder / MODEL_FILE).read_bytes())
        except RuntimeError as error:
            raise InputError(
                f"{folder / MODEL_FILE} is not a sentencepiece model; restore it or begin anew"
            ) from error
    return ByteTokenizer() if (folder / BYTES_FILE).exists() else None
