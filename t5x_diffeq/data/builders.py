"""WikiText-103 and OpenWebText for TensorFlow Datasets, built and read without TensorFlow.

`load_or_build` returns a builder whose `as_data_source(split)` is ready; the raw archive is needed
once.
"""

import contextlib
import hashlib
import io
import os
import re
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path, PurePosixPath

import tensorflow_datasets as tfds

from t5x_diffeq.data import archives
from t5x_diffeq.data.document_builder import DocumentBuilder, KeyedExample
from t5x_diffeq.data.wikitext import articles, detokenize
from t5x_diffeq.runtime.console import say
from t5x_diffeq.runtime.errors import InputError, RunError
from t5x_diffeq.runtime.files import is_in_bucket, parse_path
from t5x_diffeq.runtime.locks import hold_lock

VALIDATION_PART = 0.0005  # fraction of OpenWebText's documents
_VALIDATION_SEED = 0


class Wikitext103(DocumentBuilder):
    """WikiText-103: 28 thousand good and featured articles of Wikipedia, detokenized.

    A document is an article, with its title and headings; the splits are WikiText's own.
    """

    ARCHIVE = "wikitext-103-raw-v1.zip"
    HOMEPAGE = "https://arxiv.org/abs/1609.07843"
    CITATION = """@inproceedings{merity2017pointer,
      title={Pointer Sentinel Mixture Models},
      author={Merity, Stephen and Xiong, Caiming and Bradbury, James and Socher, Richard},
      booktitle={International Conference on Learning Representations}, year={2017}}"""

    def _check_archive(self, root: Path) -> None:
        archives.find(root, ("wiki.train.raw", "wiki.train.tokens"))

    def _split_generators(
        self, dl_manager: tfds.download.DownloadManager
    ) -> dict[str, Iterable[KeyedExample]]:
        root = self._raw_path(dl_manager)
        files = {"train": "wiki.train", "validation": "wiki.valid", "test": "wiki.test"}
        paths = {s: archives.find(root, (f"{f}.raw", f"{f}.tokens")) for s, f in files.items()}
        for path in paths.values():
            # WikiText-2 has files of the same names.
            if (root / path).parent.name.startswith("wikitext-2"):
                raise InputError(f"data.path={root} is WikiText-2; give {self.ARCHIVE}")
        return {split: self._generate_examples(root, path) for split, path in paths.items()}

    def _generate_examples(self, root: Path, path: str) -> Iterator[KeyedExample]:
        for number, article in enumerate(articles(archives.read_lines(root, path))):
            yield f"{PurePosixPath(path).name}/{number:05}", {"text": detokenize(article)}


class Openwebtext(DocumentBuilder):
    """OpenWebText: web pages that were linked to on Reddit, 38 GB of text.

    The whole of it is 8,013,769 documents. One in 2000 validates, chosen by a hash of its name:
    see `is_validation`.
    """

    ARCHIVE = "openwebtext.tar.xz"
    HOMEPAGE = "https://skylion007.github.io/OpenWebTextCorpus/"
    CITATION = """@misc{gokaslan2019openwebtext,
      title={OpenWebText Corpus},
      author={Gokaslan, Aaron and Cohen, Vanya and Pavlick, Ellie and Tellex, Stefanie},
      howpublished={https://skylion007.github.io/OpenWebTextCorpus/}, year={2019}}"""

    def _check_archive(self, root: Path) -> None:
        next(archives.iter_text_files(root), None)

    def _split_generators(
        self, dl_manager: tfds.download.DownloadManager
    ) -> dict[str, Iterable[KeyedExample]]:
        # One pass, since the archive takes long to read: the validation documents (20 MB) are
        # collected in a list while the train split, which comes first, is written.
        validation: list[KeyedExample] = []
        train = self._generate_examples(self._raw_path(dl_manager), validation)
        return {"train": train, "validation": validation}

    def _generate_examples(
        self, root: Path, validation: list[KeyedExample]
    ) -> Iterator[KeyedExample]:
        skipped = 0
        for key, content in archives.iter_text_files(root):
            text = tidy_text(content)
            if not text:
                skipped += 1
            elif is_validation(key):
                validation.append((key, {"text": text}))
            else:
                yield key, {"text": text}
        self.info.metadata["skipped"] = skipped
        say(f"{self.name}: {skipped} files skipped, empty or not UTF-8")


