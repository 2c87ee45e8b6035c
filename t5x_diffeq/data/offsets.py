"""Tokens with the characters that each stands for.

The name of a special token in a text, such as `</s>`, is encoded as that token, because chat
templates write special tokens by name.
"""

import re
from collections.abc import Sequence
from functools import singledispatch
from itertools import accumulate
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Integer

from t5x_diffeq.data.tokenizer import (
    ByteTokenizer,
    HuggingFaceTokenizer,
    SentencePieceTokenizer,
    Tokenizer,
)

_Numbers = Integer[np.ndarray, " tokens"]


class PlacedTokens(NamedTuple):
    """The tokens of a text; token k stands for characters `starts[k]` to `stops[k]`."""

    tokens: _Numbers
    starts: _Numbers
    stops: _Numbers

    def overlap(self, spans: Sequence[tuple[int, int]], length: int) -> Bool[np.ndarray, " tokens"]:
        """Whether each token stands for a character of these spans of a text of this length.

        A token of no character (a byte of one that another token completes) counts with the next.
        """
        inside = np.zeros(length + 1, np.int64)
        for start, stop in spans:
            inside[start:stop] = 1
        before = np.concatenate([[0], np.cumsum(inside)])
        stops = np.maximum(self.stops, self.starts + 1)
        return before[np.minimum(stops, length + 1)] > before[self.starts]


@singledispatch
def encode_with_offsets(tokenizer: Tokenizer, texts: list[str]) -> list[PlacedTokens]:
    """The tokens of each text, without `end_of_text` at its end, and their places."""
    raise TypeError(f"{type(tokenizer).__name__} doesn't tell the places of tokens")


@encode_with_offsets.register
def _(tokenizer: ByteTokenizer, texts: list[str]) -> list[PlacedTokens]:
    places = [_characters_of_bytes(text)[:-1] for text in texts]
    encoded = zip(tokenizer.encode(texts), places, strict=True)
    return [PlacedTokens(tokens, starts, starts + 1) for tokens, starts in encoded]


@encode_with_offsets.register
def _(tokenizer: HuggingFaceTokenizer, texts: list[str]) -> list[PlacedTokens]:
    processor = tokenizer.processor
    if tokenizer.threads == 1:
        encoded = [processor.encode(text, add_special_tokens=False) for text in texts]
    else:
        encoded = processor.encode_batch(texts, add_special_tokens=False)
    return [_placed(each.ids, each.offsets) for each in encoded]


@encode_with_offsets.register
def _(tokenizer: SentencePieceTokenizer, texts: list[str]) -> list[PlacedTokens]:
    """The library knows no special tokens in text, so the text between them is encoded."""
    processor = tokenizer.processor
    tokens = filter(processor.is_control, range(processor.get_piece_size()))
    control = {processor.id_to_piece(i): i for i in tokens}
    special = re.compile(f"({'|'.join(map(re.escape, control)) or '(?!)'})")
    return [_place_pieces(tokenizer, special.split(text), control) for text in texts]


def _place_pieces(
    tokenizer: SentencePieceTokenizer, parts: list[str], control: dict[str, int]
) -> PlacedTokens:
    """The tokens of consecutive parts of a text, some of which are names of special tokens."""
    from sentencepiece import sentencepiece_pb2 as pb2  # this import brings protobuf with it

    ids: list[int] = []
    offsets: list[tuple[int, int]] = []
    first_characters = accumulate(map(len, parts), initial=0)
    for part, first in zip(parts, first_characters, strict=False):
        if part in control:
            ids.append(control[part])
            offsets.append((first, first + len(part)))
            continue
        encoded = tokenizer.processor.encode(part, out_type="serialized_proto")
        character = first + _characters_of_bytes(part)
        for piece in pb2.SentencePieceText.FromString(encoded).pieces:  # type: ignore[attr-defined]
            ids.append(piece.id)
            offsets.append((int(character[piece.begin]), int(character[piece.end])))
    return _placed(ids, offsets)


def _placed(ids: list[int], offsets: list[tuple[int, int]]) -> PlacedTokens:
    starts, stops = np.array(offsets, np.int64).reshape(-1, 2).T
    return PlacedTokens(np.array(ids, np.int32), starts, stops)


def _characters_of_bytes(text: str) -> Integer[np.ndarray, " bytes"]:
    """The character that each byte of UTF-8 belongs to, and at last the number of characters."""
    first = (np.frombuffer(text.encode("utf-8"), np.uint8) & 0xC0) != 0x80
    return np.append(np.cumsum(first) - 1, len(text))
