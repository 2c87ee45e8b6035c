"""Shards that are not what their manifest says are refused by name, and hashed only once."""

import json
import os
import shutil

import pytest
from fault_checkpoints import flip
from fault_shards import NAMES, data_of, edit, make_shards, swap
from helpers import corpus_of, small_config

from t5x_diffeq.checkpoints.workdir import check_config, save_config
from t5x_diffeq.config.config import Config, DataKeys
from t5x_diffeq.data import preparation
from t5x_diffeq.data.corpus import link_corpus, load_corpus, prepare_corpus, stored_fingerprint
from t5x_diffeq.data.manifest import read_manifest
from t5x_diffeq.data.named_source import load_source
from t5x_diffeq.data.recipe import adopt_tokenizer, make_tokenizer, tokenizer_in
from t5x_diffeq.data.shards import ShardedDocuments
from t5x_diffeq.data.tokenizer import ByteTokenizer
from t5x_diffeq.data.tokenizer_folder import load_tokenizer
from t5x_diffeq.system import files
from t5x_diffeq.system.errors import InputError
from t5x_diffeq.system.files import file_digest


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    return make_shards(tmp_path_factory.mktemp("shards"))


@pytest.fixture
def shards(original, tmp_path):
    return shutil.copytree(original, tmp_path / "shards")


@pytest.fixture
def data(shards):
    return data_of(shards)


