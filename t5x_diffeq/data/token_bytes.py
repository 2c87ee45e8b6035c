"""How many bytes of text each token stands for, from which bits per byte are computed.

Losses per token can be compared only for one tokenizer; bits per byte of text can be compared
across tokenizers. The number of bytes must be exact. So a tokenizer that changes text before it
splits it (lower case, compatibility characters, spaces left out) has no such table.

Two changes of the text are allowed for. Some tokenizers put a space before every text
(sentencepiece's dummy prefix): that space has no bytes. Others compose characters (NFC, such as
Qwen's): their bytes are those of the composed text.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import singledispatch
from typing import Any

import numpy as np
from jaxtyping import Bool, Integer

from t5x_diffeq.data.tokenizer import (
    ByteTokenizer,
    HuggingFaceTokenizer,
    SentencePieceTokenizer,
    Tokenizer,
)

_SPACE = "\u2581"  # sentencepiece's sign for a space
_Lengths = Integer[np.ndarray, " vocabulary"]
_BYTES = 256
# Of a tokenizer.json: pre-tokenizers that split text and keep all of it.
_CUTTERS = ("ByteLevel", "Digits", "Metaspace", "Punctuation", "Sequence", "Split")


class NoByteLengthsError(Exception):
    """The tokens don't tell how many bytes of text they stand for; its message says why."""


@dataclass(frozen=True, eq=False)
class TokenBytes:
    """The number of bytes of text (UTF-8) that each token stands for.

    Attributes:
      lengths: by token; 0 for special tokens.
      first_lengths: by token, for the first token of a text: without the dummy prefix.
      opens_text: by token, whether a text begins after it, as after `end_of_text`.
    """

    lengths: _Lengths
    first_lengths: _Lengths
    opens_text: Bool[np.ndarray, " vocabulary"]

    def count(
        self,
        inputs: Integer[np.ndarray, "..."],
        targets: Integer[np.ndarray, "..."],
        counted: Bool[np.ndarray, "..."],
    ) -> np.int32:
        """The bytes of the counted targets, each the token that follows the input at its place."""
        first = self.opens_text[inputs]
        lengths = np.where(first, self.first_lengths[targets], self.lengths[targets])
        return np.int32(lengths[counted].sum())


@singledispatch
def token_bytes(tokenizer: Tokenizer) -> TokenBytes:
    """The table of a tokenizer.

    Raises:
      NoByteLengthsError: if the number of bytes can't be told from the tokens.
    """
    raise NoByteLengthsError(f"a {type(tokenizer).__name__} doesn't tell them")


@token_bytes.register
def _(tokenizer: ByteTokenizer) -> TokenBytes:
    lengths = np.ones(tokenizer.vocab_size, np.int32)
    lengths[tokenizer.end_of_text] = 0
    return _table(tokenizer, lengths)


@token_bytes.register
def _(tokenizer: SentencePieceTokenizer) -> TokenBytes:
    """The library encodes the text between control pieces (see `offsets`), each with a prefix."""
    from sentencepiece import sentencepiece_model_pb2 as pb2  # this import brings protobuf with it

    model = pb2.ModelProto.FromString(tokenizer.model)  # type: ignore[attr-defined]
    normalizer, processor = model.normalizer_spec, tokenizer.processor
    if normalizer.precompiled_charsmap or normalizer.normalization_rule_tsv:
        raise NoByteLengthsError(f"the tokenizer changes characters ({normalizer.name or 'rules'})")
    if normalizer.remove_extra_whitespaces:
        raise NoByteLengthsError("the tokenizer removes spaces")
    if model.trainer_spec.treat_whitespace_as_suffix and normalizer.add_dummy_prefix:
        raise NoByteLengthsError("the tokenizer puts a space after every text")
    pieces = [processor.id_to_piece(i) for i in range(tokenizer.vocab_size)]
    single = [processor.is_byte(i) for i in range(tokenizer.vocab_size)]
    control = np.array([processor.is_control(i) for i in range(tokenizer.vocab_size)])
    _need_all_bytes(sum(single))
    _need_space(pieces)
    lengths = _lengths_of_pieces(pieces, single)
    lengths[control] = 0
    lengths[processor.unk_id()] = 0  # never used, as there are pieces for all bytes
    return _table(tokenizer, lengths, pieces if normalizer.add_dummy_prefix else (), control)


@token_bytes.register
def _(tokenizer: HuggingFaceTokenizer) -> TokenBytes:
    content = json.loads(tokenizer.model)
    model, vocabulary = content["model"], tokenizer.processor.get_vocab(with_added_tokens=True)
    pieces = [""] * tokenizer.vocab_size
    for piece, i in vocabulary.items():
        if i < len(pieces):
            pieces[i] = piece
    if model.get("type", "BPE") not in ("BPE", "Unigram"):
        raise NoByteLengthsError(f"a {model['type']} tokenizer doesn't keep all of a text")
    if model.get("continuing_subword_prefix") or model.get("end_of_word_suffix"):
        raise NoByteLengthsError("the tokenizer doesn't keep the spaces between words")
    steps = [*_parts(content.get("normalizer"), "normalizers")]
    cutters = [*_parts(content.get("pre_tokenizer"), "pretokenizers")]
    prefix = _check_normalizer(steps)
    _check_cutters(cutters)
    if any(step["type"] == "ByteLevel" for step in (*steps, *cutters)):
        lengths = np.array([len(piece) for piece in pieces], np.int32)
        alphabet = {piece for piece in pieces if len(piece) == 1}
        _need_all_bytes(len(alphabet & _byte_alphabet()))
    else:
        lengths, spaced = _lengths_in_text(model, pieces, steps, cutters)
        if spaced:
            _need_space(pieces)
    opens_text = _add_added_tokens(content.get("added_tokens") or [], lengths, prefix)
    return _table(tokenizer, lengths, pieces if prefix else (), opens_text)


