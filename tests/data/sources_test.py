"""Sources: splits, order, fingerprints, and files that are no text."""

import gzip
import json
import os
import re
import shutil
import sys

import pytest
from helpers import run_to_end

from configs import default
from t5x_diffeq.config.config import Config, DataKeys
from t5x_diffeq.data import contents
from t5x_diffeq.data.encoding import TextEncoder
from t5x_diffeq.data.named_source import check_paths, load_source
from t5x_diffeq.data.rows import Skipped
from t5x_diffeq.data.sources import find_text_files, stdlib
from t5x_diffeq.data.tokenizer import ByteTokenizer
from t5x_diffeq.system.errors import InputError


def source_of(path, source="text_files", **keys):
    data = default.get_config().data
    data.update(source=source, path=str(path), **keys)
    return load_source(DataKeys(**data))


def test_stdlib_is_split_by_file_and_the_same_in_every_process():
    source = stdlib(Config.of(default.get_config()).data)
    assert len(source.train) > 10 * len(source.validation) > 100
    assert not set(source.train) & set(source.validation)
    code = "from t5x_diffeq.data.sources import stdlib; print(stdlib(None).fingerprint)"
    other = run_to_end([sys.executable, "-c", code], check=True)
    assert other.stdout.strip() == source.fingerprint


def test_last_tenth_of_the_text_validates(tmp_path):
    (tmp_path / "a.txt").write_text("a" * 500)
    (tmp_path / "b.md").write_text("b" * 500)
    (tmp_path / "c.py").write_text("not text by its name")
    source = source_of(tmp_path)
    assert list(source.train) == ["a" * 500, "b" * 400]
    assert list(source.validation) == ["b" * 100]
    glob = source_of(tmp_path / "*.txt")
    assert (list(glob.train), list(glob.validation)) == (["a" * 450], ["a" * 50])
    named = source_of(tmp_path / "a.txt", validation_path=str(tmp_path / "b.md"))
    assert (list(named.train), list(named.validation)) == (["a" * 500], ["b" * 500])
    assert len({source.fingerprint, glob.fingerprint, named.fingerprint}) == 3


def test_a_name_of_the_hub_is_no_file():
    with pytest.raises(InputError, match=r"--config.data.source=stream reads a dataset of the Hug"):
        source_of("owner/dataset")


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("a.txt,b.txt", "several files are a folder, or a glob with"),
        ("f*", "no file that matches it as a glob, but 1 folder(s); f*/**/* reads their files"),
    ],
)
def test_paths_of_several_files_that_are_none(path, said, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    with pytest.raises(InputError, match=re.escape(said)):
        find_text_files("path", path)
    (tmp_path / "file.txt").write_text("a text")
    assert len(find_text_files("path", "f*")) == 1
    assert "1 folder(s) left out, such as" in capsys.readouterr().err


def test_what_a_folder_has_besides_is_counted(tmp_path, capsys):
    for name in ("README.md", "a.py", "b/c.py", "d.toml", ".git/e.py", "LICENSE"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("some text\n" * 20)
    source_of(tmp_path)
    said = capsys.readouterr().err
    assert f"data.path={tmp_path}: read 1 of 5 files; 2 .py, 1 .toml left out; " in said
    pattern = f"{tmp_path}/**/*.py"
    assert f"--config.data.path='{pattern}' reads .py\n" in said
    assert len(source_of(pattern).train) == 2 and capsys.readouterr().err == ""
    (tmp_path / "README.md").unlink()
    with pytest.raises(InputError, match=r"plain or with .gz or .zst; 2 .py, 1 .toml left out; "):
        source_of(tmp_path)


@pytest.mark.parametrize("other", ["a.txt", "copy.txt", "*.txt", "b.txt"])
def test_a_validation_text_that_is_trained_on_is_told(tmp_path, other, capsys):
    for name, text in (
        ("a.txt", "text " * 40),
        ("copy.txt", "text " * 40),
        ("b.txt", "words " * 9),
    ):
        (tmp_path / name).write_text(text)
    source_of(tmp_path / "a.txt", validation_path=str(tmp_path / other))
    said = "has text that the run trains on" in capsys.readouterr().err
    assert said == (other != "b.txt")


@pytest.mark.parametrize(
    ("record", "way_out"),
    [
        ({"body": "x"}, "set --config.data.text_field (1 of"),
        (
            {"messages": [{"role": "user", "content": "x"}]},
            "or train on conversations: --config.data.loss_on=completion and "
            "--config.data.chat_template=plain, or FILE.jinja (1 of",
        ),
        (
            {"prompt": "x", "completion": "y"},
            "or train on conversations: --config.data.loss_on=completion (1 of",
        ),
    ],
)
def test_conversations_are_known_by_their_fields(record, way_out, tmp_path):
    (tmp_path / "a.jsonl").write_text(json.dumps(record))
    with pytest.raises(InputError) as caught:
        source_of(tmp_path / "a.jsonl")
    assert way_out in str(caught.value)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"good\xff", "byte 0xff at offset 4 is not UTF-8"),
        (b"ab\0c", "byte 0x00 at offset 2"),
        (gzip.compress(b"text", mtime=0), "is compressed by gzip; let its name end in .gz"),
        (b"\x28\xb5\x2f\xfd\x04", "is compressed by zstd; let its name end in .zst"),
        ("text".encode("utf-16"), "a text in UTF-16; convert it: iconv -f UTF-16 -t UTF-8"),
        (b"PK\x03\x04\x14\0", "is an archive .zip, docx, xlsx, ....; unpack it"),
        (b"%PDF-1.7\n\xe2\xe3", "is a PDF; convert it, for example with pdftotext"),
        (b"PAR1\x15\x04\0", "is a parquet file; let its name end in .parquet"),
    ],
    ids=["UTF-8", "NUL", "gzip", "zstd", "UTF-16", "zip", "PDF", "parquet"],
)
@pytest.mark.parametrize("name", ["bad.txt", "bad.jsonl"])
def test_files_that_are_no_text(tmp_path, name, content, message):
    if name == "bad.jsonl" and content[:2] in (b"go", b"ab"):
        message = "is not JSON"
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(InputError, match=message):
        source_of(path)


