"""WikiText-103 and OpenWebText: tiny archives in the real layouts, whole and damaged."""

import io
import resource
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
from helpers import ROOT

from t5x_diffeq.data import archives, builders
from t5x_diffeq.data.builders import is_validation, load_or_build, tidy_text
from t5x_diffeq.runtime.errors import InputError, RunError
from t5x_diffeq.runtime.locks import hold_lock

TITLES = {"train": ["Kestrel", "E = mc ²", "Zürich"], "valid": ["Tern"], "test": ["Rook", "Jay"]}
PAGES = {f"{n:07}-{n * 7919:032x}.txt": f"Page {n}\n\n\n\nits text, ñ\n" for n in range(40)}


def wiki(titles: list[str]) -> str:
    article = (
        " \n = {} = \n \n A well @-@ known one , it 's said . \n \n = = Name = = \n \n Short . \n"
    )
    return "".join(article.format(title) + " \n" for title in titles)


def wiki_folder(folder: Path, suffix: str = "raw") -> Path:
    folder.mkdir(parents=True)
    for part, titles in TITLES.items():
        (folder / f"wiki.{part}.{suffix}").write_text(wiki(titles))
    return folder


def wiki_zip(path: Path, suffix: str = "raw", inside: str = "wikitext-103-raw") -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        archive.mkdir(inside)
        for part, titles in TITLES.items():
            archive.writestr(f"{inside}/wiki.{part}.{suffix}", wiki(titles))
    return path


def tar(contents: dict[str, bytes], mode: str) -> bytes:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode=mode) as archive:
        folder = tarfile.TarInfo("openwebtext")
        folder.type = tarfile.DIRTYPE
        archive.addfile(folder)
        for name, content in contents.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return packed.getvalue()


def subsets(prefix: str) -> dict[str, bytes]:
    pages = [(name, text.encode()) for name, text in PAGES.items()]
    return {
        f"{prefix}urlsf_subset00-{i}_data.xz": tar(dict(pages[20 * i : 20 * i + 20]), "w:xz")
        for i in range(2)
    }


def pack_original(folder: Path) -> Path:
    path = folder / "openwebtext.tar.xz"
    path.write_bytes(tar(subsets("openwebtext/"), "w:xz"))
    return path


def pack_subsets(folder: Path) -> Path:
    for i, (name, content) in enumerate(subsets("openwebtext/").items()):
        path = folder / "subsets" / f"urlsf_subset{i:02}.tar"
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(tar({name: content}, "w"))
    return folder / "subsets"


def pack_folder(folder: Path) -> Path:
    for name, content in subsets("").items():
        (folder / name).write_bytes(content)
    (folder / "README.md").write_text("not a page")
    return folder


def unpack(folder: Path) -> Path:
    for name, content in subsets("").items():
        with tarfile.open(fileobj=io.BytesIO(content)) as archive:
            archive.extractall(folder / name.removesuffix(".xz"))
    return folder


def texts(name: str, data_dir: Path, split: str) -> list[str]:
    source = load_or_build(name, None, str(data_dir)).as_data_source(split)
    return [source[i]["text"].decode() for i in range(len(source))]


@pytest.fixture
def large_validation_split(monkeypatch):
    monkeypatch.setattr(builders, "VALIDATION_PART", 0.3)


def test_wikitext_splits_into_natural_articles(tmp_path, capsys):
    raw = wiki_zip(tmp_path / "wikitext-103-raw-v1.zip")
    load_or_build("wikitext103", str(raw), str(tmp_path / "tfds"))
    said = capsys.readouterr()
    assert "building it" in said.err and "3 train, 1 validation, 2 test" in said.err
    assert said.out == ""
    raw.unlink()  # needed no more
    article = "= {} =\n\nA well-known one, it's said.\n\n== Name ==\n\nShort."
    for split, part in (("train", "train"), ("validation", "valid"), ("test", "test")):
        wanted = [article.format(title) for title in TITLES[part]]
        assert texts("wikitext103", tmp_path / "tfds", split) == wanted
    assert len(texts("wikitext103", tmp_path / "tfds", "train[:67%]")) == 2
    assert capsys.readouterr().err == ""
    assert "tensorflow" not in sys.modules


@pytest.mark.parametrize(
    "make",
    [
        lambda folder: wiki_zip(folder / "w.zip", "tokens", "wikitext-103"),
        lambda folder: wiki_folder(folder / "wikitext-103-raw"),
        lambda folder: wiki_folder(folder / "some" / "wikitext-103", "tokens").parent,
    ],
    ids=["zip of tokens", "folder", "folder in a folder"],
)
def test_wikitext_in_other_layouts(tmp_path, make):
    builder = load_or_build("wikitext103", str(make(tmp_path)), str(tmp_path / "tfds"))
    assert {s: x.num_examples for s, x in builder.info.splits.items()} == {
        "train": 3,
        "validation": 1,
        "test": 2,
    }


