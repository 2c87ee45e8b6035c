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
from itertools import groupby
from pathlib import Path, PurePosixPath
from typing import Any

import tensorflow_datasets as tfds

from t5x_diffeq.data import archives
from t5x_diffeq.data.wikitext import articles, detokenize
from t5x_diffeq.runtime.console import format_count, say
from t5x_diffeq.runtime.errors import InputError, RunError
from t5x_diffeq.runtime.files import AnyPath, is_in_bucket, parse_path
from t5x_diffeq.runtime.locks import hold_lock
from t5x_diffeq.runtime.staging import stage

VALIDATION_PART = 0.0005  # fraction of OpenWebText's documents
SHARD_LENGTH = 2**16  # documents: 0.3 GB of OpenWebText
SAY_EVERY = 500_000  # documents
_VALIDATION_SEED = 0
_SHARD_NAME = "{DATASET}-{SPLIT}.{FILEFORMAT}-{SHARD_INDEX}"  # their number is not known in advance

KeyedExample = tuple[str, dict[str, str]]  # a key and {"text": ...}


class DocumentBuilder(  # tfds has no types
    tfds.core.GeneratorBasedBuilder,
    skip_registration=True,  # type: ignore[call-arg]
):
    """A dataset of documents `{"text": ...}`, in the order of its raw archive.

    Args:
      raw: the archive or a folder with its content; needed only to build the dataset.
      file_format: the shards' format; array_record is read and written without TensorFlow.
      **kwargs: arguments of `tfds.core.DatasetBuilder`, such as `data_dir`.
    """

    VERSION = tfds.core.Version("1.0.0")
    url_infos = None  # no recorded checksums: looking for them needs importlib_resources
    ARCHIVE = ""  # the archive's usual name

    def __init__(
        self, *, raw: AnyPath | None = None, file_format: str = "array_record", **kwargs: Any
    ):
        self.raw = raw
        super().__init__(file_format=file_format, **kwargs)

    def _info(self) -> tfds.core.DatasetInfo:
        features = tfds.features.FeaturesDict({"text": tfds.features.Text()})
        return tfds.core.DatasetInfo(builder=self, features=features, disable_shuffling=True)

    def _download_and_prepare(
        self,
        dl_manager: tfds.download.DownloadManager,
        download_config: tfds.download.DownloadConfig,
    ) -> None:
        """Writes the splits one after the other, each as it is read.

        The inherited method buffers a whole split to shuffle it: in memory, and beyond 1 GB in
        files that only TensorFlow can write. Training shuffles anyway.
        """
        del download_config
        splits = self._split_generators(dl_manager).items()
        self.info.set_splits(tfds.core.SplitDict([self._write(*split) for split in splits]))

    def _staged(self) -> Path:
        """The archive or folder on this machine."""
        assert self.raw is not None  # `load_or_build` has checked it
        return stage([self.raw])[0]

    def _write(self, split: str, examples: Iterable[KeyedExample]) -> tfds.core.SplitInfo:
        template = self._get_filename_template(split).replace(template=_SHARD_NAME)
        sizes: list[int] = []

        def serialize(shard: Iterable[tuple[int, KeyedExample]]) -> Iterator[tuple[str, bytes]]:
            for _, (key, example) in shard:
                record = self.info.features.serialize_example(example)
                sizes.append(len(record))
                if len(sizes) % SAY_EVERY == 0:
                    say(f"{self.name}: {format_count(len(sizes))} {split} documents")
                yield key, record

        lengths: list[int] = []
        for index, shard in groupby(enumerate(examples), lambda item: item[0] // SHARD_LENGTH):
            path = template.sharded_filepath(shard_index=index, num_shards=None)
            self._example_writer().write(path, serialize(shard))
            lengths.append(len(sizes) - sum(lengths))
        if not sizes:
            raise InputError(
                f"data.path={self.raw} has no document for the {split} split; give the whole of "
                f"{self.ARCHIVE}"
            )
        return tfds.core.SplitInfo(
            name=split, shard_lengths=lengths, num_bytes=sum(sizes), filename_template=template
        )


class Wikitext103(DocumentBuilder):
    """WikiText-103: 28 thousand good and featured articles of Wikipedia, detokenized.

    A document is an article, with its title and headings; the splits are WikiText's own. Merity et
    al., Pointer Sentinel Mixture Models, 2016 (arXiv:1609.07843).
    """

    ARCHIVE = "wikitext-103-raw-v1.zip"

    def _split_generators(
        self, dl_manager: tfds.download.DownloadManager
    ) -> dict[str, Iterable[KeyedExample]]:
        root = self._staged()
        files = {"train": "wiki.train", "validation": "wiki.valid", "test": "wiki.test"}
        paths = {s: archives.find(root, (f"{f}.raw", f"{f}.tokens")) for s, f in files.items()}
        # WikiText-2 has files of the same names.
        if (root / paths["train"]).parent.name.startswith("wikitext-2"):
            raise InputError(f"data.path={root} is WikiText-2; give {self.ARCHIVE}")
        return {split: self._generate_examples(root, path) for split, path in paths.items()}

    def _generate_examples(self, root: Path, path: str) -> Iterator[KeyedExample]:
        for number, article in enumerate(articles(archives.read_lines(root, path))):
            yield f"{PurePosixPath(path).name}/{number:05}", {"text": detokenize(article)}


class Openwebtext(DocumentBuilder):
    """OpenWebText: web pages that were linked to on Reddit, 38 GB of text.

    The whole of it is 8,013,769 documents. One in 2000 validates, chosen by a hash of its name:
    see `is_validation`. Gokaslan and Cohen, 2019 (skylion007.github.io/OpenWebTextCorpus).
    """

    ARCHIVE = "openwebtext.tar.xz"

    def _split_generators(
        self, dl_manager: tfds.download.DownloadManager
    ) -> dict[str, Iterable[KeyedExample]]:
        # One pass, since the archive takes long to read: the validation documents (20 MB) are
        # collected in a list while the train split, which comes first, is written.
        validation: list[KeyedExample] = []
        return {"train": self._generate_examples(validation), "validation": validation}

    def _generate_examples(self, validation: list[KeyedExample]) -> Iterator[KeyedExample]:
        skipped = 0
        for key, content in archives.iter_text_files(self._staged()):
            text = tidy_text(content)
            if not text:
                skipped += 1
            elif is_validation(key):
                validation.append((key, {"text": text}))
            else:
                yield key, {"text": text}
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
      raw: `data.path`: the archive, or a folder with its content.
      data_dir: `data.data_dir`, the folder of built datasets; None: tfds's default.

    Raises:
      InputError: if it must be built and `raw` is missing or not a complete archive of the dataset,
        if another process is building it, or if one of its files is missing.
      RunError: if it can't be written.
    """
    data_dir = data_dir and os.path.expanduser(data_dir)
    path = parse_path(raw, "data.path") if raw else None
    builder = _BUILDERS[name](raw=path, data_dir=data_dir)
    if not builder.is_prepared():
        if is_in_bucket(parse_path(str(builder.data_dir_root), "data.data_dir")):
            raise InputError(
                f"data.data_dir={data_dir}: {name} is not there, and can only be built in a folder "
                "of this machine; name one, and copy the result"
            )
        if path is None or not path.exists():
            raise InputError(
                f"data.path={raw} does not exist, and {name} is not built in {builder.data_dir}; "
                f"give {builder.ARCHIVE} or its folder, or as data.data_dir the folder where it "
                "was built"
            )
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
    # What killed builds left; the lock is held, so it isn't in use.
    root = Path(builder.data_dir_root, builder.name)
    for folder in root.glob(f"incomplete.*_{builder.version}"):
        shutil.rmtree(folder)
    say(f"{builder.name}: building it in {builder.data_dir}, once, from {builder.raw}")
    try:
        with contextlib.redirect_stdout(io.StringIO()):  # tfds prints; stdout is for results
            builder.download_and_prepare()
    except (OSError, RuntimeError) as error:  # array_record raises RuntimeError
        raise RunError(
            f"data.data_dir={builder.data_dir_root}: {builder.name} could not be built: {error}; "
            "if the disk is full make room, and start again"
        ) from error
    splits = builder.info.splits.values()
    say(f"{builder.name}: built, " + ", ".join(f"{s.num_examples} {s.name}" for s in splits))
