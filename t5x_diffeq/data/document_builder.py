"""What the builders of WikiText-103 and OpenWebText share: documents streamed to shards."""

from abc import abstractmethod
from collections.abc import Iterable, Iterator
from itertools import groupby
from pathlib import Path
from typing import Any

import tensorflow_datasets as tfds

from t5x_diffeq.runtime.console import format_count, say
from t5x_diffeq.runtime.errors import InputError
from t5x_diffeq.runtime.files import is_in_bucket, parse_path
from t5x_diffeq.runtime.staging import stage

SHARD_LENGTH = 2**16  # documents: 0.3 GB of OpenWebText
_SHARD_NAME = "{DATASET}-{SPLIT}.{FILEFORMAT}-{SHARD_INDEX}"  # their number is not known in advance
SAY_EVERY = 500_000  # documents

KeyedExample = tuple[str, dict[str, str]]  # a key and {"text": ...}


class DocumentBuilder(  # tfds has no types
    tfds.core.GeneratorBasedBuilder,
    skip_registration=True,  # type: ignore[call-arg]
):
    """A dataset of documents `{"text": ...}`, in the order of its raw archive.

    Args:
      raw: the archive, a folder with its content, or an http(s) URL; needed only to build it.
      file_format: the shards' format; array_record is read and written without TensorFlow.
      **kwargs: arguments of `tfds.core.DatasetBuilder`, such as `data_dir`.
    """

    VERSION = tfds.core.Version("1.0.0")
    url_infos = None  # no recorded checksums: looking for them needs importlib_resources
    ARCHIVE = ""  # the archive's usual name
    HOMEPAGE = ""
    CITATION = ""

    def __init__(self, *, raw: str | None = None, file_format: str = "array_record", **kwargs: Any):
        self.raw = raw
        super().__init__(file_format=file_format, **kwargs)

    def _info(self) -> tfds.core.DatasetInfo:
        return tfds.core.DatasetInfo(
            builder=self,
            description=" ".join((type(self).__doc__ or "").split()),
            features=tfds.features.FeaturesDict({"text": tfds.features.Text()}),
            homepage=self.HOMEPAGE,
            citation=self.CITATION,
            disable_shuffling=True,
            metadata=tfds.core.MetadataDict(),
        )

    def check_raw(self) -> str:
        """The path or URL of the raw data.

        Raises:
          InputError: if none is given, or the path does not exist.
        """
        if not self.raw:
            raise InputError(
                f"data.path is not set and {self.name} is not built in {self.data_dir}; give "
                f"--config.data.path={self.ARCHIVE} (the archive, its folder or its URL), or as "
                "data.data_dir the folder where it was built"
            )
        if not _is_url(self.raw) and not parse_path(self.raw, "data.path").exists():
            raise InputError(
                f"data.path={self.raw}: there is no such file or folder; give {self.ARCHIVE}, a "
                "folder with its content, or its URL"
            )
        if not (_is_url(self.raw) or is_in_bucket(parse_path(self.raw, "data.path"))):
            self._check_archive(parse_path(self.raw, "data.path"))
        return self.raw

    @abstractmethod
    def _check_archive(self, root: Path) -> None:
        """Checks that the archive or folder can be opened and begins as it should."""

    def _raw_path(self, dl_manager: tfds.download.DownloadManager) -> Path:
        """The archive or folder, downloaded if need be; tfds keeps downloads in the data_dir."""
        raw = self.check_raw()
        if not _is_url(raw):
            (archive,) = stage([parse_path(raw, "data.path")])
            return archive
        try:
            return Path(dl_manager.download(raw))
        except Exception as error:  # from tfds, requests or sockets
            raise InputError(
                f"data.path={raw} can't be downloaded: {error}; check the URL and the disk, "
                "or give a downloaded file"
            ) from error

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


def _is_url(raw: str) -> bool:
    return raw.startswith(("http://", "https://"))