@pytest.mark.parametrize("pack", [pack_original, pack_subsets, pack_folder, unpack])
def test_openwebtext_in_every_packing(tmp_path, large_validation_split, pack):
    raw = tmp_path / "raw"
    raw.mkdir()
    load_or_build("openwebtext", str(pack(raw)), str(tmp_path / "tfds"))
    train, validation = (
        texts("openwebtext", tmp_path / "tfds", s) for s in ("train", "validation")
    )
    pages = [
        (f"urlsf_subset00-{n // 20}_data.xz/{name}", tidy_text(text.encode()))
        for n, (name, text) in enumerate(PAGES.items())
    ]
    assert train == [text for key, text in pages if not is_validation(key)]
    assert validation == [text for key, text in pages if is_validation(key)]
    assert 4 < len(validation) < 20
    assert train[0].splitlines() == [train[0].split("\n")[0], "", "its text, ñ"]


def test_keys_and_shards(tmp_path, large_validation_split, monkeypatch):
    keys = [key for key, _ in archives.iter_text_files(pack_original(tmp_path))]
    assert keys[0] == f"openwebtext/urlsf_subset00-0_data.xz/{next(iter(PAGES))}"
    assert len(set(keys)) == 40
    zipped = wiki_zip(tmp_path / "w.zip")
    examples = builders.Wikitext103(data_dir=str(tmp_path))._generate_examples(
        zipped, archives.find(zipped, ["wiki.test.raw"])
    )
    assert [key for key, _ in examples] == ["wiki.test.raw/00000", "wiki.test.raw/00001"]
    monkeypatch.setattr(builders, "SHARD_LENGTH", 2)
    monkeypatch.setattr(builders, "SAY_EVERY", 3)
    train = load_or_build("wikitext103", str(zipped), str(tmp_path)).info.splits["train"]
    assert train.shard_lengths == [2, 1]
    assert [text.split("\n")[0] for text in texts("wikitext103", tmp_path, "train")] == [
        "= Kestrel =",
        "= E = mc ² =",
        "= Zürich =",
    ]


def test_one_document_in_two_thousand_validates_by_its_name_alone():
    keys = [f"openwebtext/urlsf_subset00-1_data.xz/{n:07}-a.txt" for n in range(100_000)]
    chosen = [key for key in keys if is_validation(key)]
    assert 20 < len(chosen) < 90
    assert all(is_validation(key.removeprefix("openwebtext/").replace(".xz", "")) for key in chosen)


def test_pages_that_are_no_text_are_skipped_and_counted(tmp_path, large_validation_split, capsys):
    pages = {name: text.encode() for name, text in PAGES.items()}
    pages |= {"a.txt": b"\xff\xfe", "b.txt": b" \n\n ", "c.txt": b"", "d.html": b"<p>"}
    path = tmp_path / "pages.tar.gz"
    path.write_bytes(tar(pages, "w:gz"))
    load_or_build("openwebtext", str(path), str(tmp_path / "tfds"))
    assert "3 files skipped, empty or not UTF-8" in capsys.readouterr().err
    builder = load_or_build("openwebtext", None, str(tmp_path / "tfds"))
    assert sum(split.num_examples for split in builder.info.splits.values()) == 40


def cut(path: Path, length: int) -> Path:
    path.write_bytes(path.read_bytes()[:length])
    return path


