"""Tokenizers give every text back as it was."""

import json
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from t5x_diffeq.config.config import Config
from t5x_diffeq.data.file_tokenizers import HuggingFaceTokenizer, SentencePieceTokenizer
from t5x_diffeq.data.recipe import make_tokenizer
from t5x_diffeq.data.tokenizer import ByteTokenizer
from t5x_diffeq.data.tokenizer_folder import load_tokenizer
from t5x_diffeq.inference.sampling import Continuation
from t5x_diffeq.system.errors import InputError

TEXTS = [
    "def f(x):\n    return x + 12  # twelve\n\n\n",
    "\tTabs, \r\nand  two spaces ",
    "日本語 😀\n",
]


@pytest.fixture(scope="module")
def sentencepiece():
    return SentencePieceTokenizer.train(TEXTS * 20, 320)


@settings(max_examples=200, deadline=None)
@given(text=st.text(st.characters(exclude_characters="\0\u2581", exclude_categories=("Cs",))))
def test_any_text_round_trips(sentencepiece, text):
    for tokenizer in (ByteTokenizer(), sentencepiece):
        (tokens,) = tokenizer.encode([text])
        assert tokenizer.decode(tokens) == text
        assert tokenizer.end_of_text not in tokens


@pytest.mark.parametrize("texts", ["one", b"one", [1], None])
def test_encode_takes_a_list_of_texts(texts):
    with pytest.raises(InputError, match=r'texts=.* must be a list of texts .*\["one", "two"\]'):
        ByteTokenizer().encode(texts)


@pytest.mark.parametrize("tokens", ["one", 1, [1.5], [[1]], np.zeros(2), np.zeros((2, 2), int)])
def test_decode_takes_the_tokens_of_one_text(tokens):
    with pytest.raises(InputError, match=r"tokens=.* must be a list of whole numbers or an array"):
        ByteTokenizer().decode(tokens)
    assert ByteTokenizer().decode(jnp.asarray([72, 105])) == "Hi"


@pytest.fixture(scope="module")
def hugging_face():
    """A byte-level BPE as GPT-2's, of the Hugging Face library."""
    tokenizers = pytest.importorskip("tokenizers", reason="tokenizers isn't installed")
    bpe = tokenizers.ByteLevelBPETokenizer()
    bpe.train_from_iterator(TEXTS * 20, vocab_size=300, special_tokens=["<|endoftext|>"])
    return HuggingFaceTokenizer(bpe.to_str().encode())


def test_hugging_face_round_trip(hugging_face):
    for threads in (1, 2):
        hugging_face.threads = threads
        encoded = hugging_face.encode(TEXTS)
        assert [hugging_face.decode(tokens) for tokens in encoded] == TEXTS
        assert len(encoded[0]) < len(TEXTS[0])
    assert hugging_face.processor.id_to_token(hugging_face.end_of_text) == "<|endoftext|>"
    with pytest.raises(InputError, match=r"none of the tokens <stop> .*data.end_of_text"):
        HuggingFaceTokenizer(hugging_face.model, "<stop>")


def test_a_tokenizer_is_given_by_its_file(sentencepiece, hugging_face, small, tmp_path):
    (tmp_path / "spiece.model").write_bytes(sentencepiece.model)
    (tmp_path / "gpt.json").write_bytes(hugging_face.model)
    for name, tokenizer in (("spiece.model", sentencepiece), ("gpt.json", hugging_face)):
        small.data.tokenizer = str(tmp_path / name)
        assert make_tokenizer(Config.of(small).data, []).fingerprint == tokenizer.fingerprint
    small.data.end_of_text = "line"
    with pytest.raises(InputError, match="has none of the tokens line"):
        make_tokenizer(Config.of(small).data, [])
    small.data.tokenizer = str(tmp_path / "spiece.model")
    with pytest.raises(InputError, match="no token line to end a document"):
        make_tokenizer(Config.of(small).data, [])
    small.data.end_of_text = "<s>"
    assert make_tokenizer(Config.of(small).data, []).end_of_text == 1
    (tmp_path / "gpt.json").write_text("{}")
    small.data.tokenizer = str(tmp_path / "gpt.json")
    with pytest.raises(InputError, match=r"is neither a sentencepiece model nor a tokenizer.json"):
        make_tokenizer(Config.of(small).data, [])


def test_a_save_leaves_what_other_processes_write(tmp_path, monkeypatch):
    """Parts of prepare_data save the same tokenizer at once; an editor makes hidden folders."""
    hidden = tmp_path / ".ipynb_checkpoints", tmp_path / ".bytes.1.partial"
    hidden[0].mkdir()
    hidden[1].write_bytes(b"of another process")
    (tmp_path / "stale").write_bytes(b"")
    read = Path.read_bytes

    def read_late(path):
        content = read(path)
        path.unlink()  # as another process may do meanwhile
        return content

    with monkeypatch.context() as patched:
        patched.setattr(Path, "read_bytes", read_late)
        ByteTokenizer().save(tmp_path)
    assert {*tmp_path.iterdir()} == {*hidden, tmp_path / "bytes"}


