"""A file that grows at its end, on this machine or in Google Cloud Storage."""

import os
import time

from t5x_diffeq.system.console import log
from t5x_diffeq.system.errors import InfrastructureError, RunError
from t5x_diffeq.system.files import (
    AnyPath,
    check_writable,
    describe_error,
    is_in_bucket,
    open_to_write,
    write_whole,
)

SECONDS_BETWEEN_UPLOADS = 30  # an object allows at most one per second


class GrowingFile:
    """A file that grows at its end, from `content` on; only one process may write it.

    On this machine everything written reaches the disk at once. An object can't grow: it is
    uploaded again by `flush`, and every so often by `write`, where a failure is only a warning.

    Raises:
      RunError: if it can't be written; the methods raise it too.
    """

    def __init__(self, path: AnyPath, content: bytes = b""):
        self.path, self.content = path, bytearray(content)
        write_whole(path, content)
        self.uploaded, self.stored = time.monotonic(), len(content)  # when, and how many bytes

    def write(self, content: bytes) -> None:
        """Appends to the file."""
        if not is_in_bucket(self.path):
            check_writable(self.path)
            try:
                with os.fdopen(open_to_write(self.path, os.O_WRONLY | os.O_APPEND), "ab") as file:
                    file.write(content)
                    file.flush()
                    os.fsync(file.fileno())
            except OSError as error:
                raise RunError(f"{self.path} can't be written: {describe_error(error)}") from error
            return
        self.content += content
        if time.monotonic() - self.uploaded > SECONDS_BETWEEN_UPLOADS:
            self.try_flush()

    def try_flush(self) -> None:
        """Calls `flush`; a failure is only a warning, since the file can be uploaded later."""
        try:
            GrowingFile.flush(self)
        except (RunError, InfrastructureError) as error:
            log(f"warning: {error}; trying again later")

    def flush(self) -> None:
        """Returns when the whole file is stored."""
        self.uploaded = time.monotonic()
        if is_in_bucket(self.path) and self.stored != len(self.content):
            write_whole(self.path, bytes(self.content))
            self.stored = len(self.content)

    def close(self) -> None:
        """Flushes for the last time."""
        self.flush()