def tidy_text(content: bytes) -> str:
    """A page's text, with runs of blank lines collapsed; empty if it is not UTF-8."""
    try:
        return re.sub(r"\n{3,}", "\n\n", content.decode("utf-8").strip())
    except UnicodeDecodeError:
        return ""


def is_validation(key: str) -> bool:
    """Whether an OpenWebText document is in the validation split, whatever the documents' order.

    This is decided by a hash of a seed, the document's name and that of the innermost archive (or
    folder) that contains it: the parts of a key that all distributions of OpenWebText share.
    """
    *_, archive, name = PurePosixPath("/", key).parts
    seeded = f"{_VALIDATION_SEED} {archive.split('.')[0]}/{name}"
    first = hashlib.sha256(seeded.encode()).digest()[:8]
    return int.from_bytes(first, "big") < VALIDATION_PART * 2**64


_BUILDERS = {"wikitext103": Wikitext103, "openwebtext": Openwebtext}


def load_or_build(name: str, raw: str | None, data_dir: str | None) -> tfds.core.DatasetBuilder:
    """A dataset, built from its raw archive unless it already exists.

    Args:
      name: wikitext103 or openwebtext.
      raw: `data.path`: the archive, a folder with its content, or an http(s) URL.
      data_dir: `data.data_dir`, the folder of built datasets; None: tfds's default.

    Raises:
      InputError: if it must be built and `raw` is missing or not a complete archive of the dataset,
        if another process is building it, or if one of its files is missing.
      RunError: if it can't be written.
    """
    data_dir = data_dir and os.path.expanduser(data_dir)
    builder = _BUILDERS[name](raw=raw, data_dir=data_dir)
    if not builder.is_prepared():
        if is_in_bucket(parse_path(str(builder.data_dir_root), "data.data_dir")):
            raise InputError(
                f"data.data_dir={data_dir}: {name} is not there, and can only be built in a folder "
                "of this machine; name one, and copy the result"
            )
        builder.check_raw()
        lock = Path(builder.data_dir_root, f".{name}.lock")
        with hold_lock(lock, f"{name} in data.data_dir={builder.data_dir_root}"):
            _build(builder)
        builder = _BUILDERS[name](data_dir=data_dir)  # as it is on disk
    for path in (path for split in builder.info.splits.values() for path in split.filepaths):
        if not path.exists():
            raise InputError(
                f"data.data_dir: {path} is missing; delete {builder.data_dir} and build it again"
            )
    return builder


def _build(builder: DocumentBuilder) -> None:
    """Builds the dataset, in a temporary folder that tfds renames when it is complete."""
    if builder.data_path.exists() and not builder.is_prepared():
        raise InputError(
            f"data.data_dir: {builder.data_dir} is there but not a whole dataset; delete it"
        )
    _remove_leftovers(builder)
    say(f"{builder.name}: building it in {builder.data_dir}, once, from {builder.raw}")
    try:
        with contextlib.redirect_stdout(io.StringIO()):  # tfds prints; stdout is for results
            builder.download_and_prepare()
    except InputError:
        raise
    except (OSError, RuntimeError) as error:  # array_record raises RuntimeError
        raise RunError(
            f"data.data_dir={builder.data_dir_root}: {builder.name} could not be built: {error}; "
            "if the disk is full make room, and start again"
        ) from error
    splits = builder.info.splits.values()
    say(f"{builder.name}: built, " + ", ".join(f"{s.num_examples} {s.name}" for s in splits))


def _remove_leftovers(builder: DocumentBuilder) -> None:
    """Removes what killed builds and downloads left; the lock is held, so it isn't in use."""
    root = Path(builder.data_dir_root)
    for folder in (
        *(root / builder.name).glob(f"incomplete.*_{builder.version}"),
        *(root / "downloads" / builder.name).glob("*.tmp.*"),
    ):
        shutil.rmtree(folder)