def test_training_is_deterministic(sentencepiece):
    assert SentencePieceTokenizer.train(TEXTS * 20, 320).model == sentencepiece.model


def test_a_text_that_is_short_for_the_vocabulary(small, capsys):
    """The tokenizer gets as many tokens as the text has pairs to merge, and a line says so."""
    small.data.update(tokenizer="sentencepiece", tokenizer_vocab_size=100_000)
    tokenizer = make_tokenizer(Config.of(small).data, TEXTS)
    assert 256 < tokenizer.vocab_size < 2000
    assert f"the tokenizer has {tokenizer.vocab_size}" in capsys.readouterr().err
    assert tokenizer.decode(tokenizer.encode(TEXTS)[0]) == TEXTS[0]


def test_bad_tokenizers(sentencepiece, small, tmp_path):
    with pytest.raises(
        InputError, match=r"this text has \d+ characters and special tokens; set at least \d+"
    ):
        SentencePieceTokenizer.train(TEXTS, 260)
    with pytest.raises(InputError, match=r"the documents have no text to train a tokenizer on"):
        SentencePieceTokenizer.train([""], 300)
    small.data.tokenizer = "words"
    with pytest.raises(InputError, match=r"'words'; it can be sentencepiece .*, bytes"):
        make_tokenizer(Config.of(small).data, TEXTS)
    path = tmp_path / "tokenizer.model"
    path.write_bytes(sentencepiece.model)
    small.data.update(tokenizer=str(path), end_of_text="<|imend|>")
    with pytest.raises(InputError, match=r"^the tokenizer has no token <\|imend\|> to end a doc"):
        make_tokenizer(Config.of(small).data, TEXTS)


def templated(hugging_face, single):
    """The content of a tokenizer.json that writes every text as this template says."""
    tokenizers = pytest.importorskip("tokenizers", reason="tokenizers isn't installed")
    made = tokenizers.Tokenizer.from_str(hugging_face.model.decode())
    made.add_special_tokens(["<s>", "</s>"])
    names = [(name, made.token_to_id(name)) for name in ("<s>", "</s>")]
    made.post_processor = tokenizers.processors.TemplateProcessing(single, special_tokens=names)
    return made.to_str()


@pytest.mark.parametrize(
    ("template", "opener"), [("<s> $A", "<s>"), ("<s> $A </s>", "<s>"), ("$A </s>", None)]
)
def test_what_a_folder_puts_before_every_text(hugging_face, small, tmp_path, template, opener):
    """A tokenizer.json says it; `add_bos_token` beside it changes nothing, as in transformers."""
    (tmp_path / "tokenizer.json").write_text(templated(hugging_face, template))
    config = {"add_bos_token": opener is None, "bos_token": "<s>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    small.data.update(tokenizer=str(tmp_path / "tokenizer.json"), end_of_text="</s>")
    tokenizer = make_tokenizer(Config.of(small).data, [])
    expected = None if opener is None else tokenizer.token_id(opener)
    tokenizer.save(tmp_path / "saved")
    for each in (tokenizer, load_tokenizer(tmp_path / "saved")):
        assert each.opener == expected
        end = each.end_of_text
        assert each.border == (end, end if expected is None else expected)
        (tokens,) = each.encode(["some text"])
        opened = [*([] if expected is None else [expected]), *tokens.tolist()]
        assert each.read("some text", "the text") == opened
    if opener is not None:  # a run from before there were openers goes on without one
        (tmp_path / "saved" / "opener.json").unlink()
        assert load_tokenizer(tmp_path / "saved").opener is None


def nucleotides(**changes):
    """The content of a tokenizer.json whose alphabet is ACGT: no other text has tokens."""
    pytest.importorskip("tokenizers", reason="tokenizers isn't installed")
    from tokenizers import Tokenizer, models

    made = Tokenizer(models.BPE({letter: n for n, letter in enumerate("ACGT")}, []))
    made.add_special_tokens(["</s>"])
    content = json.loads(made.to_str())
    return {**content, **changes, "model": {**content["model"], **changes.get("model", {})}}


def test_ids_that_no_token_has(small, tmp_path):
    """The vocabulary's size is the largest id and 1, also where a text has no tokens."""
    path = tmp_path / "tokenizer.json"
    small.data.tokenizer = str(path)
    gaps = {"vocab": {"A": 0, "C": 7, "G": 90, "T": 3, "</s>": 5}}
    for vocabulary, size in (({}, 5), (gaps, 91)):
        path.write_text(json.dumps(nucleotides(model=vocabulary)))
        tokenizer = make_tokenizer(Config.of(small).data, [])
        assert (tokenizer.vocab_size, tokenizer.opener) == (size, None)
        assert [*map(len, tokenizer.encode(["a", "GATTACA"]))] == [0, 7]
        assert tokenizer.decode(tokenizer.encode(["G"])[0]) == "G"


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("tokenizer.json", nucleotides(model={"dropout": 0.1}), "dropout is 0.1"),
        ("tokenizer_config.json", {"add_prefix_space": True}, "is True, and tokenizer.json says F"),
        ("tokenizer_config.json", {"do_lower_case": True}, "do_lower_case is True, and tokenizer"),
        ("tokenizer_config.json", {"keep_accents": True}, "keep_accents is True; the key is unk"),
        ("tokenizer_config.json", {"sp_model_kwargs": {"alpha": 1}}, "sp_model_kwargs is {'alpha"),
        ("tokenizer_config.json", {"pad_token": "[PAD]"}, r"1 tokens .* such as \[PAD\]; write"),
        ("added_tokens.json", {"</s>": 9}, "tokens that the files beside it name, such as </s>"),
    ],
)
def test_settings_that_can_not_be_obeyed(file, content, message, small, tmp_path):
    (tmp_path / "tokenizer.json").write_text(json.dumps(nucleotides()))
    (tmp_path / file).write_text(json.dumps(content))
    small.data.tokenizer = str(tmp_path / "tokenizer.json")
    with pytest.raises(InputError, match=message):
        make_tokenizer(Config.of(small).data, [])