def corrupt(path: Path) -> Path:
    content = bytearray(path.read_bytes())
    content[len(content) // 3] ^= 0xFF
    path.write_bytes(content)
    return path


def without(path: Path, name: str) -> Path:
    other = path.with_name("other.zip")
    with zipfile.ZipFile(path) as old, zipfile.ZipFile(other, "w") as new:
        for member in old.namelist():
            if not member.endswith(name):
                new.writestr(member, old.read(member))
    return other


def write_not_utf8(folder: Path) -> Path:
    (wiki_folder(folder / "w") / "wiki.test.raw").write_bytes(b" \n = \xff = \n")
    return folder


def bad_subset(folder: Path) -> Path:
    corrupt(pack_folder(folder) / "urlsf_subset00-1_data.xz")
    return folder


@pytest.mark.parametrize(
    ("name", "make", "message"),
    [
        ("wikitext103", lambda f: f / "absent.zip", r"data.path=\S*absent.zip does not exist"),
        ("wikitext103", lambda f: f / ("long" * 100), "data.path=.*: File name too long"),
        ("wikitext103", lambda f: cut(wiki_zip(f / "w.zip"), 900), "w.zip is no zip archive, dama"),
        ("wikitext103", lambda f: corrupt(wiki_zip(f / "w.zip")), "w.zip, .*wiki.train.raw is no"),
        ("wikitext103", lambda f: f, "has no wiki.train.raw or wiki.train.tokens; give the whole"),
        ("wikitext103", lambda f: without(wiki_zip(f / "w.zip"), "test.raw"), "no wiki.test.raw"),
        ("wikitext103", lambda f: wiki_folder(f / "wikitext-2-raw"), "is WikiText-2; give wiki"),
        ("wikitext103", write_not_utf8, "wiki.test.raw is no UTF-8 text, .*0xff"),
        ("openwebtext", lambda f: wiki_zip(f / "w.zip"), "w.zip is no tar archive"),
        ("openwebtext", lambda f: cut(pack_original(f), 400), "cut short"),
        ("openwebtext", lambda f: cut(pack_original(f), -4), "tar.xz is no .* cut short"),
        ("openwebtext", lambda f: corrupt(pack_original(f)), "damaged"),
        ("openwebtext", bad_subset, "subset00-1_data.xz is no tar archive, damaged"),
        (
            "openwebtext",
            lambda f: cut(pack_subsets(f) / "urlsf_subset01.tar", 1500),
            "subset01.tar is no",
        ),
        ("openwebtext", lambda f: f, "has no document for the train split"),
        ("openwebtext", unpack, "has no document for the validation split; give the whole of op"),
    ],
)
def test_archives_that_cannot_be_used(tmp_path, name, make, message):
    raw = tmp_path / "raw"
    raw.mkdir()
    with pytest.raises(InputError, match=message) as failure:
        load_or_build(name, str(make(raw)), str(tmp_path / "tfds"))
    assert "\n" not in str(failure.value) and "data.path" in str(failure.value)
    with pytest.raises(InputError, match=r"data.path=None does not exist, and .* is not built in"):
        load_or_build(name, None, str(tmp_path / "tfds"))


def test_unbuilt_half_built_and_foreign_folders(tmp_path):
    with pytest.raises(InputError, match=r"wikitext103 is not built in \S*103"):
        load_or_build("wikitext103", None, str(tmp_path))
    raw = wiki_zip(tmp_path / "w.zip")
    whole = Path(load_or_build("wikitext103", str(raw), str(tmp_path)).data_dir)
    killed = whole.rename(whole.with_name("incomplete.ABCDEF_1.0.0"))
    with pytest.raises(InputError, match="is not built"):
        load_or_build("wikitext103", None, str(tmp_path))
    load_or_build("wikitext103", str(raw), str(tmp_path))
    assert not killed.exists()
    shard = whole / "wikitext103-test.array_record-00000"
    aside = shard.rename(tmp_path / "aside")
    with pytest.raises(InputError, match="array_record-00000 is missing; delete"):
        load_or_build("wikitext103", None, str(tmp_path))
    aside.rename(shard)
    (whole / "dataset_info.json").unlink()
    with pytest.raises(InputError, match="is there but not a whole dataset; delete it"):
        load_or_build("wikitext103", str(raw), str(tmp_path))


def test_one_process_builds(tmp_path):
    with (
        hold_lock(tmp_path / ".wikitext103.lock", "it"),
        pytest.raises(InputError, match="another pro"),
    ):
        load_or_build("wikitext103", str(wiki_zip(tmp_path / "w.zip")), str(tmp_path))


def test_full_disk(tmp_path):
    raw = wiki_folder(tmp_path / "w")
    noise = "".join(f"{n * 7919 % 10007} " for n in range(200_000))
    (raw / "wiki.test.raw").write_text(f" \n = Noise = \n \n {noise}\n")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))
    try:
        with pytest.raises(RunError, match=r"data.data_dir=\S* wikitext103 could not be built: "):
            load_or_build("wikitext103", str(raw), str(tmp_path / "tfds"))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert [p.name for p in (tmp_path / "tfds" / "wikitext103").iterdir()] == []
    assert (
        load_or_build("wikitext103", str(raw), str(tmp_path / "tfds"))
        .info.splits["test"]
        .num_examples
    )


@pytest.mark.slow
def test_killed_build_is_not_taken_for_whole(tmp_path):
    raw = wiki_zip(tmp_path / "w.zip")
    code = (
        "import os, signal\n"
        "from t5x_diffeq.data import builders\n"
        "def killing(text, seen=[]):\n"
        "    seen.append(text)\n"
        "    len(seen) == 5 and os.kill(os.getpid(), signal.SIGKILL)\n"
        "    return text\n"
        "builders.detokenize = killing\n"
        f"builders.load_or_build('wikitext103', {str(raw)!r}, {str(tmp_path)!r})"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == -9
    left = [path.name for path in (tmp_path / "wikitext103").iterdir()]
    assert len(left) == 1 and left[0].startswith("incomplete.")
    load_or_build("wikitext103", str(raw), str(tmp_path))
    assert [path.name for path in (tmp_path / "wikitext103").iterdir()] == ["1.0.0"]
