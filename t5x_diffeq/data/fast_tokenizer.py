"""Converts this package's tokenizers to tokenizers of the library `tokenizers`."""

from typing import Any

from t5x_diffeq.data.file_tokenizers import HuggingFaceTokenizer, SentencePieceTokenizer
from t5x_diffeq.data.tokenizer import ByteTokenizer, Tokenizer

_SPACE = "\u2581"  # sentencepiece's sign for a space
_BPE = 2  # sentencepiece's enum value for byte-pair encoding


def fast_tokenizer(tokenizer: Tokenizer, reads_names: bool) -> Any | None:
    """The `tokenizers.Tokenizer` that makes the same tokens; None if there can be none.

    There is none for a sentencepiece model that normalises characters, isn't a byte-pair encoding,
    or has a dummy prefix and symbols of several characters: the library would put the prefix after
    each symbol, too.

    Sentencepiece reads the name of a special token in a text as plain text, and so does the
    tokenizer that is returned. With `reads_names` it reads the name as the token, which chat
    templates need.

    Raises:
      TypeError: if the class of `tokenizer` is not this package's.
    """
    if isinstance(tokenizer, HuggingFaceTokenizer):
        return tokenizer.processor
    if isinstance(tokenizer, ByteTokenizer):
        return _byte_processor()
    if isinstance(tokenizer, SentencePieceTokenizer):
        proto = parse_sentencepiece(tokenizer.model)
        if not _is_plain(proto):
            return None
        fast = _sentencepiece_processor(proto, reads_names)
        if tokenizer.opener is not None:
            from tokenizers.processors import TemplateProcessing

            opener = tokenizer.token_name(tokenizer.opener)
            fast.post_processor = TemplateProcessing(
                f"{opener} $A", special_tokens=[(opener, tokenizer.opener)]
            )
        return fast
    raise TypeError(f"{type(tokenizer).__name__} has no form in Hugging Face's library")


def parse_sentencepiece(model: bytes) -> Any:
    """The `ModelProto` of a sentencepiece model."""
    from sentencepiece import sentencepiece_model_pb2 as pb2  # this import brings protobuf with it

    return pb2.ModelProto.FromString(model)  # type: ignore[attr-defined]  # made at import


def _is_plain(proto: Any) -> bool:
    trained, rules = proto.trainer_spec, proto.normalizer_spec
    symbols = (each.piece for each in proto.pieces if each.type == type(each).USER_DEFINED)
    return (
        trained.model_type == _BPE
        and not rules.precompiled_charsmap
        and rules.escape_whitespaces
        and not trained.treat_whitespace_as_suffix
        and not (rules.add_dummy_prefix and any(len(symbol) > 1 for symbol in symbols))
    )


def _byte_processor() -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    # The printable character that stands for each byte in byte-level encodings (GPT-2).
    visible = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    hidden = (chr(0x100 + n) for n in range(0x100))
    signs = [chr(byte) if byte in visible else next(hidden) for byte in range(0x100)]
    fast = Tokenizer(models.BPE({sign: byte for byte, sign in enumerate(signs)}, []))
    fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    fast.decoder = decoders.ByteLevel()
    return fast


def _sentencepiece_processor(proto: Any, reads_names: bool) -> Any:
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers

    pieces = list(proto.pieces)
    kind = type(pieces[0])
    fast = Tokenizer(
        models.BPE(
            {piece.piece: number for number, piece in enumerate(pieces)},
            _merges([(each.piece, each.score) for each in pieces if each.type == kind.NORMAL]),
            unk_token=next((each.piece for each in pieces if each.type == kind.UNKNOWN), None),
            fuse_unk=True,
            byte_fallback=proto.trainer_spec.byte_fallback,
        )
    )
    rules = proto.normalizer_spec
    normal: list[Any] = []
    if rules.remove_extra_whitespaces:
        normal += [
            normalizers.Replace(Regex(rf"\A +|[ {_SPACE}]+\z"), ""),
            normalizers.Replace(Regex(" {2,}"), " "),
        ]
    if rules.add_dummy_prefix:
        normal.append(normalizers.Prepend(_SPACE))
    normal.append(normalizers.Replace(" ", _SPACE))
    decoding: list[Any] = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if rules.add_dummy_prefix:
        decoding.append(decoders.Strip(" ", 1, 0))
    fast.normalizer = normalizers.Sequence(normal)
    fast.decoder = decoders.Sequence(decoding)
    if reads_names:
        special = (kind.UNKNOWN, kind.CONTROL)
        fast.add_special_tokens([each.piece for each in pieces if each.type in special])
    # A single character needs no entry of its own: nothing merges with it.
    users = (each.piece for each in pieces if each.type == kind.USER_DEFINED)
    fast.add_tokens([AddedToken(piece, normalized=False) for piece in users if len(piece) > 1])
    return fast


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
