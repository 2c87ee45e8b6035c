"""Makes the sources of documents that `data.source` names.

A source has two splits and a fingerprint, by which a resumed run recognises its data. Each split is
a random access sequence of documents (text), in an order that depends only on the data.
"""

import glob
import os
import platform
import re
import sysconfig
from collections import Counter
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from etils import epath

from t5x_diffeq.config.config import DataKeys
from t5x_diffeq.data.contents import hash_of_ends, hash_of_table
from t5x_diffeq.data.conversations import KEYS, fields_of
from t5x_diffeq.data.documents import (
    DECOMPRESSORS,
    FILE_KINDS,
    DocumentRange,
    Documents,
    FileDocuments,
)
from t5x_diffeq.data.rows import Unreadable, document_of
from t5x_diffeq.data.stream_files import open_stream
from t5x_diffeq.data.wikitext import articles, detokenize
from t5x_diffeq.system.console import log
from t5x_diffeq.system.errors import InputError
from t5x_diffeq.system.extras import need_package
from t5x_diffeq.system.files import (
    AnyPath,
    check_links,
    describe_error,
    digest,
    files_in,
    files_matching,
    is_hidden,
    parse_path,
)
from t5x_diffeq.system.staging import stage

if TYPE_CHECKING:
    import datasets

_VALIDATION_EVERY = 20  # one in so many files of the standard library is for validation
_VALIDATION_PART = 0.1  # the last fraction of text files is for validation
STREAM = "stream"  # read while the model trains
_OTHER_SPLITS = {"test", "valid", "validation", "val", "dev", "eval"}  # names of files
_NOT_CORPUS = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}


@dataclass(frozen=True)
class Source:
    """Documents of both splits."""

    name: str
    train: Documents
    validation: Documents
    fingerprint: str  # a hash of everything that determines the documents
    large: bool = False  # whether it is better to tokenise them with many processes
    conversations: bool = False  # whether each document is a conversation (see `conversations`)
    files: tuple[FileDocuments, ...] = ()  # the files that are read whenever a document is taken
    max_unreadable: float = 0.0  # the largest share of rows that may be unreadable (`rows`)
    characters: int = 0  # of both splits; 0 if unknown, or if documents are conversations
    is_sample: bool = False  # whether training reads more documents than these

    def check_unchanged(self) -> None:
        """Raises an InputError if a file has changed since the fingerprint was computed."""
        for each in self.files:
            each.check_unchanged()


class _RecordTexts(Documents):
    """The texts of a library's records, which are mappings (see `rows.document_of`)."""

    def __init__(self, records: Any, field: str | None, name: str):
        self.records, self.field, self.name = records, field, name

    def __len__(self) -> int:
        return len(self.records)

    def __getitem__(self, number: int) -> str:
        if not 0 <= number < len(self):
            raise IndexError(number)
        where = f"{self.name}, record {number}"
        try:
            record = self.records[number]
        except UnicodeDecodeError as error:  # Hugging Face's tables raise it
            return Unreadable("not UTF-8", f"{where} is not UTF-8: {error}; delete it")
        return document_of(record, self.field, where)


_BYTES = "surrogateescape"  # for bytes of a file that aren't UTF-8


def source_of_texts(name: str, train: Documents, validation: Documents) -> Source:
    """The source of texts that are in memory; an InputError if one isn't UTF-8."""
    try:
        splits = [[text.encode("utf-8", _BYTES) for text in s] for s in (train, validation)]
    except UnicodeEncodeError as error:
        raise InputError(
            f"{name}: a document holds {error.object[error.start]!r}, half of a character, which "
            "UTF-8 can't write; leave it out, as text.encode('utf-8', 'ignore').decode() does"
        ) from error
    fingerprint = digest([b"train", *splits[0], b"validation", *splits[1]])
    return Source(name, train, validation, fingerprint)