def test_templates_that_a_run_does_not_have(hugging_face, small, tmp_path):
    for template in ("<s> </s> $A", "$A <s>"):
        (tmp_path / "tokenizer.json").write_text(templated(hugging_face, template))
        small.data.update(tokenizer=str(tmp_path / "tokenizer.json"), end_of_text="</s>")
        with pytest.raises(InputError, match=r"after every text; a run can put one token before"):
            make_tokenizer(Config.of(small).data, [])


def test_a_text_is_read_with_its_opener(sentencepiece):
    tokenizer = SentencePieceTokenizer(sentencepiece.model)
    plain = tokenizer.encode(["def f"])[0].tolist()
    start, end = tokenizer.processor.bos_id(), tokenizer.end_of_text
    assert tokenizer.read("def f", "--prompt", len(plain)) == plain
    assert (tokenizer.read("", "--prompt", 5), tokenizer.read("", "a text")) == ([end], [])
    tokenizer.open_with(start)
    assert tokenizer.read("def f", "--prompt", 1 + len(plain)) == [start, *plain]
    assert tokenizer.read("", "--prompt", 5) == tokenizer.read("", "a text") == [start]
    asked = [tokenizer.read("a", "--prompt", 5, lambda _, t=t: t) for t in ([7], [start, 7])]
    assert asked == [[start, 7]] * 2  # a chat template can write it, too
    with pytest.raises(InputError, match=r"--prompt has 3 tokens; the model takes 1 to 2: shorten"):
        tokenizer.read("a", "--prompt", 2, lambda _: [7, 8])
    with pytest.raises(InputError, match=r"--prompt is not UTF-8 text"):
        tokenizer.read("\ud800", "--prompt", 2)


def test_every_stop_id_of_a_folder_ends_a_continuation(tmp_path):
    tokenizer = ByteTokenizer()
    tokenizer.imported = {
        "config.json": {"eos_token_id": [0, 58]},
        "generation_config.json": {"eos_token_id": 59},
        "tokenizer_config.json": {},
    }
    tokenizer.save(tmp_path)
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.stops == {0, 58, 59} and tokenizer.border == (0, 0)
    for stop in tokenizer.stops:
        row = Continuation(tokenizer, [97])
        row.add(98)
        row.add(stop)
        assert row.ended and row.text() == "ab"


def test_a_sentencepiece_model_that_opens_every_text(sentencepiece, small, tmp_path):
    path, config = tmp_path / "tokenizer.model", tmp_path / "tokenizer_config.json"
    path.write_bytes(sentencepiece.model)
    small.data.tokenizer = str(path)
    openers = []
    for content in ({}, {"add_bos_token": False}, {"add_bos_token": True}):
        config.write_text(json.dumps(content))
        tokenizer = make_tokenizer(Config.of(small).data, [])
        tokenizer.save(tmp_path / f"saved{len(openers)}")
        assert load_tokenizer(tmp_path / f"saved{len(openers)}").opener == tokenizer.opener
        openers.append(tokenizer.opener)
    assert openers == [None, None, sentencepiece.processor.bos_id()]
    config.write_text('{"add_bos_token": true, "bos_token": "[GO]"}')
    with pytest.raises(InputError, match=r"says add_bos_token, and its bos_token '\[GO\]' isn't"):
        make_tokenizer(Config.of(small).data, [])