def test_such_files_of_a_folder_are_skipped_and_counted(tmp_path):
    (tmp_path / "a.txt").write_text("a text")
    (tmp_path / "b.txt").write_bytes(b"good\xff")
    (tmp_path / "c.md").write_bytes(b"ab\0c")
    (tmp_path / "d.txt").write_text("another")
    source = source_of(tmp_path, validation_path=str(tmp_path / "a.txt"), max_unreadable=0.5)
    skipped = Skipped()
    kept = [text for text, _ in TextEncoder(ByteTokenizer()).cut(source.train, skipped)]
    assert kept == ["a text", "another"]
    assert skipped == {"not UTF-8": 1, "with a NUL character": 1}


def test_files_named_like_another_split_are_told(tmp_path, capsys):
    (tmp_path / "train.txt").write_text("text " * 40)
    source_of(tmp_path)
    assert "warning" not in capsys.readouterr().err
    (tmp_path / "test.txt").write_text("words " * 40)
    source_of(tmp_path)
    assert "has test.txt, which is read like its other files; name the" in capsys.readouterr().err


def test_paths_that_lead_nowhere(tmp_path, small):
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputError, match=r"there are no files ending in .txt, .md"):
        find_text_files("path", str(tmp_path / "empty"))
    with pytest.raises(InputError, match="there is no file or folder of that name"):
        find_text_files("path", str(tmp_path / "absent.txt"))
    with pytest.raises(InputError, match="it begins or ends with a space; check the path"):
        find_text_files("path", "text.txt ")
    small.data.path = None
    with pytest.raises(InputError, match=r"data.path is not set"):
        load_source(Config.of(small).data)
    os.mkfifo(tmp_path / "pipe")
    for path in (str(tmp_path / "pipe"), os.devnull):
        with pytest.raises(InputError, match="there is a pipe or a device of that name; save its"):
            find_text_files("path", path)
    small.data.source = "books"
    with pytest.raises(InputError, match="'books'; it can be stdlib, text_files, tfds"):
        load_source(Config.of(small).data)


def test_paths_that_the_source_does_not_read(small):
    check_paths(Config.of(small).data)
    small.data.source = "stdlib"
    with pytest.raises(InputError, match=r"data.path=.*text.txt is set, and data.source=stdlib .*"):
        check_paths(Config.of(small).data)
    small.data.update(source="tokens", validation_path="v.txt")
    with pytest.raises(InputError, match=r"v.txt is set, and data.source=tokens"):
        check_paths(Config.of(small).data)
    small.data.source = "package.module:function"  # which may read them
    check_paths(Config.of(small).data)


def test_token_shards_are_no_text(tmp_path):
    (tmp_path / "manifest.json").write_text("{}")
    with pytest.raises(InputError, match="token shards, which --config"):
        source_of(tmp_path)