def stdlib(data: DataKeys) -> Source:
    """The source files of the running Python's standard library, without its tests."""
    files: list[Path] = []
    for folder, within, names in os.walk(sysconfig.get_path("stdlib")):
        within[:] = set(within) - _NOT_CORPUS  # installed packages can be many times the library
        files += [Path(folder, name) for name in names if name.endswith(".py")]
    documents = []
    for path in sorted(files):
        with suppress(UnicodeDecodeError):  # a few source files are not UTF-8
            text = path.read_bytes().decode("utf-8")
            documents += [text] if text.strip() else []
    train = [text for i, text in enumerate(documents) if i % _VALIDATION_EVERY]
    name = f"the standard library of Python {platform.python_version()}"
    return source_of_texts(name, train, documents[::_VALIDATION_EVERY])


def text_files(data: DataKeys) -> Source:
    """A file, the text files in a folder, or a glob; the last tenth of the text is for validation.

    `data.validation_path` names other files for validation.
    """

    def read(key: str, path: str) -> FileDocuments:
        paths = find_text_files(key, path)
        return FileDocuments(paths, _field_of(data), data.max_unreadable, key)

    documents = read("path", str(data.path))
    fingerprint, files, characters = documents.fingerprint, [documents], documents.characters
    train: Documents = documents
    validation: Documents
    if data.validation_path:
        validation = read("validation_path", data.validation_path)
        is_same = validation.fingerprint == documents.fingerprint
        shared = is_same or not {*validation.states}.isdisjoint(documents.states)
        _warn_if_shared(shared, "validation_path", data.validation_path)
        files.append(validation)
        characters += validation.characters
        fingerprint = digest([fingerprint.encode(), validation.fingerprint.encode()])
    else:
        cut = documents.character(int(documents.characters * (1 - _VALIDATION_PART)))
        if data.loss_on == "completion":
            cut = cut[0], 0  # a conversation stays whole
        train = DocumentRange(documents, (0, 0), cut)
        validation = DocumentRange(documents, cut, (len(documents), 0))
    if data.text_field != DataKeys().text_field:
        fingerprint = digest([fingerprint.encode(), data.text_field.encode()])
    return Source(
        str(data.path),
        train,
        validation,
        fingerprint,
        large=documents.characters > 64e6,
        conversations=data.loss_on == "completion",
        files=tuple(files),
        characters=0 if data.loss_on == "completion" else characters,
    )


def _field_of(data: DataKeys) -> str | None:
    """The field that holds the text; None if records are conversations."""
    return None if data.loss_on == "completion" else data.text_field


def find_text_files(key: str, path: str) -> list[Path]:
    """The files of `data.{key}={path}`, sorted, as local copies.

    Raises:
      InputError: if there is no file, or one is a link to nothing.
    """
    root = parse_path(path, f"data.{key}")
    if root.is_file():
        return stage([root])
    if root.is_dir():
        endings = tuple(kind + ending for kind in FILE_KINDS for ending in ("", *DECOMPRESSORS))
        all_files = files_in(root, hidden=True)
        visible = [file for file in all_files if not is_hidden(file, root)]
        files = [file for file in visible if file.name.endswith(endings)]
        hidden = [x for x in all_files if x.name.endswith(endings) and is_hidden(x, root)]
        if hidden:
            first = hidden[0].relative_to(root)
            log(f"data.{key}={path}: {len(hidden)} hidden file(s), such as {first}: not read")
        others = _describe_others(key, path, {*visible} - {*files})
        if others and files:
            log(f"data.{key}={path}: read {len(files)} of {len(visible)} files; {others}")
        kinds = f"are no files ending in {', '.join(FILE_KINDS)}, plain or with .gz or .zst"
        if parts := [x for x in files if x.name.partition(".")[0].lower() in _OTHER_SPLITS]:
            name = parts[0].relative_to(root)
            log(
                f"warning: data.{key}={path} has {name}, which is read like its other files; name "
                "the files to train on, and those of data.validation_path"
            )
        from t5x_diffeq.data.manifest import MANIFEST  # here, because it imports Grain

        if (root / MANIFEST).exists():
            others = "these are token shards, which --config.data.source=tokens reads"
        kinds += f"; {others}" if others else ""
    else:
        files = files_matching(root)
        kinds = "is no file or folder of that name, and no file that matches it as a glob"
        folders = [] if "**" in path else glob.glob(os.path.join(str(root), ""))
        if isinstance(root, Path) and root.exists():
            kinds = "is a pipe or a device of that name; save its text in a file"
        elif folders and files:
            log(f"data.{key}={path}: {len(folders)} folder(s) left out, such as {folders[0]}")
        elif folders:
            kinds += f", but {len(folders)} folder(s); {path.rstrip('/')}/**/* reads their files"
        elif path != path.strip():
            kinds += "; it begins or ends with a space"
        elif re.search(r"[,{\s]", path):
            kinds += "; several files are a folder, or a glob with * or ?"
        if re.fullmatch(r"[\w.-]+/[\w.-]+", path):
            kinds += "; --config.data.source=stream reads a dataset of the Hugging Face Hub"
    if not files:
        raise InputError(f"data.{key}={path}: there {kinds}; check the path")
    check_links(files, f"data.{key}={path}")
    return stage(files)