def _parts(step: dict[str, Any] | None, key: str) -> Iterator[dict[str, Any]]:
    """A step of a `tokenizer.json`, or the steps of a sequence."""
    if step and step["type"] == "Sequence":
        for each in step[key]:
            yield from _parts(each, key)
    elif step:
        yield step


def _check_normalizer(steps: Sequence[dict[str, Any]]) -> bool:
    """Checks that the normalizer keeps the text; whether it puts a space before every text."""
    prefix = False
    for step in steps:
        kind = step["type"]
        if kind == "Prepend" and step["prepend"] == _SPACE:
            prefix = True
        elif not (kind in ("NFC", "ByteLevel") or (kind == "Replace" and _writes_spaces(step))):
            raise NoByteLengthsError(f"the tokenizer's normalizer ({kind}) changes the text")
    return prefix


def _writes_spaces(step: dict[str, Any]) -> bool:
    return step["pattern"] == {"String": " "} and step["content"] == _SPACE


def _check_cutters(cutters: Sequence[dict[str, Any]]) -> None:
    for cutter in cutters:
        kind = cutter["type"]
        if kind not in _CUTTERS or cutter.get("behavior") == "Removed":
            raise NoByteLengthsError(f"the tokenizer's pre-tokenizer ({kind}) leaves spaces out")
        scheme = cutter.get("prepend_scheme", "always" if kind == "Metaspace" else "never")
        # Unlike sentencepiece, these add no space before a text that begins with one.
        if cutter.get("add_prefix_space", False) or scheme != "never":
            raise NoByteLengthsError("the tokenizer puts a space before some texts and not others")


def _lengths_in_text(
    model: dict[str, Any],
    pieces: Sequence[str],
    steps: Sequence[dict[str, Any]],
    cutters: Sequence[dict[str, Any]],
) -> tuple[_Lengths, bool]:
    """The lengths of pieces of text, and whether they write spaces as sentencepiece does."""
    names = {f"<0x{byte:02X}>" for byte in range(_BYTES)}
    single = [piece in names for piece in pieces]
    _need_all_bytes(sum(single) if model.get("byte_fallback") else 0)
    spaced = any(_writes_spaces(step) for step in steps if step["type"] == "Replace")
    spaced |= any(cutter["type"] == "Metaspace" for cutter in cutters)
    return _lengths_of_pieces(pieces, single, spaced), spaced


def _add_added_tokens(
    added: Sequence[dict[str, Any]], lengths: _Lengths, prefix: bool
) -> Bool[np.ndarray, " vocabulary"]:
    """Sets the lengths of added tokens; returns after which of them a text begins.

    The library looks for them in the text, and treats what lies between as texts of their own.
    """
    opens_text = np.zeros(len(lengths), bool)
    for token in added:
        normalized, name = token.get("normalized", False), token["content"]
        spaces = token.get("lstrip", False) or token.get("rstrip", False)
        if not token.get("special", False) and (spaces or (prefix and normalized)):
            raise NoByteLengthsError(f"the tokenizer's added token {name!r} can include spaces")
        if token["id"] < len(lengths):
            lengths[token["id"]] = 0 if token.get("special", False) else len(name.encode())
            opens_text[token["id"]] = not normalized
    return opens_text


def _lengths_of_pieces(
    pieces: Sequence[str], single: Sequence[bool], spaced: bool = True
) -> _Lengths:
    """The bytes of pieces of text, of which those in `single` stand for a byte each."""
    texts = (piece.replace(_SPACE, " ") if spaced else piece for piece in pieces)
    lengths = [
        1 if byte else len(text.encode("utf-8", "surrogatepass"))
        for text, byte in zip(texts, single, strict=True)
    ]
    return np.array(lengths, np.int32)


def _table(
    tokenizer: Tokenizer,
    lengths: _Lengths,
    prefixed: Sequence[str] = (),
    opens_text: Bool[np.ndarray, " vocabulary"] | None = None,
) -> TokenBytes:
    """The table; `prefixed` are all pieces if a text's first one begins with a dummy prefix."""
    opens = np.zeros(len(lengths), bool) if opens_text is None else opens_text.copy()
    opens[tokenizer.end_of_text] = True
    first = lengths.copy()
    for i, piece in enumerate(prefixed):
        first[i] -= piece.startswith(_SPACE) and lengths[i] > 0
    return TokenBytes(lengths, first, opens)


def _need_all_bytes(count: int) -> None:
    """Checks that there is a token for each byte, so that no text is an unknown token."""
    if count < _BYTES:
        raise NoByteLengthsError("the tokenizer has an unknown token, which any text can be")


def _need_space(pieces: Sequence[str]) -> None:
    """Checks that a space has a piece; without one it is three bytes, those of U+2581."""
    if _SPACE not in pieces:
        raise NoByteLengthsError("the tokenizer has no token for a space")


def _byte_alphabet() -> set[str]:
    """The characters that byte-level tokenizers write bytes as."""
    import tokenizers  # its tokenizer was read with it

    return set(tokenizers.pre_tokenizers.ByteLevel.alphabet())