@pytest.fixture(scope="module")
def tfds_folder(tmp_path_factory):
    """A dataset of someone else's builder, in TFDS's own folders."""
    import tensorflow_datasets as tfds

    class Haiku(tfds.core.GeneratorBasedBuilder):
        VERSION = tfds.core.Version("1.0.0")

        def _info(self):
            features = tfds.features.FeaturesDict({"text": tfds.features.Text()})
            return tfds.core.DatasetInfo(builder=self, features=features)

        def _split_generators(self, dl_manager):
            return {"train": self._generate_examples(0, 9)}

        def _generate_examples(self, start, stop):
            for n in range(start, stop):
                yield n, {"text": f"poem {n}, ünïcode"}

    folder = tmp_path_factory.mktemp("tfds")
    Haiku(data_dir=folder, file_format="array_record").download_and_prepare()
    yield folder
    tfds.core.registered._DATASET_REGISTRY.pop("haiku", None)


def test_any_tfds_builder(tfds_folder):
    splits = {"train_split": "train[:7]", "validation_split": "train[7:]"}
    source = source_of("haiku", "tfds", data_dir=str(tfds_folder), **splits)
    assert (len(source.train), len(source.validation)) == (7, 2)
    poems = {f"poem {n}, ünïcode" for n in range(9)}
    assert {*source.train, *source.validation} == poems
    by_folder = source_of(tfds_folder / "haiku" / "1.0.0", "tfds", **splits)
    assert list(by_folder.train) == list(source.train)
    assert by_folder.fingerprint == source.fingerprint
    with pytest.raises(InputError, match=r"data.validation_split=validation: haiku has train"):
        source_of("haiku", "tfds", data_dir=str(tfds_folder))
    with pytest.raises(InputError, match=r"data.path=haiku has no 'body', but text; set"):
        source_of("haiku", "tfds", data_dir=str(tfds_folder), text_field="body")
    with pytest.raises(InputError, match=r"data.path=nosuch .* Dataset nosuch not found"):
        source_of("nosuch", "tfds")


def test_a_tfds_folder_names_no_code(tfds_folder, tmp_path, monkeypatch):
    """Its library would import the class of a feature, and download a namespace's builder."""
    from tensorflow_datasets.core.registered import _DATASET_REGISTRY

    monkeypatch.delitem(_DATASET_REGISTRY, "haiku")
    folder = tmp_path / "haiku" / "1.0.0"
    shutil.copytree(tfds_folder / "haiku" / "1.0.0", folder)
    features = folder / "features.json"
    own = "tensorflow_datasets.core.features.text_feature.Text"
    assert own in features.read_text()
    features.write_text(features.read_text().replace(own, "harmful.Feature"))
    (tmp_path / "harmful.py").write_text("raise SystemExit('it ran')")
    monkeypatch.syspath_prepend(tmp_path)
    for path, keys in ((folder, {}), ("haiku", {"data_dir": str(tmp_path)})):
        with pytest.raises(InputError, match=r"class harmful\.Feature, which isn't the library's"):
            source_of(path, "tfds", **keys)
    with pytest.raises(InputError, match="community datasets are disabled"):
        source_of("kaggle:haiku", "tfds")


def test_hugging_face_datasets(tmp_path, monkeypatch):
    datasets = pytest.importorskip("datasets", reason="the Hugging Face library isn't installed")
    texts = [f"document {n}" for n in range(9)]
    rows = datasets.Dataset.from_dict({"text": texts})
    datasets.DatasetDict(train=rows, validation=rows.select([3])).save_to_disk(tmp_path / "saved")
    source = source_of(tmp_path / "saved", "huggingface")
    assert (list(source.train), list(source.validation)) == (texts, texts[3:4])
    rows.to_json(tmp_path / "rows" / "train.jsonl")
    splits = {"train_split": "train[:8]", "validation_split": "train[8:]"}
    read = source_of(tmp_path / "rows", "huggingface", data_dir=str(tmp_path / "cache"), **splits)
    assert (list(read.train), list(read.validation)) == (texts[:8], texts[8:])
    monkeypatch.setenv("HOME", str(tmp_path))
    assert len(source_of("~/rows", "huggingface", data_dir=str(tmp_path), **splits).train) == 8
    with pytest.raises(InputError, match=r"data.train_split=rest can't be loaded"):
        source_of(tmp_path / "saved", "huggingface", train_split="rest")
    with pytest.raises(InputError, match=r"hold out a part: .*train_split='train\[:99%\]' "):
        source_of(tmp_path / "rows", "huggingface", data_dir=str(tmp_path / "cache"))
    with pytest.raises(InputError, match=r"is in percent or in rows: 'train\[:90%\]', 'train\["):
        source_of(tmp_path / "rows", "huggingface", train_split="train[:0.9]")
    with pytest.raises(InputError, match=r"train.jsonl is a file; data.source=huggingface needs"):
        source_of(tmp_path / "rows" / "train.jsonl", "huggingface")