def _describe_others(key: str, path: str, files: Collection[AnyPath]) -> str:
    """`245 .py left out; ... reads them`: the files of a folder that are of other kinds."""
    kinds = Counter(file.suffix for file in files if file.suffix).most_common(3)
    if not kinds:
        return ""
    counted = ", ".join(f"{count} {kind}" for kind, count in kinds)
    pattern = f"{path.rstrip('/')}/**/*{kinds[0][0]}"
    return f"{counted} left out; --config.data.{key}='{pattern}' reads {kinds[0][0]}"


def _warn_if_shared(shared: bool, key: str, value: str) -> None:
    if shared:
        log(
            f"warning: data.{key}={value} has text that the run trains on, so the validation loss "
            "doesn't tell how well it predicts other text"
        )


def tfds_source(data: DataKeys) -> Source:
    """A dataset of TensorFlow Datasets, by name or folder; read without TensorFlow.

    If it isn't in `data.data_dir`, it is built there first; its builder must not need TensorFlow.

    Raises:
      InputError: if it can't be opened or built, or lacks a split or the field of the text.
    """
    import tensorflow_datasets as tfds

    folder = Path(os.path.expanduser(str(data.path)))
    _keep_from_importing(tfds)
    try:
        if folder.is_dir():
            builder = tfds.builder_from_directory(folder)
        else:
            builder = tfds.builder(data.path, data_dir=data.data_dir, file_format="array_record")
        if not builder.info.splits:
            log(f"{data.path} is not in {builder.data_dir}: building it")
            builder.download_and_prepare()
    except Exception as error:  # builders raise errors of any class
        reason = describe_error(error).partition(" Available datasets")[0]  # hundreds of names
        raise InputError(
            f"data.path={data.path} (data.data_dir={data.data_dir}): TensorFlow Datasets can't "
            f"open or build it: {reason}"
        ) from error
    info = builder.info

    def read(key: str, split: str) -> tuple[Any, list[str]]:
        if split.split("[")[0] not in info.splits:
            raise InputError(f"data.{key}={split}: {info.name} has {', '.join(info.splits)}")
        return builder.as_data_source(split), list(info.features)

    def contents() -> list[str]:
        files = [file for _, split in sorted(info.splits.items()) for file in split.filepaths]
        splits = data.train_split, data.validation_split, data.text_field
        return [*splits, hash_of_ends(map(epath.Path, files))]

    return _library_source(info.full_name, read, data, contents)


def _keep_from_importing(tfds: Any) -> None:
    """Keeps the library from running code that a dataset names, or whose name it looks up online.

    The `features.json` of a dataset names the classes of its features, which the library would
    import. It would download the builder of `namespace:name`.
    """
    features, types = tfds.features.FeatureConnector, tfds.core.visibility.DatasetType
    import_class = features.cls_from_name.__func__

    def find_class(cls: type, name: str) -> type:
        if name.startswith("tensorflow_datasets.") or name in cls._registered_features:  # type: ignore[attr-defined]
            return import_class(cls, name)
        raise ValueError(f"a feature is of the class {name}, which isn't the library's own")

    if import_class.__module__ != __name__:
        features.cls_from_name = classmethod(find_class)
    tfds.core.visibility.set_availables([types.TFDS_PUBLIC])