CHANGES = {
    "swapped": (lambda s: swap(s, ".array_record"), f"{NAMES[0]}.array_record is not the one"),
    "swapped lengths": (lambda s: swap(s, ".lengths.npy"), f"{NAMES[0]}.lengths.npy is not the"),
    "one bit": (lambda s: flip(s / f"{NAMES[1]}.array_record"), f"{NAMES[1]}.array_record is not"),
    "missing": (lambda s: (s / f"{NAMES[1]}.array_record").unlink(), "No such file or directory"),
    "hash": (
        lambda s: edit(s, lambda m: m["train"]["sha256"].__setitem__(1, "0" * 64)),
        rf"{NAMES[1]}.array_record is not .* not 000000000000\.\.\.; restore it",
    ),
    "tokenizer": (
        lambda s: edit(s, lambda m: m.update(tokenizer="other")),
        "its tokenizer is not the one that its shards were made with",
    ),
    "vocabulary": (
        lambda s: edit(s, lambda m: m.update(vocab_size=300)),
        "was tokenised with vocab_size 300, and the tokenizer of workdir .* has 256",
    ),
    "records": (
        lambda s: edit(s, lambda m: m.update(record_tokens=7)),
        "train-00000-of-00002.array_record holds [0-9]+ records, and its lengths are of",
    ),
    "documents": (
        lambda s: edit(s, lambda m: m["train"].update(documents=3)),
        "it says 3 documents of train, and its shards hold [0-9]+; restore it",
    ),
    "a list": (lambda s: (s / "manifest.json").write_text("[]"), "is damaged: it is a list"),
    "no JSON": (lambda s: (s / "manifest.json").write_text("{"), "manifest.json is damaged: Exp"),
    "a number": (lambda s: edit(s, lambda m: m.update(train=7)), "'train' of it is 7"),
    "no names": (lambda s: edit(s, lambda m: m["train"].pop("names")), "train lacks 'names'"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_is_not_as_it_was_made_is_refused_by_name(shards, data, tmp_path, change):
    make, message = CHANGES[change]
    make(shards)
    with pytest.raises(InputError, match=message):
        corpus_of(data, tmp_path / "run", new=True)


def test_tokens_beyond_the_vocabulary(shards, data, tmp_path):
    edit(shards, lambda manifest: manifest["train"]["largest_token"].__setitem__(1, 999))
    with pytest.raises(
        InputError, match=rf"{NAMES[1]} of .* holds token 999, .* tokenizer has 256"
    ):
        corpus_of(data, tmp_path / "run", new=True)


def test_hashed_once_on_a_machine(shards, data, tmp_path, monkeypatch):
    hashed = []

    def count_digest(path):
        hashed.append(path.name)
        return file_digest(path)

    monkeypatch.setattr(files, "file_digest", count_digest)
    corpus_of(data, tmp_path / "run", new=True)
    assert len(hashed) == len(set(hashed)) == 8  # records and lengths of two splits
    corpus_of(data, tmp_path / "run", new=False)
    load_corpus(tmp_path / "run")
    assert len(hashed) == 8
    os.utime(shards / f"{NAMES[1]}.array_record")
    load_corpus(tmp_path / "run")
    assert hashed[8:] == [f"{NAMES[1]}.array_record"]


def test_a_cache_that_can_not_be_written(shards, monkeypatch, tmp_path, capsys):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("T5X_DIFFEQ_CACHE", str(tmp_path / "file"))
    ShardedDocuments(shards, "train")
    assert "Not a directory" in (said := capsys.readouterr().err) or "exists" in said
    flip(shards / f"{NAMES[1]}.array_record")
    with pytest.raises(InputError, match="is not the one"):
        ShardedDocuments(shards, "train")


def test_records_that_change_later_are_named(shards, monkeypatch):
    monkeypatch.setattr("t5x_diffeq.data.shards.IN_MEMORY_TOKENS", 0)
    documents = ShardedDocuments(shards, "train")
    path = shards / f"{NAMES[1]}.array_record"
    content = bytearray(path.read_bytes())
    content[200] ^= 0xFF
    path.write_bytes(content)
    with pytest.raises(InputError, match=rf"{path.name}: record \d+ can't be read: .+; prepare"):
        for number in range(len(documents)):
            documents[number]


# ------------------------------------------------------------------- workdirs that never began


def text_of(folder, name, line):
    path = folder / name
    path.write_text("".join(f"{line} {n}\n" for n in range(300)))
    return path


@pytest.mark.parametrize("tokenizer", ["bytes", "sentencepiece"])
def test_a_refused_run_leaves_nothing_that_matters(tmp_path, capsys, tokenizer):
    """Other text, then another tokenizer, in the workdir of a run that was refused."""
    run = tmp_path / "run"
    data = small_config(text_of(tmp_path, "a.txt", "first text, line")).data
    data.update(tokenizer=tokenizer, tokenizer_vocab_size=300)
    with pytest.raises(InputError, match=r"model.vocab_size is 77, and the tokenizer has"):
        corpus_of(data, run, new=True, vocab_size=77)
    assert not (run / "data").exists()  # it was refused before the text was tokenised
    corpus_of(data, run, new=True)
    data.path = str(text_of(tmp_path, "b.txt", "something else:"))
    corpus = corpus_of(data, run, new=True)
    assert "left over from a run that never started" in capsys.readouterr().err
    tokens = corpus.parts[0].train[0]
    assert corpus.tokenizer.decode(tokens[:-1]).startswith("something else: 0")
    fresh = corpus_of(data, tmp_path / "fresh", new=True)
    assert corpus.fingerprint == fresh.fingerprint
    assert read_manifest(run / "data" / "0") == read_manifest(tmp_path / "fresh" / "data" / "0")


def test_a_tokenizer_of_other_text_is_not_used_for_shards(tmp_path):
    folder = tmp_path / "tokenizer"
    data = small_config(text_of(tmp_path, "a.txt", "first text, line")).data
    data.update(tokenizer="sentencepiece", tokenizer_vocab_size=300)
    data = DataKeys(**data)
    documents = load_source(data).train
    tokenizer_in(folder, data, documents, "text of a")
    tokenizer_in(folder, data, documents, "text of a")
    with pytest.raises(InputError, match="was trained on other text; choose another folder"):
        tokenizer_in(folder, data, documents, "text of b")
    recipe = json.loads((folder / "recipe.json").read_text())
    (folder / "recipe.json").write_text(json.dumps({**recipe, "text": None}))
    tokenizer_in(folder, data, documents, "text of b")  # of an earlier version, it isn't known
    for damage in ("[]", "{"):
        (folder / "recipe.json").write_text(damage)
        with pytest.raises(InputError, match=r"recipe\.json is damaged: .*; restore it"):
            tokenizer_in(folder, data, documents, "text of b")


@pytest.mark.parametrize(
    "damage", ["{", "[]", '{"parts": {}}', '{"parts": [3]}', '{"parts": [{"fingerprint": 1}]}']
)
def test_damaged_facts_about_the_tokens_are_named(tmp_path, damage):
    """Whatever reads them: a run, a sweep that compares data, a run that is tuned from it."""
    data = small_config(text_of(tmp_path, "a.txt", "first text, line")).data
    corpus_of(data, tmp_path / "run", new=True)
    (tmp_path / "run" / "data.json").write_text(damage)
    for read in (load_corpus, stored_fingerprint, lambda run: link_corpus(run, tmp_path)):
        with pytest.raises(InputError, match=r"data\.json, which says where the tokens are, can't"):
            read(tmp_path / "run")


def test_a_workdir_with_the_tokenizer_of_another_run(tmp_path):
    data = small_config(text_of(tmp_path, "a.txt", "first text, line")).data
    corpus_of(data, tmp_path / "bytes", new=True)
    data.update(tokenizer="sentencepiece", tokenizer_vocab_size=300)
    corpus_of(data, tmp_path / "run", new=True)
    shutil.rmtree(tmp_path / "run" / "tokenizer")
    shutil.copytree(tmp_path / "bytes" / "tokenizer", tmp_path / "run" / "tokenizer")
    with pytest.raises(InputError, match=r"was tokenised with tokenizer .* restore the one or the"):
        load_corpus(tmp_path / "run")


def test_shards_in_the_workdir_of_a_refused_run_on_text(shards, data, tmp_path):
    """The tokenizer that was trained for that text does not hide the shards' own."""
    text = small_config(text_of(tmp_path, "a.txt", "first text, line")).data
    text.update(tokenizer="sentencepiece", tokenizer_vocab_size=300)
    with pytest.raises(InputError, match=r"model.vocab_size is 77"):
        corpus_of(text, tmp_path / "run", new=True, vocab_size=77)
    assert corpus_of(data, tmp_path / "run", new=True).tokenizer.vocab_size == 256


# ------------------------------------------------------------------- what is half made


@pytest.fixture
def json_file(tmp_path):
    """The file of a tokenizer that knows the words of the texts here."""
    tokenizers = pytest.importorskip("tokenizers", reason="tokenizers isn't installed")
    words = ("<|endoftext|>", "first", "text", ",", "line", *map(str, range(10)))
    model = tokenizers.models.WordLevel({word: n for n, word in enumerate(words)}, "first")
    made = tokenizers.Tokenizer(model)
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    (tmp_path / "words.json").write_text(made.to_str())
    return tmp_path / "words.json"


def stop_while_tokenising(data, run, monkeypatch, **keys):
    """Ctrl-C before the first shard is done."""

    def stop(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(preparation, "write_shard", stop)
        prepare_corpus(DataKeys(**data), run, True, **keys)
    assert (run / "data" / "0" / "tokenizer").exists()


def assert_as_if_fresh(data, run, fresh):
    """The workdir's tokens, and the tokenizer that made them, are those of a new one."""
    for workdir in (run, fresh):
        corpus = corpus_of(data, workdir, new=True)
        (expected,) = corpus.tokenizer.encode([load_source(DataKeys(**data)).train[0]])
        assert corpus.parts[0].train[0].tolist() == [*expected, corpus.tokenizer.end_of_text]
    assert read_manifest(run / "data" / "0") == read_manifest(fresh / "data" / "0")
    names = [{path.name for path in (w / "tokenizer").iterdir()} for w in (run, fresh)]
    assert names[0] == names[1]


@pytest.mark.parametrize("other", ["sentencepiece", "bytes"])
def test_a_start_stopped_while_it_tokenised(tmp_path, monkeypatch, json_file, other):
    data = small_config(text_of(tmp_path, "a.txt", "first text, line")).data
    data.update(tokenizer=other, tokenizer_vocab_size=300)
    stop_while_tokenising(data, tmp_path / "run", monkeypatch)
    data.tokenizer = str(json_file)
    assert_as_if_fresh(data, tmp_path / "run", tmp_path / "fresh")


def test_a_tokenizers_file_that_was_edited(tmp_path, monkeypatch, json_file):
    """In the workdir of a stopped start it is read again; shards of `prepare_data` are refused."""
    data = small_config(text_of(tmp_path, "a.txt", "first text, line")).data
    data.tokenizer = str(json_file)
    stop_while_tokenising(data, tmp_path / "run", monkeypatch)
    folder = tmp_path / "run" / "tokenizer"
    json_file.write_text(json_file.read_text().replace('"line"', '"lane"'))
    with pytest.raises(InputError, match="was made of files that have changed; choose another"):
        tokenizer_in(folder, DataKeys(**data), [])
    assert_as_if_fresh(data, tmp_path / "run", tmp_path / "fresh")


def test_another_field_of_the_same_lines(tmp_path):
    path = tmp_path / "rows.jsonl"
    rows = ({"text": f"text {n}", "body": f"the body {n}"} for n in range(300))
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = small_config(path).data
    corpus_of(data, tmp_path / "run", new=True)
    data.text_field = "body"
    assert_as_if_fresh(data, tmp_path / "run", tmp_path / "fresh")


def test_a_tokenizer_that_was_taken_over_for_another_run(tmp_path, monkeypatch):
    """`finetune` was stopped while it tokenised; then `train` begins in its workdir."""
    data = small_config(text_of(tmp_path, "a.txt", "first text, line")).data
    data.update(tokenizer="sentencepiece", tokenizer_vocab_size=300)
    keys = DataKeys(**data)
    adopt_tokenizer(ByteTokenizer(), tmp_path / "run" / "tokenizer", keys)
    stop_while_tokenising(data, tmp_path / "run", monkeypatch, tuned=True)
    assert load_tokenizer(tmp_path / "run" / "data" / "0" / "tokenizer").vocab_size == 256
    assert_as_if_fresh(data, tmp_path / "run", tmp_path / "fresh")


def test_a_tokenizer_that_was_saved_only_half(tmp_path, json_file):
    """Whatever is cut off, neither it nor the one that was there before is found."""
    data = DataKeys(tokenizer=str(json_file))
    named, folder = make_tokenizer(data, []), tmp_path / "tokenizer"
    named.open_with(1)
    named.save(folder)
    assert {path.name for path in folder.iterdir()} == {
        "end_of_text.json",
        "opener.json",
        "tokenizer.json",
    }
    (folder / "tokenizer.json").unlink()
    assert load_tokenizer(folder) is None
    made = tokenizer_in(folder, data, [])
    assert (made.opener, load_tokenizer(folder).opener) == (None, None)
    (folder / "recipe.json").unlink()  # which is written last
    (folder / "tokenizer.json").write_text("{")
    assert tokenizer_in(folder, data, []).fingerprint == named.fingerprint


# ------------------------------------------------------------------- data that has moved


def test_shards_may_move_and_not_change(shards, data, original, tmp_path):
    run = tmp_path / "run"
    before = corpus_of(data, run, new=True).fingerprint
    data.path = str(shards.rename(tmp_path / "moved"))
    assert corpus_of(data, run, new=False).fingerprint == before
    assert load_corpus(run).fingerprint == before  # also without the config
    edit(tmp_path / "moved", lambda m: m["train"]["sha256"].reverse())
    with pytest.raises(InputError, match=r"was started on .* but the data is now .*moved"):
        corpus_of(data, run, new=False)


def test_parts_of_a_mixture_may_move_and_not_weigh_more(shards, data, tmp_path):
    text = text_of(tmp_path, "a.txt", "first text, line")
    mixture = ((1, "tokens", str(shards)), (3, "text_files", str(text)))
    data.update(source="mixture", path=None, mixture=mixture)
    before = corpus_of(data, tmp_path / "run", new=True).fingerprint
    places = [str(path.rename(tmp_path / f"moved-{path.name}")) for path in (shards, text)]
    moved = [(w, source, place) for (w, source, _), place in zip(mixture, places, strict=True)]
    data.mixture = tuple(moved)
    assert corpus_of(data, tmp_path / "run", new=False).fingerprint == before
    data.mixture = ((2, *moved[0][1:]), moved[1])
    with pytest.raises(InputError, match=r"weights \[1, 3\], and data.mixture has \[2, 3\]"):
        corpus_of(data, tmp_path / "run", new=False)


def test_text_may_move_and_not_change(tmp_path):
    text = text_of(tmp_path, "a.txt", "first text, line")
    config = small_config(text)
    save_config(Config.of(config), tmp_path / "run", "run")
    before = corpus_of(config.data, tmp_path / "run", new=True).fingerprint
    config.data.path = str(text.rename(tmp_path / "moved.txt"))
    assert not check_config(Config.of(config), tmp_path / "run")
    assert corpus_of(config.data, tmp_path / "run", new=False).fingerprint == before
    text_of(tmp_path, "moved.txt", "another text, line")
    with pytest.raises(InputError, match=r"was started on .*moved.txt .* is now .*moved.txt"):
        corpus_of(config.data, tmp_path / "run", new=False)


def test_a_workdir_within_its_text_is_refused(tmp_path):
    """Its own files would be read as text when the run is resumed."""
    (tmp_path / "texts").mkdir()
    data = small_config(text_of(tmp_path, "texts/a.txt", "first text, line")).data
    data.path = str(tmp_path / "texts")
    with pytest.raises(InputError, match=r"run is in data.path=.*texts, so its files would be rea"):
        corpus_of(data, tmp_path / "texts" / "run", new=True)
    corpus_of(data, tmp_path / "run", new=True)
    data.path, data.validation_path = str(tmp_path / "texts" / "a.txt"), str(tmp_path / "texts")
    with pytest.raises(InputError, match=r"run is in data.validation_path=.*texts, so its files"):
        corpus_of(data, tmp_path / "texts" / "run", new=True)


def test_tokens_with_a_link_out_of_their_workdir_are_not_looked_at(tmp_path):
    """They may have come from somebody else; also without a manifest."""
    data = small_config(text_of(tmp_path, "a.txt", "first text, line")).data
    corpus_of(data, tmp_path / "run", new=True)
    (tmp_path / "run" / "data" / "0" / "more").symlink_to("/etc/hostname")
    for lost in (False, True):
        if lost:
            (tmp_path / "run" / "data" / "0" / "manifest.json").unlink()
        with pytest.raises(InputError, match=r"more is a link to /etc/hostname, outside of"):
            load_corpus(tmp_path / "run")
