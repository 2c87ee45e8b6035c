"""A file that grows at its end, on this machine or in Google Cloud Storage."""

import os
import time
from contextlib import suppress

from t5x_diffeq.system import files
from t5x_diffeq.system.console import log
from t5x_diffeq.system.errors import InfrastructureError, RunError
from t5x_diffeq.system.foreign_files import open_inside

SECONDS_BETWEEN_UPLOADS = 30  # an object may change at most once per second
_BLOCK = 2**20  # bytes


def copy_beginning(source: files.AnyPath, target: files.AnyPath, size: int) -> int:
    """Copies the first `size` bytes of a file, which may be the target; returns how many lines."""
    lines = 0
    with files.atomic_file(target) as partial, partial.open("wb") as new:
        if size:
            with (
                files.bucket_errors(f"{source} can't be read", RunError),
                open_inside(source) as old,
            ):
                while block := old.read(min(_BLOCK, size - new.tell())):
                    lines += block.count(b"\n")
                    new.write(block)
    return lines


class GrowingFile:
    """A file that grows at its end, after its first `kept` bytes; only one process may write it.

    On this machine everything written reaches the disk at once. In a bucket, `flush` appends what
    was written. `write` does so every `SECONDS_BETWEEN_UPLOADS`; there a failure is only a warning.

    Attributes:
      lines: the number of whole lines among the bytes that were kept.

    Raises:
      RunError: if it can't be written; the methods raise it too.
    """

    def __init__(self, path: files.AnyPath, kept: int = 0):
        self.path, self.flushed = path, time.monotonic()
        self.lines = copy_beginning(path, path, kept)
        # In a bucket: the object's size; the bytes that may not be in the object yet; how many of
        # these bytes the last upload had.
        self.stored, self.pending, self.tried = kept, bytearray(), 0

    def write(self, content: bytes) -> None:
        """Appends to the file."""
        if not files.is_in_bucket(self.path):
            files.check_writable(self.path)
            try:
                with os.fdopen(
                    files.open_to_write(self.path, os.O_WRONLY | os.O_APPEND), "ab"
                ) as file:
                    file.write(content)
                    file.flush()
                    os.fsync(file.fileno())
            except OSError as error:
                raise RunError(
                    f"{self.path} can't be written: {files.describe_error(error)}"
                ) from error
            return
        self.pending += content
        if time.monotonic() - self.flushed > SECONDS_BETWEEN_UPLOADS:
            self.try_flush()

    def try_flush(self) -> None:
        """Calls `flush`; a failure is only a warning, since the rest can be appended later."""
        try:
            GrowingFile.flush(self)  # a subclass's `flush` may call this method
        except (RunError, InfrastructureError) as error:
            log(f"warning: {error}; trying again later")

    def flush(self) -> None:
        """Returns when everything written is stored."""
        self.flushed = time.monotonic()
        while self.pending:
            with files.bucket_errors(f"{self.path} can't be written", RunError):
                self._append()

    def _append(self) -> None:
        """Uploads what is pending, and has the bucket put it at the end of the object.

        An object can't grow. So the bucket composes a new object of the old one and the upload, and
        replaces the old object if its generation is still the one that was read. If the answer is
        lost, the next call sees by the object's size that the bytes were appended.
        """
        try:
            before = files.bucket_files().info(str(self.path))
        except FileNotFoundError:
            files.write_whole(self.path, b"")  # somebody has deleted it
            return
        if before["size"] == self.stored + self.tried:
            del self.pending[: self.tried]
        self.stored, self.tried = before["size"], len(self.pending)
        if not self.pending:
            return
        part = self.path.parent / f".{self.path.name}.part"
        files.check_writable(self.path)
        files.bucket_files().pipe_file(str(part), bytes(self.pending), consistency="md5")
        bucket, key, _ = files.bucket_files().split_path(str(self.path))
        names = (key, files.bucket_files().split_path(str(part))[1])
        with suppress(FileExistsError):  # the object has changed meanwhile: `flush` tries again
            files.bucket_files().call(
                "POST",
                "b/{}/o/{}/compose",
                bucket,
                key,
                ifGenerationMatch=before["generation"],
                json={"sourceObjects": [{"name": name} for name in names]},
            )
            self.stored, self.tried = self.stored + self.tried, 0
            self.pending.clear()
        with suppress(FileNotFoundError):
            files.bucket_files().rm_file(str(part))

    def close(self) -> None:
        """Flushes for the last time."""
        self.flush()