def huggingface(data: DataKeys) -> Source:
    """A dataset of the Hugging Face library: `data.path` is a name (`name:config`) or a folder."""
    parts: list[Any] = []

    def read(key: str, split: str) -> tuple[Any, list[str]]:
        part = _load_split(data, str(data.path), key, split)
        columns = KEYS if data.loss_on == "completion" else (data.text_field,)
        parts.append(part.select_columns([x for x in columns if x in part.column_names]))
        return parts[-1], part.column_names

    def contents() -> list[str]:
        return list(map(hash_of_table, parts))

    return _library_source(str(data.path), read, data, contents)


def _load_split(data: DataKeys, path: str, key: str, split: str) -> "datasets.Dataset":
    """A split of the library's dataset, downloaded into `data.data_dir` if it isn't there."""
    need_package("datasets", f"data.source={data.source}")
    import datasets

    name, _, config = path.partition(":")
    name = os.path.expanduser(name)
    if Path(name).is_file():
        raise InputError(
            f"data.path={path} is a file; data.source={data.source} needs a dataset's name or "
            "folder; --config.data.source=text_files reads files"
        )
    try:
        if Path(name, "dataset_dict.json").exists():  # written by `save_to_disk`
            return datasets.load_from_disk(name)[split]
        return datasets.load_dataset(name, config or None, split=split, cache_dir=data.data_dir)
    except Exception as error:  # the library raises errors of any class
        way_out = ""
        if "Unknown split" in str(error) and data.source == "huggingface":
            way_out = (
                " Without a split of its own, hold out a part: --config.data.train_split="
                "'train[:99%]' --config.data.validation_split='train[99%:]'"
            )
        if "Unrecognized instruction format" in str(error):
            way_out = "; a part is in percent or in rows: 'train[:90%]', 'train[:1000]'"
        raise InputError(
            f"data.path={path}, data.{key}={split} can't be loaded: {error}{way_out}"
        ) from error


def wikitext103(data: DataKeys) -> Source:
    """WikiText-103: the lines of Hugging Face's copy, as articles of natural text."""
    path = data.path or "Salesforce/wikitext:wikitext-103-raw-v1"

    def read(key: str) -> list[str]:
        lines = _load_split(data, path, key, getattr(data, key))["text"]
        return [detokenize(article) for article in articles(line or "\n" for line in lines)]

    train, validation = read("train_split"), read("validation_split")
    return replace(source_of_texts("WikiText-103", train, validation), large=True)


def stream(data: DataKeys) -> Source:
    """A sample of a dataset that training streams, and its validation documents."""
    opened, chat = open_stream(data), data.loss_on == "completion"
    return Source(
        str(data.path),
        *opened.documents,
        opened.fingerprint,
        conversations=chat,
        is_sample=True,
    )


def _library_source(
    name: str,
    read: Callable[[str, str], tuple[Any, list[str]]],
    data: DataKeys,
    contents: Callable[[], list[str]],
) -> Source:
    """The source whose splits a library reads: `data.train_split` and `data.validation_split`.

    `read` takes a key and the split that the key names, and returns the records and the names of
    their fields. `contents` is called after `read`; its texts determine the records.
    """

    def texts(key: str) -> _RecordTexts:
        split = getattr(data, key)
        records, fields = read(key, split)
        fields_of(fields, _field_of(data), f"data.path={data.path}")
        return _RecordTexts(records, _field_of(data), f"{name}, {split}")

    train, validation = texts("train_split"), texts("validation_split")
    is_same = data.train_split == data.validation_split
    _warn_if_shared(is_same, "validation_split", data.validation_split)
    large, chat = len(train) > 10_000, data.loss_on == "completion"
    return Source(name, train, validation, digest(map(str.encode, contents())), large, chat)


SOURCES = {
    "stdlib": stdlib,
    "text_files": text_files,
    "tfds": tfds_source,
    "wikitext103": wikitext103,
    "huggingface": huggingface,
    STREAM: stream,
}
