"""Reads files of documents by Hugging Face's `datasets` while a model trains.

They belong to a dataset of the Hub, or are parquet and JSON files anywhere that fsspec reaches.
Nothing is downloaded, counted or tokenised in advance, so a corpus of any size opens in seconds.
"""

import os
import re
from codecs import BOM_UTF8
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import count, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from t5x_diffeq.config.config import DataKeys
from t5x_diffeq.data.contents import hash_of_ends
from t5x_diffeq.data.conversations import fields_of
from t5x_diffeq.data.documents import Documents, text_as_bytes
from t5x_diffeq.data.rows import document_of, document_of_line
from t5x_diffeq.system.errors import InputError, is_infrastructure_failure
from t5x_diffeq.system.extras import need_package
from t5x_diffeq.system.files import (
    check_links,
    describe_error,
    digest,
    files_in,
    files_matching,
    parse_json,
)
from t5x_diffeq.system.retries import retry

if TYPE_CHECKING:
    import datasets

VALIDATION_DOCUMENTS = 1000  # the most documents for validation
_VALIDATION_EVERY = 10  # one in so many documents of the first file, if there is no other split
SAMPLE_DOCUMENTS = 1000  # how many documents a tokenizer is trained on
# the library's builders of files that are no documents
_NOT_DOCUMENTS = ("text", "imagefolder", "audiofolder", "videofolder")
_KINDS = {"parquet": r"\.parquet$", "json": r"\.jsonl?(\.(gz|zst|bz2|xz))?$"}


class FileReader:
    """The documents of one file, from its beginning or from an earlier reader's `state`.

    `row` is the number of records that were read before that state.
    """

    def __init__(self, files: "StreamFiles", number: int, row: int = 0, state: dict | None = None):
        self.files, self.number, self.row = files, number, row
        self.dataset = files.dataset.shard(num_shards=len(files), index=number)
        if state is not None:
            self.dataset.load_state_dict(state)
        self.records = iter(self.dataset)

    def __iter__(self) -> Iterator[str]:
        for row in count(self.row):
            place = f"data.{self.files.key}: {self.files.names[self.number]}"
            try:
                record = retry(self._next_record, f"{place} can't be read")
            except Exception as error:  # the library's file systems raise errors of any class
                if is_infrastructure_failure(error):
                    raise
                raise InputError(f"{place} can't be read: {describe_error(error)}") from error
            if record is None:
                return
            yield self.files.text_of(record, f"{place}, record {row}")

    def _next_record(self) -> Mapping[str, Any] | None:
        """The next record; None at the end."""
        try:
            return next(self.records, None)
        except Exception:  # an error ends the iterator, so a later call continues with a new one
            self.dataset.load_state_dict(self.dataset.state_dict())
            self.records = iter(self.dataset)
            raise

    @property
    def state(self) -> dict:
        """The state after the last document that was taken, as JSON."""
        return self.dataset.state_dict()


@dataclass(frozen=True)
class StreamFiles:
    """The files of one split."""

    path: str  # the path of the dataset
    key: str  # the key of `data` that names the files
    split: str
    dataset: "datasets.IterableDataset"  # the records of all files; a shard of it is a file
    names: tuple[str, ...]
    fingerprint: str  # a hash of local files, or of the names and versions of remote files
    field: str | None  # the field that holds the text; None: records are conversations
    are_lines: bool  # whether a record is a line of JSON, whose bytes are given as Latin-1

    def __len__(self) -> int:
        return self.dataset.num_shards

    def text_of(self, record: Mapping[str, Any], where: str) -> str:
        """The document of a record, which may be `rows.Unreadable`; empty for a blank line."""
        if not self.are_lines:
            return document_of(record, self.field, where)
        line = _bytes_of(record)
        return document_of_line(line, self.field, where) if line.strip() else ""

    def documents(self) -> Iterator[tuple[int, int, str]]:
        """The number of the file, the number of the record in it, and the document; in order."""
        for file in range(len(self)):
            for row, text in enumerate(FileReader(self, file)):
                yield file, row, text


