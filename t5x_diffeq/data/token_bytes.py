"""Finds how many bytes of text each token stands for, from which bits per byte are computed.

Losses per token can be compared only for one tokenizer; bits per byte of text can be compared
across tokenizers. The number of bytes must be exact. So the table is checked on texts that show
whether the tokenizer changes a text before it splits the text (lower case, compatibility
characters, dropped spaces), or has an unknown token; in either case there is no table.

Two changes of the text are allowed. Some tokenizers put a space before every text (sentencepiece's
dummy prefix): the space has no bytes. Others compose characters (NFC, such as Qwen's): the bytes of
the composed text count.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import singledispatch
from typing import NamedTuple
from unicodedata import is_normalized

import numpy as np
from jaxtyping import Bool, Integer

from t5x_diffeq.data.file_tokenizers import HuggingFaceTokenizer, SentencePieceTokenizer
from t5x_diffeq.data.tokenizer import ByteTokenizer, Tokenizer

_SPACE = "\u2581"  # sentencepiece's sign for a space
_Lengths = Integer[np.ndarray, " vocabulary"]
# Every byte of UTF-8, in characters that normalization, lower case and the like would change.
_CHARACTERS = (*range(1, 0x800), *range(0x800, 0xD800, 0x400), *range(0xE000, 0x110000, 0x1000))
_TEXTS = (
    *("x", "x y", " x", "  x", "x ", "x  y", "x\n", "\nx", "x\n\n\ny", "x\r\n\ty"),
    "Hello, World's",
    *("\u4f60\u597d", "\ufb01", "\uff21", "12345 + x_1", "\n x", "a\u00a0b"),
    *(text for text in map(chr, _CHARACTERS) if is_normalized("NFC", text)),
)


class NoByteLengthsError(Exception):
    """The bytes that a token stands for can't be determined; the message says why."""


@dataclass(frozen=True, eq=False)
class TokenBytes:
    """The number of bytes of text (UTF-8) that each token stands for."""

    lengths: _Lengths  # 0 for special tokens
    first_lengths: _Lengths  # for the first token of a text: without the dummy prefix
    opens_text: Bool[np.ndarray, " vocabulary"]  # whether a text begins after the token

    def count(
        self,
        inputs: Integer[np.ndarray, "..."],
        targets: Integer[np.ndarray, "..."],
        counted: Bool[np.ndarray, "..."],
    ) -> np.int32 | Integer[np.ndarray, "..."]:
        """The bytes of each row's counted targets, which are the tokens that follow the inputs."""
        first = self.opens_text[inputs]
        lengths = np.where(first, self.first_lengths[targets], self.lengths[targets])
        return np.where(counted, lengths, 0).sum(-1, dtype=np.int32)


class _Vocabulary(NamedTuple):
    pieces: list[str]  # the texts of the tokens, as the tokenizer writes them
    # the bytes of tokens whose pieces don't tell them: single bytes, special and added tokens
    known: dict[int, int]
    opens: list[int]  # tokens after which a text begins, which the library encodes by itself
    added: Sequence[str] = ()  # the added tokens that stand for text


def _plain_length(piece: str) -> int:
    return len(piece.encode("utf-8", "surrogatepass"))


def _spaced_length(piece: str) -> int:
    return _plain_length(piece.replace(_SPACE, " "))


# What a piece can be: plain text, text with sentencepiece's sign for a space, or a character for
# each byte.
_WAYS: tuple[Callable[[str], int], ...] = (_plain_length, _spaced_length, len)


def token_bytes(tokenizer: Tokenizer) -> TokenBytes:
    """The table of a tokenizer; a NoByteLengthsError if its tokens don't determine one."""
    vocabulary = _vocabulary(tokenizer)
    texts = [*_TEXTS, *(f"a {name} b{name}" for name in vocabulary.added)]
    encoded = tokenizer.encode(texts)
    prefix = any(vocabulary.pieces[token].startswith(_SPACE) for token in encoded[0][:1])
    for length in _WAYS:
        table = _table(tokenizer, vocabulary, length, prefix)
        fault = _first_difference(table, tokenizer.end_of_text, zip(texts, encoded, strict=True))
        if fault is None:
            return table
    raise NoByteLengthsError(f"the tokenizer changes the text, such as {fault!r}")


def _table(
    tokenizer: Tokenizer, vocabulary: _Vocabulary, length: Callable[[str], int], prefix: bool
) -> TokenBytes:
    lengths = np.array([length(piece) for piece in vocabulary.pieces], np.int32)
    opens = np.zeros(len(lengths), bool)
    opens[[*tokenizer.border, *vocabulary.opens]] = True
    for token, known in vocabulary.known.items():
        lengths[token] = known
    spaced = [piece.startswith(_SPACE) for piece in vocabulary.pieces]
    return TokenBytes(lengths, lengths - (prefix & np.array(spaced) & (lengths > 0)), opens)


def _first_difference(
    table: TokenBytes, end_of_text: int, texts: Iterable[tuple[str, np.ndarray]]
) -> str | None:
    """The first text whose tokens don't have its number of bytes."""
    for text, tokens in texts:
        before = np.append(end_of_text, tokens[:-1]).astype(np.int64)[: len(tokens)]
        size = table.count(before, tokens, np.ones(len(tokens), bool))
        if size != len(text.encode()):
            return text
    return None


@singledispatch
def _vocabulary(tokenizer: Tokenizer) -> _Vocabulary:
    raise NoByteLengthsError(f"a {type(tokenizer).__name__} doesn't tell them")


@_vocabulary.register
def _(tokenizer: ByteTokenizer) -> _Vocabulary:
    return _Vocabulary(["?"] * tokenizer.vocab_size, {tokenizer.end_of_text: 0}, [])


@_vocabulary.register
def _(tokenizer: SentencePieceTokenizer) -> _Vocabulary:
    """In chats, each text between control pieces has a prefix of its own (`fast_tokenizer`)."""
    processor, tokens = tokenizer.processor, range(tokenizer.vocab_size)
    control = [i for i in tokens if processor.is_control(i)]
    known = {i: 1 for i in tokens if processor.is_byte(i)}
    known |= dict.fromkeys([*control, processor.unk_id()], 0)
    return _Vocabulary([processor.id_to_piece(i) for i in tokens], known, control)


@_vocabulary.register
def _(tokenizer: HuggingFaceTokenizer) -> _Vocabulary:
    """The library looks for added tokens first; each text between them is encoded by itself."""
    pieces = [tokenizer.processor.id_to_token(i) or "" for i in range(tokenizer.vocab_size)]
    single = {f"<0x{byte:02X}>" for byte in range(256)}
    known = {i: 1 for i, piece in enumerate(pieces) if piece in single}
    added = tokenizer.processor.get_added_tokens_decoder()
    texts = [each.content for each in added.values() if not each.special]
    texts = [text for text in texts if _SPACE not in text]  # which would count as a space
    for i, token in added.items():
        known[i] = 0 if token.special else _spaced_length(token.content)
    known |= dict.fromkeys(tokenizer.border, 0)
    opens = [i for i, token in added.items() if not token.normalized]
    return _Vocabulary(pieces, known, opens, texts)
