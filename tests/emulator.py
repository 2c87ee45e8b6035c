"""A server of Google Cloud Storage's API that others wrote: gcp-storage-emulator.

It checks that the project's own stand-in (fake_gcs.py) has not only the project's ideas of that
API. It can't refuse requests, knows no preconditions (so of several who take a lease, all get it),
answers one request at a time, and has no `moveTo` (gcsfs then copies and deletes, after several
tries). A training run of two processes in it did not end within five minutes on a busy machine, so
runs, leases and refusals have the stand-in alone.
"""

import logging
import socket
from contextlib import contextmanager
from urllib.parse import urlencode
from urllib.request import Request, urlopen

from fake_gcs import environment
from gcp_storage_emulator.server import create_server


class Emulator:
    """What the server holds, as far as the tests ask: see fake_gcs.Store."""

    def __init__(self, storage, url):
        self.storage, self.url = storage, url

    def put(self, bucket, name, content):
        query = urlencode({"uploadType": "media", "name": name})
        address = f"{self.url}/upload/storage/v1/b/{bucket}/o?{query}"
        request = Request(address, data=content, method="POST")
        request.add_header("Content-Type", "application/octet-stream")
        urlopen(request).close()

    def names(self, prefix=""):
        held = self.storage.objects.get("bucket", {})
        return sorted(name for name in held if name.startswith(prefix))

    @property
    def objects(self):
        return {
            ("bucket", name): (self.storage.get_file("bucket", name), 0) for name in self.names()
        }


@contextmanager
def serve():
    """Within it, the server runs: gives what it holds and the environment that leads to it."""
    logging.getLogger("gcp_storage_emulator").setLevel(logging.CRITICAL)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    server = create_server("127.0.0.1", port, in_memory=True, default_bucket="bucket")
    server.start()
    try:
        url = f"http://127.0.0.1:{port}"
        yield Emulator(server._storage, url), environment(url)
    finally:
        server.stop()
