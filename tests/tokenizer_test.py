"""Tokenizers give every text back as it was."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from t5x_diffeq.data.tokenizer import (
    ByteTokenizer,
    SentencePieceTokenizer,
    load_tokenizer,
    make_tokenizer,
)
from t5x_diffeq.errors import InputError

TEXTS = [
    "def f(x):\n    return x + 12  # twelve\n\n\n",
    "\tTabs, \r\nand  two spaces ",
    "日本語 😀\n",
]


@pytest.fixture(scope="module")
def sentencepiece():
    return SentencePieceTokenizer.train(TEXTS * 20, 320)


def test_sentencepiece_round_trip(sentencepiece):
    encoded = sentencepiece.encode(TEXTS)
    assert [sentencepiece.decode(tokens) for tokens in encoded] == TEXTS
    assert max(map(max, encoded)) < sentencepiece.vocab_size
    assert len(encoded[0]) < len(TEXTS[0])


@settings(max_examples=200, deadline=None)
@given(text=st.text(st.characters(exclude_characters="\0\u2581", exclude_categories=("Cs",))))
def test_any_text_round_trips(sentencepiece, text):
    for tokenizer in (ByteTokenizer(), sentencepiece):
        (tokens,) = tokenizer.encode([text])
        assert tokenizer.decode(tokens) == text
        assert tokenizer.end_of_text not in tokens


def test_saved_and_loaded_is_the_same(sentencepiece, tmp_path):
    assert load_tokenizer(tmp_path) is None
    for tokenizer in (ByteTokenizer(), sentencepiece):
        tokenizer.save(tmp_path)
        loaded = load_tokenizer(tmp_path)
        assert loaded.fingerprint == tokenizer.fingerprint
        np.testing.assert_array_equal(loaded.encode(TEXTS)[0], tokenizer.encode(TEXTS)[0])


def test_training_is_deterministic(sentencepiece):
    assert SentencePieceTokenizer.train(TEXTS * 20, 320).model == sentencepiece.model


def test_bad_tokenizers(small):
    with pytest.raises(InputError, match=r"tokenizer_vocab_size=100000: sentencepiece can't train"):
        SentencePieceTokenizer.train(TEXTS, 100_000)
    small.data.tokenizer = "words"
    with pytest.raises(InputError, match="'words'; it can be sentencepiece or bytes"):
        make_tokenizer(small.data, TEXTS)