def test_a_hugging_face_dataset_is_its_contents(tmp_path, monkeypatch):
    """Neither times nor places of its files matter; on a machine it is hashed once."""
    datasets = pytest.importorskip("datasets", reason="the Hugging Face library isn't installed")
    hashed = []
    rows_of = contents._rows_of
    monkeypatch.setattr(contents, "_rows_of", lambda *x: hashed.append(x) or rows_of(*x))
    keys = {"train_split": "train[:8]", "validation_split": "train[8:]"}

    def fingerprint_of(name, texts, more=(), library="library"):
        (tmp_path / name).mkdir(exist_ok=True)
        columns = {"text": texts, **dict(more)}
        datasets.Dataset.from_dict(columns).to_json(tmp_path / name / "train.jsonl")
        os.utime(tmp_path / name / "train.jsonl", (len(hashed), len(hashed)))
        library = str(tmp_path / library)
        return source_of(tmp_path / name, "huggingface", data_dir=library, **keys).fingerprint

    texts = [f"document {n}" for n in range(9)]
    expected = fingerprint_of("rows", texts)
    assert fingerprint_of("rows", texts) == fingerprint_of("copy", texts) == expected
    assert fingerprint_of("rows", texts, {"number": range(9)}, "another") == expected
    assert fingerprint_of("rows", [*texts[:-1], "edited"]) != expected
    count = len(hashed)
    source = source_of(tmp_path / "rows", "huggingface", data_dir=str(tmp_path / "library"), **keys)
    assert (len(hashed), source.validation[0]) == (count, "edited")


@pytest.mark.parametrize("source", ["text_files", "stream"])
def test_hidden_files_are_read_only_if_they_are_named(tmp_path, source, capsys):
    folder = tmp_path / ".mine"  # named by the path
    for name in ("a.jsonl", "more/b.jsonl", "._a.jsonl", ".git/c.jsonl", ".x/.y/d.jsonl"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        lines = (json.dumps({"text": f"{name} {n}"}) + "\n" for n in range(30))
        (folder / name).write_text("".join(lines))

    def files_of(path):
        documents = source_of(path, source).train
        whole = range(len(documents) - 1)  # of the last one, a part validates
        return {documents[number].split()[0] for number in whole}

    visible = {"a.jsonl", "more/b.jsonl"}
    assert files_of(folder) == files_of(folder / "**" / "*.jsonl") == visible
    if source == "text_files":
        assert "3 hidden file(s), such as ._a.jsonl: not read" in capsys.readouterr().err
    assert files_of(folder / "*.jsonl") == {"a.jsonl"}
    assert files_of(folder / "._a.jsonl") == files_of(folder / "._*.jsonl") == {"._a.jsonl"}
    assert files_of(folder / ".git" / "*.jsonl") == {".git/c.jsonl"}


def test_linked_folders_are_read_and_none_twice(tmp_path):
    """Also if a link leads back, and if a folder has a hidden name, too."""
    data, web = tmp_path / "data", tmp_path / "web"
    for file in (data / "a.txt", data / "new" / "b.txt", web / "c.txt", data / ".kept" / "d.txt"):
        file.parent.mkdir(exist_ok=True, parents=True)
        file.write_text("text")
    links = {".hidden": web, "again": web, "web": web, "latest": data / "new", "kept": ".kept"}
    for name, folder in links.items():
        (data / name).symlink_to(folder)
    (web / "back").symlink_to(data)
    found = [str(path.relative_to(data)) for path in find_text_files("path", str(data))]
    assert found == ["a.txt", "again/c.txt", "kept/d.txt", "new/b.txt"]


@pytest.mark.parametrize("source", ["text_files", "stream"])
def test_links_to_nothing_are_named(tmp_path, source):
    (tmp_path / "a.jsonl").write_text(json.dumps({"text": "text"}) + "\n")
    for name in (".#a.jsonl", "notes"):  # neither is read
        (tmp_path / name).symlink_to("nowhere")
    for path in (tmp_path, tmp_path / "*.jsonl"):
        source_of(path, source)
    (tmp_path / "b.jsonl").symlink_to("lost.jsonl")
    for path in (tmp_path, tmp_path / "*.jsonl", tmp_path / "b.jsonl"):
        with pytest.raises(
            InputError, match=r"b.jsonl is a link to lost.jsonl, which doesn't exis"
        ):
            source_of(path, source)


@pytest.mark.parametrize("source", ["huggingface", "tfds", "stream", "text_files"])
def test_a_home_of_nobody_is_one_clear_error(source):
    """`~NAME` stays as it is where there is no such user."""
    with pytest.raises(InputError, match="~nobody-here/x"):
        load_source(DataKeys(source=source, path="~nobody-here/x"))
