"""Files of documents that are read by Hugging Face's `datasets` while a model trains.

They belong to a dataset of the Hub, or are parquet and JSON files anywhere that fsspec reaches.
Nothing is downloaded, counted or tokenised in advance, so a corpus of any size opens in seconds.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import count, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from t5x_diffeq.data.conversations import conversation_of, keys_of_conversations
from t5x_diffeq.data.documents import Documents
from t5x_diffeq.runtime.config import DataKeys
from t5x_diffeq.runtime.errors import InputError, is_infrastructure_failure
from t5x_diffeq.runtime.extras import need_package
from t5x_diffeq.runtime.files import describe_error, digest

if TYPE_CHECKING:
    import datasets

VALIDATION_DOCUMENTS = 1000  # at most
_VALIDATION_EVERY = 10  # one in so many documents of the first file, if there is no other split
SAMPLE_DOCUMENTS = 1000  # on which a tokenizer is trained
_NOT_DOCUMENTS = ("text", "imagefolder", "audiofolder", "videofolder")  # of the library's builders
_KINDS = {"parquet": r"\.parquet$", "json": r"\.jsonl?(\.(gz|zst|bz2|xz))?$"}


class FileReader:
    """The documents of one file, from its beginning or where `state` was taken.

    Args:
      files: the files.
      number: the number of the file.
      row: how many of its records were taken before.
      state: the state of the library's iterator after these; None: the beginning.
    """

    def __init__(self, files: "StreamFiles", number: int, row: int = 0, state: dict | None = None):
        self.files, self.number, self.row = files, number, row
        self.dataset = files.dataset.shard(num_shards=len(files), index=number)
        if state is not None:
            self.dataset.load_state_dict(state)
        self.records = iter(self.dataset)

    def __iter__(self) -> Iterator[str]:
        for row in count(self.row):
            place = f"data.path: {self.files.names[self.number]}"
            try:
                record = next(self.records)
            except StopIteration:
                return
            except Exception as error:  # the library's file systems raise errors of any class
                if is_infrastructure_failure(error):
                    raise
                raise InputError(f"{place} can't be read: {describe_error(error)}") from error
            yield self.files.text_of(record, f"{place}, record {row}")

    @property
    def state(self) -> dict:
        """The state after the last document that was taken, as JSON."""
        return self.dataset.state_dict()


_BYTE_ORDER_MARK = "\ufeff"  # at the start of a file it only says that UTF-8 follows


@dataclass(frozen=True)
class StreamFiles:
    """The files of one split.

    Attributes:
      path: `data.path`.
      split: the split's name.
      dataset: the library's dataset of all files; a shard of it is a file.
      names: the files.
      fingerprint: a hash of the names and versions of the files.
      field: the field that holds the text; None: records are conversations.
    """

    path: str
    split: str
    dataset: "datasets.IterableDataset"
    names: tuple[str, ...]
    fingerprint: str
    field: str | None

    def __len__(self) -> int:
        return self.dataset.num_shards

    def text_of(self, record: Mapping[str, Any], where: str) -> str:
        """The document of a record; null is an empty text.

        Raises:
          InputError: if the record has none.
        """
        if self.field is None:
            return conversation_of(record, where)
        text = record.get(self.field)
        if not isinstance(text, str | None):
            raise InputError(f"{where}: its {self.field!r} is {text!r:.60}, not text")
        return (text or "").removeprefix(_BYTE_ORDER_MARK)

    def documents(self) -> Iterator[tuple[int, int, str]]:
        """The number of the file, that of the record, and the document, in the files' order."""
        for file in range(len(self)):
            for row, text in enumerate(FileReader(self, file)):
                yield file, row, text