@dataclass(frozen=True)
class OpenStream:
    """Both splits of a streamed dataset; without validation files, train documents are held out."""

    train: StreamFiles
    validation: StreamFiles | None
    max_unreadable: float = 0.0

    def is_held_out(self, file: int, row: int) -> bool:
        """Whether a document of the train split is for validation, by its file and record."""
        if self.validation or file > 0 or row >= VALIDATION_DOCUMENTS * _VALIDATION_EVERY:
            return False
        return row % _VALIDATION_EVERY == 0

    @property
    def fingerprint(self) -> str:
        """A hash of all files."""
        validation = self.validation.fingerprint if self.validation else ""
        return digest(map(str.encode, (self.train.fingerprint, validation)))

    @property
    def documents(self) -> tuple["_FirstDocuments", "_FirstDocuments"]:
        """A sample of the documents to train on, and the documents that validate."""
        return (
            _FirstDocuments(self._to_train_on, SAMPLE_DOCUMENTS),
            _FirstDocuments(self._to_validate_on, VALIDATION_DOCUMENTS),
        )

    def _to_train_on(self) -> Iterator[str]:
        documents = self.train.documents()
        return (text for file, row, text in documents if not self.is_held_out(file, row))

    def _to_validate_on(self) -> Iterator[str]:
        if self.validation:
            return (text for _, _, text in self.validation.documents())
        records = islice(FileReader(self.train, 0), VALIDATION_DOCUMENTS * _VALIDATION_EVERY)
        return (text for row, text in enumerate(records) if self.is_held_out(0, row))


class _FirstDocuments(Documents):
    """The first `number` documents, which are read when they are first asked for."""

    def __init__(self, documents: Callable[[], Iterator[str]], number: int):
        self.documents, self.number = documents, number

    @cached_property
    def texts(self) -> list[str]:
        return list(islice(self.documents(), self.number))

    def __len__(self) -> int:
        return len(self.texts)

    def __getitem__(self, number: int) -> str:
        return self.texts[number]


def open_stream(data: DataKeys) -> OpenStream:
    """The dataset that `data.path` names.

    It is `name`, `name:config` or `name@revision:config` of the Hub, a folder, or a file or glob
    of .parquet, .jsonl or .json files, also compressed, here or behind hf://, gs:// and the like.

    Raises:
      InputError: if it can't be opened, or has no such split or field.
    """
    need_package("datasets", "data.source=stream")
    try:
        splits, opened = retry(partial(_open, data), f"data.path={data.path} can't be opened")
    except InputError:
        raise
    except Exception as error:  # the library raises errors of any class
        if is_infrastructure_failure(error):
            raise
        raise InputError(
            f"data.path={data.path} can't be opened as a stream: {describe_error(error)}; give "
            "NAME, NAME@REVISION:CONFIG, a folder, or a glob such as PATH/*.parquet"
        ) from error
    if data.train_split not in splits:
        raise InputError(
            f"data.train_split={data.train_split}: {data.path} has {', '.join(splits)}; a stream "
            "reads whole splits"
        )
    return OpenStream(opened[0], opened[1] if opened[1:] else None, data.max_unreadable)


def _open(data: DataKeys) -> tuple[list[str], list[StreamFiles]]:
    """The names of all splits, and the files of the splits that `data` names."""
    builder = _builder(data)
    splits = [str(s) for s in builder.config.data_files or builder.info.splits or ()]
    wanted = dict.fromkeys((data.train_split, data.validation_split))
    return splits, [_files_of(data, s, builder) for s in wanted if s in splits]


def _builder(data: DataKeys) -> "datasets.DatasetBuilder":
    import datasets

    path = str(data.path)
    kind = next((kind for kind, ending in _KINDS.items() if re.search(ending, path)), None)
    for key in ("path", "validation_path"):
        _check_links(key, getattr(data, key))
    if kind is None:
        builder = _builder_of_dataset(data, path)
    else:
        files = {data.train_split: _absolute(path)}
        if data.validation_path:
            files[data.validation_split] = _absolute(data.validation_path)
        builder = datasets.load_dataset_builder(kind, data_files=files, cache_dir=data.data_dir)
    if builder.name in _NOT_DOCUMENTS:
        raise InputError(
            f"data.path={path} holds {builder.name} files; a stream reads .parquet and .jsonl files"
        )
    if hasattr(builder.config, "fragment_scan_options"):  # the files are parquet
        import pyarrow.dataset

        # A file then costs some 0.1 GB of memory, whatever the size of its row groups.
        options = pyarrow.dataset.ParquetFragmentScanOptions(pre_buffer=False)
        builder.config.batch_size, builder.config.fragment_scan_options = 500, options
    return _builder_of_lines(data, builder) if builder.name == "json" else builder


def _check_links(key: str, path: str | None) -> None:
    """Raises an InputError if a file of a folder or a glob here is a link to nothing."""
    if path is None or "://" in path:
        return
    here = Path(_absolute(path))
    files = files_in(here) if here.is_dir() else files_matching(here)
    named = (file for file in files if any(re.search(x, file.name) for x in _KINDS.values()))
    check_links(named, f"data.{key}={path}")


