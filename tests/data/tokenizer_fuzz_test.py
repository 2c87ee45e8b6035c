"""Random texts: a run's tokens are those of the library that made its tokenizer, and of its export.

python tests/data/tokenizer_fuzz_test.py 250    so many texts of each kind; the tests take 30
"""

import io
import json
import os
import random
import sys
import tempfile
from functools import cache
from pathlib import Path

import pytest
import sentencepiece
from tokenizers import (
    AddedToken,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

from t5x_diffeq.data.file_tokenizers import SentencePieceTokenizer
from t5x_diffeq.data.tokenizer import ByteTokenizer
from t5x_diffeq.data.tokenizer_folder import load_tokenizer, read_tokenizer, tokenizer_file
from t5x_diffeq.hf.tokenizer_files import write_tokenizer

tokenizers = pytest.importorskip("tokenizers", reason="tokenizers isn't installed")
pytest.importorskip("transformers", reason="transformers isn't installed")

TEXTS = ["the cat sat on the mat,  and\nthen 12 cats sat.\n\n", "ACGTTGCA été 日本語 naïve"] * 20
NAMES = ["<s>", "</s>", "<unk>", "<|endoftext|>", "[SEP]", "[CLS]", "<tool>", "<0x41>", "<pad>"]
PARTS = [
    *("the", "cat", "s", "A", "CG", "12", "x", ",", ".", "'s", "été", "e\u0301", "日本", "😀", "ﬁ"),
    *(" ", "  ", "   ", "\n", "\n\n", "\t", "\r\n", "\u00a0", "\u3000", "\u2581", "\u200b"),
    *NAMES,
]


def random_texts(count: int) -> list[str]:
    """Of parts that tokenizers treat in different ways; the first is empty."""
    draw = random.Random(count)
    drawn = ("".join(draw.choices(PARTS, k=draw.randint(1, 9))) for _ in range(count - 1))
    return ["", *drawn]


def sentencepiece_of(**options):
    """The content of a sentencepiece model with these options of its trainer."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(TEXTS),
        model_writer=model,
        hard_vocab_limit=False,
        minloglevel=2,
        **{"vocab_size": 330, "byte_fallback": True, **options},
    )
    return model.getvalue()


def json_of(model, trainer, template=None, added=(), **parts):
    """A trained tokenizer of the library `tokenizers`."""
    made = tokenizers.Tokenizer(model)
    for name, part in parts.items():
        setattr(made, name, part)
    made.train_from_iterator(TEXTS, trainer(show_progress=False))
    made.add_tokens(list(added))
    if template:
        names = [(name, made.token_to_id(name)) for name in template.split() if name != "$A"]
        made.post_processor = processors.TemplateProcessing(template, special_tokens=names)
    return made


def trainer_of(kind, special=("<unk>", "<s>", "</s>"), **options):
    return lambda **others: kind(special_tokens=[*special], **options, **others)


def odd_json():
    """With everything that cuts, fills or joins texts."""
    odd = [
        AddedToken("<tool>", lstrip=True, rstrip=True, normalized=False),
        AddedToken("cat", single_word=True),
        AddedToken("<pad>", special=True),
    ]
    made = json_of(
        models.BPE(),
        trainer_of(trainers.BpeTrainer, ("<|endoftext|>",), vocab_size=300, initial_alphabet=BYTES),
        pre_tokenizer=pre_tokenizers.ByteLevel(add_prefix_space=True),
        decoder=decoders.ByteLevel(),
        added=odd,
    )
    made.enable_padding(length=7, pad_id=0, pad_token="<|endoftext|>")
    made.enable_truncation(3)
    return made


BYTES = pre_tokenizers.ByteLevel.alphabet()
SPACES = {
    "pre_tokenizer": pre_tokenizers.Metaspace(prepend_scheme="first"),
    "decoder": decoders.Metaspace(prepend_scheme="first"),
}
IDENTITY = {"normalization_rule_name": "identity"}
KEEPING = {**IDENTITY, "remove_extra_whitespaces": False}
MODELS = {  # of sentencepiece
    "bpe": {"model_type": "bpe", **KEEPING},
    "bpe_without_extra_spaces": {"model_type": "bpe", **IDENTITY},
    "bpe_with_symbols": {
        **{"model_type": "bpe", "user_defined_symbols": ["<tool>", "\n\n"], **KEEPING},
        "add_dummy_prefix": False,
    },
    "bpe_with_symbols_and_prefix": {
        **{"model_type": "bpe", "user_defined_symbols": ["<tool>"], **KEEPING}
    },
    "unigram": {"model_type": "unigram", **KEEPING},
    "unigram_of_nfkc": {"model_type": "unigram"},
}
JSONS = {
    "byte_level": lambda: json_of(
        models.BPE(),
        trainer_of(trainers.BpeTrainer, ("<|endoftext|>",), vocab_size=300, initial_alphabet=BYTES),
        pre_tokenizer=pre_tokenizers.ByteLevel(add_prefix_space=False),
        decoder=decoders.ByteLevel(),
        normalizer=normalizers.NFC(),
    ),
    "odd": odd_json,
    "metaspace": lambda: json_of(
        models.BPE(unk_token="<unk>", fuse_unk=True),
        trainer_of(trainers.BpeTrainer, vocab_size=120),
        "<s> $A",
        **SPACES,
    ),
    "unigram_json": lambda: json_of(
        models.Unigram(), trainer_of(trainers.UnigramTrainer, unk_token="<unk>"), **SPACES
    ),
    "wordpiece": lambda: json_of(
        models.WordPiece(unk_token="<unk>"),
        trainer_of(trainers.WordPieceTrainer, ("<unk>", "[CLS]", "[SEP]"), vocab_size=120),
        "[CLS] $A [SEP]",
        normalizer=normalizers.BertNormalizer(),
        pre_tokenizer=pre_tokenizers.BertPreTokenizer(),
    ),
    "wordlevel": lambda: json_of(
        models.WordLevel(unk_token="<unk>"),
        trainer_of(trainers.WordLevelTrainer),
        pre_tokenizer=pre_tokenizers.Whitespace(),
    ),
    "nucleotides": lambda: json_of(
        models.BPE({c: i for i, c in enumerate("ACGT")}, []), trainer_of(trainers.BpeTrainer)
    ),
}
KINDS = ("bytes", "trained", *MODELS, *JSONS)


@cache
def made_of(kind, folder):
    """The tokenizer of a run, and the library's own, as a function from text to tokens."""
    if kind == "bytes":
        return ByteTokenizer(), lambda text: [*text.encode()]
    if kind in JSONS:
        theirs = JSONS[kind]()
        theirs.save(str(folder / "tokenizer.json"))
        theirs.no_padding()
        theirs.no_truncation()
        ours = read_tokenizer(folder / "tokenizer.json")
        return ours, lambda text: theirs.encode(text, add_special_tokens=False).ids
    model = (
        SentencePieceTokenizer.train(TEXTS, 330).model
        if kind == "trained"
        else sentencepiece_of(**MODELS[kind])
    )
    (folder / "tokenizer.model").write_bytes(model)
    processor = sentencepiece.SentencePieceProcessor(model_proto=model)
    return read_tokenizer(folder / "tokenizer.model"), processor.encode


def differences(kind, texts, folder):
    """The texts that something else than the run reads in another way, and what."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    from transformers import AutoTokenizer

    ours, library = made_of(kind, folder)
    ours.save(folder / "run")
    (folder / "out").mkdir()
    note = write_tokenizer(ours, folder / "out", 100)
    exported = AutoTokenizer.from_pretrained(folder / "out")
    readers = {
        "library": library,
        "run": lambda text: load_tokenizer(folder / "run").encode([text])[0].tolist(),
        "AutoTokenizer": lambda text: exported.encode(text, add_special_tokens=False),
    }
    if note is None:
        plain = tokenizers.Tokenizer.from_file(str(folder / "out" / "tokenizer.json"))
        plain.no_padding()
        plain.no_truncation()
        readers["tokenizer.json"] = lambda text: plain.encode(text, add_special_tokens=False).ids
    if kind != "bytes":
        again = read_tokenizer(tokenizer_file(folder / "out"))
        readers["converted"] = lambda text: again.encode([text])[0].tolist()
        assert again.opener == ours.opener
    for text in texts:
        tokens = ours.encode([text])[0].tolist()
        # Transformers finds the names of all pieces of a model that has no tokenizer.json.
        found = note is not None and any(name in text for name in NAMES)
        for name, reader in readers.items():
            if not (found and name == "AutoTokenizer") and reader(text) != tokens:
                yield name, text, tokens, reader(text)
        read, theirs = ours.read(text, "a text"), exported(text).input_ids
        after = [ours.end_of_text] if kind == "wordpiece" else []  # which its template puts there
        if not found and theirs != [*read, *after]:
            yield "with special tokens", text, read, theirs


@pytest.mark.parametrize("kind", KINDS)
def test_random_texts(kind, tmp_path):
    assert not list(differences(kind, random_texts(30), tmp_path))


def _added(name, number, **options):
    off = {"lstrip": False, "rstrip": False, "single_word": False, "normalized": False}
    return {str(number): {"content": name, **off, "special": False, **options}}


# Of a folder: what makes its file, `tokenizer_config.json`, and whether names in a text are tokens.
FOLDERS = {
    "no prefix": ("bpe", {"tokenizer_class": "LlamaTokenizer", "add_prefix_space": False}),
    "other options": ("metaspace", {"added_tokens_decoder": _added("<s>", 1, rstrip=True)}),
    "an added token": ("byte_level", {"added_tokens_decoder": _added("<tool>", 300, lstrip=True)}),
    "names of words": ("wordlevel", {"eos_token": "</s>", "additional_special_tokens": ["cat"]}),
    "names as text": ("byte_level", {"split_special_tokens": True, "eos_token": "<|endoftext|>"}),
}


@pytest.mark.parametrize("what", FOLDERS)
def test_settings_beside_a_tokenizer(what, tmp_path, monkeypatch):
    """They change the tokens of texts as in transformers, and once more after an export."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    from transformers import AutoTokenizer

    kind, settings = FOLDERS[what]
    plain, _ = made_of(kind, tmp_path)
    config = {"tokenizer_class": "PreTrainedTokenizerFast", **settings}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    ours = read_tokenizer(tokenizer_file(tmp_path))
    ours.imported = {"tokenizer_config.json": config}
    (tmp_path / "out").mkdir()
    write_tokenizer(ours, tmp_path / "out", 100)
    readers = [AutoTokenizer.from_pretrained(folder) for folder in (tmp_path, tmp_path / "out")]
    again = read_tokenizer(tokenizer_file(tmp_path / "out"))
    differing = 0
    for text in random_texts(60):
        tokens = ours.encode([text])[0].tolist()
        differing += tokens != plain.encode([text])[0].tolist()
        assert again.encode([text])[0].tolist() == tokens
        theirs = [reader.encode(text, add_special_tokens=False) for reader in readers]
        assert theirs[1] == tokens, text
        # Of a sentencepiece model alone, transformers finds names, which sentencepiece doesn't.
        if kind != "bpe" or not any(name in text for name in NAMES):
            assert theirs[0] == tokens, text
    assert differing


if __name__ == "__main__":
    for kind in KINDS:
        with tempfile.TemporaryDirectory() as name:
            found = list(differences(kind, random_texts(int(sys.argv[1])), Path(name)))
        print(kind, len(found), json.dumps(found[:3], ensure_ascii=False))