@dataclass(frozen=True)
class OpenStream:
    """Both splits of a streamed dataset.

    Attributes:
      train: the files of the train split.
      validation: those of the validation split, if there is one.
    """

    train: StreamFiles
    validation: StreamFiles | None

    def is_held_out(self, file: int, row: int) -> bool:
        """Whether a document of the train split is for validation, by its file and record."""
        if self.validation or file > 0 or row >= VALIDATION_DOCUMENTS * _VALIDATION_EVERY:
            return False
        return row % _VALIDATION_EVERY == 0

    @property
    def fingerprint(self) -> str:
        """A hash of all files."""
        parts = [self.train.fingerprint, self.validation.fingerprint if self.validation else ""]
        return digest(map(str.encode, parts))

    @property
    def documents(self) -> tuple["_FirstDocuments", "_FirstDocuments"]:
        """A sample of the documents to train on, and those that validate."""
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
    """The first of some documents, read when they are asked for."""

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

    That is `name`, `name:config` or `name@revision:config` of the Hub, a folder, or a file or glob
    of .parquet, .jsonl or .json files, also compressed, here or behind hf://, gs:// and the like.

    Raises:
      InputError: if it can't be opened, or has no such split or field.
    """
    need_package("datasets", "data.source=stream")
    try:
        builder = _builder(data)
        splits = [str(s) for s in builder.config.data_files or builder.info.splits or ()]
        opened = [_files_of(data, s, builder) for s in _splits_of(data) if s in splits]
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
    return OpenStream(opened[0], opened[1] if opened[1:] else None)


def _splits_of(data: DataKeys) -> tuple[str, ...]:
    return tuple(dict.fromkeys((data.train_split, data.validation_split)))


def _builder(data: DataKeys) -> "datasets.DatasetBuilder":
    import datasets

    path = str(data.path)
    kind = next((kind for kind, ending in _KINDS.items() if re.search(ending, path)), None)
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
    if hasattr(builder.config, "fragment_scan_options"):  # of parquet files
        _read_in_small_parts(builder.config)
    return builder


def _builder_of_dataset(data: DataKeys, path: str) -> "datasets.DatasetBuilder":
    """The builder of a folder, or of a dataset of the Hub."""
    import datasets

    if "://" in path or "*" in path:
        raise InputError(
            f"data.path={path} names no files of a known kind; let it end in .parquet, .jsonl or "
            ".json, perhaps compressed, such as PATH/*.parquet"
        )
    if data.validation_path:
        raise InputError(
            f"data.validation_path={data.validation_path}: data.path={path} is a whole dataset, "
            "whose validation text is data.validation_split; leave it out"
        )
    folder = Path(path).expanduser()
    if folder.is_dir():
        return datasets.load_dataset_builder(str(folder), cache_dir=data.data_dir)
    name, _, config = path.partition(":")
    name, _, revision = name.partition("@")
    return datasets.load_dataset_builder(
        name, config or None, revision=revision or None, cache_dir=data.data_dir
    )


def _read_in_small_parts(config: Any) -> None:
    """Makes parquet files cost some 0.1 GB of memory each, whatever the size of row groups."""
    import pyarrow.dataset

    config.batch_size = 500
    config.fragment_scan_options = pyarrow.dataset.ParquetFragmentScanOptions(pre_buffer=False)


def _absolute(path: str) -> str:
    """An address as it is, a path of this machine from its root."""
    return path if "://" in path else str(Path(path).expanduser().absolute())


def _files_of(data: DataKeys, split: str, builder: "datasets.DatasetBuilder") -> StreamFiles:
    dataset = builder.as_streaming_dataset(split)
    columns = dataset.column_names or list(next(iter(dataset), {}))
    if data.loss_on == "completion":
        fields, field = keys_of_conversations(columns, f"data.path={data.path}"), None
    elif data.text_field in columns:
        fields, field = [data.text_field], data.text_field
    else:
        raise InputError(
            f"data.text_field={data.text_field}: the {split} split of {data.path} has "
            f"{', '.join(columns)}"
        )
    listed = (builder.config.data_files or {}).get(split)
    names = [str(x) for x in listed or (f"file {n}" for n in range(dataset.num_shards))]
    versions = {str(x) for x in getattr(listed, "origin_metadata", [])}  # commits of the Hub
    here = Path(names[0]).is_file()
    facts = [str(data.path), split, str(data.text_field), *map(_with_size, names)]
    facts += [] if here else sorted(versions)  # of files here, that is the time of a copy
    fingerprint = digest(map(str.encode, facts))
    return StreamFiles(
        str(data.path), split, dataset.select_columns(fields), tuple(names), fingerprint, field
    )


def _with_size(name: str) -> str:
    path = Path(name)
    return f"{path.name} {path.stat().st_size}" if path.is_file() else name