def _builder_of_lines(
    data: DataKeys, builder: "datasets.DatasetBuilder"
) -> "datasets.DatasetBuilder":
    """A builder that reads JSON files by lines; the library's own stops at a line that isn't JSON.

    The text of a line is Latin-1, which has a character for each byte. Files that are a single
    array are left to the library's builder.
    """
    import datasets

    files = builder.config.data_files
    lines = datasets.load_dataset_builder(
        "text", data_files=files, encoding="latin-1", cache_dir=data.data_dir
    )
    for split in files:
        first = next(iter(lines.as_streaming_dataset(str(split))), {"text": ""})
        if _bytes_of(first).lstrip().startswith(b"["):
            return builder
    return lines


def _bytes_of(line: Mapping[str, Any]) -> bytes:
    return line["text"].encode("latin-1").removeprefix(BOM_UTF8)


def _builder_of_dataset(data: DataKeys, path: str) -> "datasets.DatasetBuilder":
    import datasets

    if "://" in path or "*" in path:
        raise InputError(
            f"data.path={path} names no files of a known kind; it must end in .parquet, .jsonl or "
            ".json, such as PATH/*.parquet; compressed files are allowed"
        )
    if data.validation_path:
        raise InputError(
            f"data.validation_path={data.validation_path}: data.path={path} is a whole dataset, "
            "whose validation text is data.validation_split; leave it out"
        )
    folder = Path(os.path.expanduser(path))
    if folder.is_file():
        raise InputError(
            f"data.path={path} is a file of another kind; a stream reads .parquet and .jsonl "
            "files (--config.data.source=text_files reads text)"
        )
    if folder.is_dir():
        return datasets.load_dataset_builder(str(folder), cache_dir=data.data_dir)
    name, _, config = path.partition(":")
    name, _, revision = name.partition("@")
    return datasets.load_dataset_builder(
        name, config or None, revision=revision or None, cache_dir=data.data_dir
    )


def _absolute(path: str) -> str:
    """A URL as it is; a path on this machine as an absolute path."""
    return path if "://" in path else str(Path(os.path.expanduser(path)).absolute())


def _files_of(data: DataKeys, split: str, builder: "datasets.DatasetBuilder") -> StreamFiles:
    dataset, are_lines = builder.as_streaming_dataset(split), builder.name == "text"
    named_apart = data.validation_path and split == data.validation_split
    key = "validation_path" if named_apart else "path"
    named = f"data.{key}={getattr(data, key)}"
    columns = _columns_of(dataset, are_lines, named)
    field = None if data.loss_on == "completion" else data.text_field
    fields = fields_of(columns, field, f"{named}, {split}")
    listed = (builder.config.data_files or {}).get(split)
    names = [str(x) for x in listed or (f"file {n}" for n in range(dataset.num_shards))]
    versions = {str(x) for x in getattr(listed, "origin_metadata", [])}  # commits of the Hub
    path, facts = str(data.path), [split, str(data.text_field)]
    if Path(names[0]).is_file():
        facts.append(hash_of_ends(map(Path, names)))
    else:
        facts = [path, *facts, *names, *sorted(versions)]
    if not are_lines:
        dataset = _select(builder, dataset, split, fields)
    fingerprint = digest(map(str.encode, facts))
    return StreamFiles(path, key, split, dataset, tuple(names), fingerprint, field, are_lines)


def _columns_of(dataset: "datasets.IterableDataset", are_lines: bool, named: str) -> list[str]:
    """The names of the fields; for lines, the names in the first line that is an object."""
    if not are_lines:
        return dataset.column_names or list(next(iter(dataset), {}))
    for line in islice(dataset, VALIDATION_DOCUMENTS):
        with suppress(ValueError):
            record = parse_json(_bytes_of(line).decode("utf-8", "surrogateescape"))
            if isinstance(record, dict):
                return list(record)
    raise InputError(
        f"{named} can't be opened as a stream: none of its first {VALIDATION_DOCUMENTS} "
        "lines is a JSON object; name a .jsonl or .parquet file"
    )


def _select(
    builder: "datasets.DatasetBuilder",
    dataset: "datasets.IterableDataset",
    split: str,
    fields: list[str],
) -> "datasets.IterableDataset":
    """The dataset with these columns alone, and bytes for their text, which need not be UTF-8."""
    import datasets

    if hasattr(builder.config, "columns"):  # of parquet files, the other columns aren't even read
        builder.config.columns = fields
        dataset = builder.as_streaming_dataset(split)
    dataset = dataset.select_columns(fields)
    if dataset.features is None:
        return dataset
    schema = text_as_bytes(dataset.features.arrow_schema)
    return dataset.cast(datasets.Features.from_arrow_schema(schema))
