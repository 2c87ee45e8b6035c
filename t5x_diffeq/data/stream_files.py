"""Files of documents that are read by Hugging Face's `datasets` while a model trains.

They belong to a dataset of the Hub, or are parquet and JSON files anywhere that fsspec reaches.
Nothing is downloaded, counted or tokenised in advance, so a corpus of any size opens in seconds.
"""

import re
from collections.abc import Iterator, Mapping
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

VALIDATION_DOCUMENTS = 1000  # at most; the train split's first ones if there is no other split
SAMPLE_DOCUMENTS = 1000  # on which a tokenizer is trained
_KINDS = {"parquet": r"\.parquet$", "json": r"\.jsonl?(\.(gz|zst|bz2|xz))?$"}


class Rows:
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
            place = f"data.path={self.files.path}: {self.files.split}, file {self.number}"
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


@dataclass(frozen=True)
class StreamFiles:
    """The files of one split.

    Attributes:
      path: `data.path`.
      split: the split's name.
      dataset: the library's dataset of all files; a shard of it is a file.
      fingerprint: a hash of the names and versions of the files.
      field: the field that holds the text; None: records are conversations.
    """

    path: str
    split: str
    dataset: "datasets.IterableDataset"
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
        return text or ""

    def first(self, number: int, skipped: int = 0) -> list[str]:
        """The first documents of the first files, after those that are skipped."""
        rows = (text for file in range(len(self)) for text in Rows(self, file))
        return list(islice(rows, skipped, skipped + number))


@dataclass(frozen=True)
class OpenStream:
    """Both splits of a streamed dataset.

    Attributes:
      train: the files of the train split.
      validation: those of the validation split, if there is one.
    """

    train: StreamFiles
    validation: StreamFiles | None

    @property
    def held_out(self) -> int:
        """How many documents at the beginning of the train split are for validation."""
        return 0 if self.validation else VALIDATION_DOCUMENTS

    @property
    def fingerprint(self) -> str:
        """A hash of all files."""
        parts = [self.train.fingerprint, self.validation.fingerprint if self.validation else ""]
        return digest(map(str.encode, parts))

    @property
    def documents(self) -> tuple["_FirstDocuments", "_FirstDocuments"]:
        """A sample of the train split, and the validation documents."""
        sample = _FirstDocuments(self.train, SAMPLE_DOCUMENTS, self.held_out)
        return sample, _FirstDocuments(self.validation or self.train, VALIDATION_DOCUMENTS)


class _FirstDocuments(Documents):
    """The first documents of a split, read when they are asked for."""

    def __init__(self, files: StreamFiles, number: int, skipped: int = 0):
        self.files, self.number, self.skipped = files, number, skipped

    @cached_property
    def texts(self) -> list[str]:
        return self.files.first(self.number, self.skipped)

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
        if hasattr(builder.config, "fragment_scan_options"):  # of parquet files
            _read_in_small_parts(builder.config)
        splits = [str(s) for s in builder.config.data_files or builder.info.splits or ()]
        opened = {s: builder.as_streaming_dataset(s) for s in splits if s in _splits_of(data)}
    except Exception as error:  # the library raises errors of any class
        if is_infrastructure_failure(error):
            raise
        raise InputError(
            f"data.path={data.path} can't be opened as a stream: {describe_error(error)}; give NAME, "
            "NAME@REVISION:CONFIG, a folder, or a glob such as hf://datasets/NAME/**/*.parquet"
        ) from error
    if data.train_split not in opened:
        raise InputError(
            f"data.train_split={data.train_split}: {data.path} has {', '.join(splits)}; a stream "
            "reads whole splits"
        )
    train, *others = (
        _files_of(data, split, builder, opened[split])
        for split in _splits_of(data)
        if split in opened
    )
    return OpenStream(train, others[0] if others else None)


def _splits_of(data: DataKeys) -> tuple[str, ...]:
    return tuple(dict.fromkeys((data.train_split, data.validation_split)))


def _builder(data: DataKeys) -> "datasets.DatasetBuilder":
    import datasets

    path = str(data.path)
    kind = next((kind for kind, ending in _KINDS.items() if re.search(ending, path)), None)
    if kind is None:
        local = Path(path).expanduser()
        name, _, config = path.partition(":") if not local.exists() else (str(local), "", "")
        name, _, revision = name.partition("@") if not local.exists() else (name, "", "")
        return datasets.load_dataset_builder(
            name, config or None, revision=revision or None, cache_dir=data.data_dir
        )
    files = {data.train_split: _absolute(path)}
    if data.validation_path:
        files[data.validation_split] = _absolute(data.validation_path)
    return datasets.load_dataset_builder(kind, data_files=files, cache_dir=data.data_dir)


def _read_in_small_parts(config: Any) -> None:
    """Makes parquet files cost some 0.1 GB of memory each, whatever the size of row groups."""
    import pyarrow.dataset

    config.batch_size = 500
    config.fragment_scan_options = pyarrow.dataset.ParquetFragmentScanOptions(pre_buffer=False)


def _absolute(path: str) -> str:
    """An address as it is, a path of this machine from its root."""
    return path if "://" in path else str(Path(path).expanduser().absolute())


def _files_of(
    data: DataKeys,
    split: str,
    builder: "datasets.DatasetBuilder",
    dataset: "datasets.IterableDataset",
) -> StreamFiles:
    names = dataset.column_names or list(next(iter(dataset), {}))
    if data.loss_on == "completion":
        fields, field = keys_of_conversations(names, f"data.path={data.path}"), None
    elif data.text_field in names:
        fields, field = [data.text_field], data.text_field
    else:
        raise InputError(
            f"data.text_field={data.text_field}: the {split} split of {data.path} has "
            f"{', '.join(names)}"
        )
    listed = (builder.config.data_files or {}).get(split)
    files = listed or range(dataset.num_shards)
    origins = [_size_or_version(*each) for each in zip(files, _versions(listed), strict=False)]
    facts = [str(data.path), split, str(data.text_field), *origins]
    return StreamFiles(
        str(data.path), split, dataset.select_columns(fields), digest(map(str.encode, facts)), field
    )


def _versions(listed: Any) -> list:
    """What the library knows of the versions of the files: the commit of a dataset of the Hub."""
    return list(getattr(listed, "origin_metadata", [])) or [()] * len(listed or ())


def _size_or_version(file: Any, version: tuple) -> str:
    """A name with the version; for a file of this machine with its size, as copies are alike."""
    path = Path(str(file))
    return f"{path.name} {path.stat().st_size}" if path.is_file() else f"{file} {version}"
