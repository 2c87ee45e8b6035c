"""Tokenizers as Hugging Face's library `tokenizers` has them, with the same tokens."""

from typing import Any

from t5x_diffeq.data.tokenizer import (
    ByteTokenizer,
    HuggingFaceTokenizer,
    SentencePieceTokenizer,
    Tokenizer,
)

_SPACE = "\u2581"  # sentencepiece's sign for a space
_BPE = 2  # sentencepiece's enum value for byte-pair encoding


def fast_tokenizer(tokenizer: Tokenizer) -> Any | None:
    """The `tokenizers.Tokenizer` that makes the same tokens; None if there can be none.

    There is none of a sentencepiece model that normalises text, or is no byte-pair encoding.
    """
    if isinstance(tokenizer, HuggingFaceTokenizer):
        return tokenizer.processor
    if isinstance(tokenizer, ByteTokenizer):
        return _of_bytes()
    if isinstance(tokenizer, SentencePieceTokenizer):
        proto = parse_sentencepiece(tokenizer)
        plain = proto.trainer_spec.model_type == _BPE
        plain = plain and not proto.normalizer_spec.precompiled_charsmap
        return _of_sentencepiece(proto) if plain else None
    raise TypeError(f"{type(tokenizer).__name__} has no form in Hugging Face's library")


def parse_sentencepiece(tokenizer: SentencePieceTokenizer) -> Any:
    """The `ModelProto` of a sentencepiece model."""
    from sentencepiece import sentencepiece_model_pb2 as pb2  # this import brings protobuf with it

    return pb2.ModelProto.FromString(tokenizer.model)  # type: ignore[attr-defined]  # made at import


def _of_bytes() -> Any:
    """A `tokenizers.Tokenizer` with a token for each byte."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    # The printable character that stands for each byte in byte-level encodings (GPT-2).
    visible = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    hidden = (chr(0x100 + n) for n in range(0x100))
    signs = [chr(byte) if byte in visible else next(hidden) for byte in range(0x100)]
    made = Tokenizer(models.BPE({sign: byte for byte, sign in enumerate(signs)}, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    return made


def _of_sentencepiece(proto: Any) -> Any:
    """The `tokenizers.Tokenizer` of a sentencepiece byte-pair encoding, a parsed model."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers

    pieces = list(proto.pieces)
    kind = type(pieces[0])
    made = Tokenizer(
        models.BPE(
            {piece.piece: number for number, piece in enumerate(pieces)},
            _merges([(each.piece, each.score) for each in pieces if each.type == kind.NORMAL]),
            unk_token=next((each.piece for each in pieces if each.type == kind.UNKNOWN), None),
            fuse_unk=True,
            byte_fallback=proto.trainer_spec.byte_fallback,
        )
    )
    normal: list[Any] = [normalizers.Replace(" ", _SPACE)]
    decoding: list[Any] = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if proto.normalizer_spec.add_dummy_prefix:
        normal.insert(0, normalizers.Prepend(_SPACE))
        decoding.append(decoders.Strip(" ", 1, 0))
    made.normalizer = normalizers.Sequence(normal)
    made.decoder = decoders.Sequence(decoding)
    special = (kind.UNKNOWN, kind.CONTROL)
    made.add_special_tokens([each.piece for each in pieces if each.type in special])
    # A single character needs no entry of its own: nothing merges with it.
    users = (each.piece for each in pieces if each.type == kind.USER_DEFINED)
    made.add_tokens([AddedToken(piece, normalized=False) for piece in users if len(piece) > 1])
    return made


def _merges(pieces: list[tuple[str, float]]) -> list[tuple[str, str]]:
    """The merges of a byte-pair encoding, best first: every pair of pieces that forms a piece."""
    known = {piece for piece, _ in pieces}
    best_first = sorted(pieces, key=lambda piece: -piece[1])
    return [
        (piece[:cut], piece[cut:])
        for piece, _ in best_first
        for cut in range(1, len(piece))
        if piece[:cut] in known and piece[cut:] in known
    ]
