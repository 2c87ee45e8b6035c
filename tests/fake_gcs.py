"""A server that stands in for Google Cloud Storage: its JSON API, as the clients of it use it.

The real libraries (gcsfs, TensorStore, ArrayRecord's own reader) talk to it, in this process or in
others, through the variables of `environment`. As in the real one, an object is whole or not there,
nothing is appended or renamed, and there are no folders.
"""

import base64
import hashlib
import json
import re
import threading
from contextlib import contextmanager
from dataclasses import dataclass, field
from email.message import Message
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, unquote, urlsplit

import google_crc32c


@dataclass
class Store:
    """What the server holds.

    Attributes:
      objects: content and generation, by (bucket, name).
      refuse: given the method and the path with its query, the status to refuse with, or None.
      writes: names of the objects written, in order.
    """

    objects: dict = field(default_factory=dict)
    refuse: object = lambda method, path: None
    writes: list = field(default_factory=list)
    uploads: dict = field(default_factory=dict)
    lock: object = field(default_factory=threading.RLock)
    generation: int = 0

    def put(self, bucket, name, content):
        with self.lock:
            self.generation += 1
            self.objects[bucket, name] = content, self.generation
            self.writes.append(name)
        return self.facts(bucket, name)

    def names(self, prefix=""):
        with self.lock:
            return sorted(name for _, name in self.objects if name.startswith(prefix))

    def facts(self, bucket, name):
        content, generation = self.objects[bucket, name]
        return {
            "kind": "storage#object",
            "id": f"{bucket}/{name}/{generation}",
            "bucket": bucket,
            "name": name,
            "size": str(len(content)),
            "generation": str(generation),
            "metageneration": "1",
            "contentType": "application/octet-stream",
            "storageClass": "STANDARD",
            "etag": f"e{generation}",
            "updated": "2026-01-01T00:00:00.000Z",
            "timeCreated": "2026-01-01T00:00:00.000Z",
            **hashes(content),
        }


def hashes(content):
    crc = google_crc32c.value(content).to_bytes(4, "big")
    return {
        "md5Hash": base64.b64encode(hashlib.md5(content).digest()).decode(),
        "crc32c": base64.b64encode(crc).decode(),
    }


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def handle_one(self):
        """Reads the request, refuses it or gives it to whom it concerns."""
        split = urlsplit(self.path)
        self.query = {key: values[0] for key, values in parse_qs(split.query).items()}
        length = int(self.headers.get("Content-Length") or 0)
        self.body = self.rfile.read(length) if length else self.read_body()
        status = self.server.store.refuse(self.command, unquote(self.path))
        if status:
            return self.answer({"error": {"code": status, "message": "refused"}}, status)
        self.respond(split)

    def respond(self, split):
        for pattern, method in ROUTES:
            verb, _, path = pattern.partition(" ")
            if verb == self.command and (found := re.fullmatch(path, split.path)):
                with self.server.store.lock:
                    return getattr(self, method)(*map(unquote, found.groups()))
        return self.answer({"error": {"code": 404, "message": "no such method"}}, 404)

    do_GET = do_POST = do_PUT = do_DELETE = do_PATCH = handle_one  # noqa: N815

    def read_body(self):
        body = b""
        if "chunked" in self.headers.get("Transfer-Encoding", ""):
            while size := int(self.rfile.readline().split(b";")[0], 16):
                body += self.rfile.read(size)
                self.rfile.readline()
            self.rfile.readline()
        return body

    def answer(self, content, status=200, headers=()):
        body = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(status)
        for name, value in dict(headers).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def precondition_fails(self, bucket, name):
        wanted = self.query.get("ifGenerationMatch")
        there = self.server.store.objects.get((bucket, name), (b"", 0))[1]
        if wanted is None or int(wanted) == there:
            return False
        self.answer({"error": {"code": 412, "message": "conditionNotMet"}}, 412)
        return True

    def is_missing(self, bucket, name):
        if (bucket, name) in self.server.store.objects:
            return False
        self.answer({"error": {"code": 404, "message": f"No such object: {bucket}/{name}"}}, 404)
        return True

    def bucket(self, bucket):
        self.answer({"kind": "storage#bucket", "name": bucket, "location": "US"})

    def list(self, bucket):
        prefix, delimiter = self.query.get("prefix", ""), self.query.get("delimiter")
        items, prefixes = [], set()
        for there, name in sorted(self.server.store.objects):
            if there != bucket or not name.startswith(prefix):
                continue
            rest = name[len(prefix) :]
            if name < self.query.get("startOffset", ""):
                continue
            if "endOffset" in self.query and name >= self.query["endOffset"]:
                continue
            if delimiter and delimiter in rest:
                prefixes.add(prefix + rest.split(delimiter)[0] + delimiter)
            else:
                items.append(self.server.store.facts(bucket, name))
        self.answer({"kind": "storage#objects", "items": items, "prefixes": sorted(prefixes)})

    def get(self, bucket, name):
        if self.is_missing(bucket, name):
            return
        facts = self.server.store.facts(bucket, name)
        if self.query.get("ifGenerationNotMatch") == facts["generation"]:
            return self.answer(b"", 304)
        if self.query.get("alt") == "media":
            return self.media(bucket, name)
        self.answer(facts)

    def media(self, bucket, name):
        if self.is_missing(bucket, name):
            return
        facts = self.server.store.facts(bucket, name)
        content = self.server.store.objects[bucket, name][0]
        headers = {
            "x-goog-generation": facts["generation"],
            "x-goog-metageneration": "1",
            "x-goog-storage-class": "STANDARD",
            "x-goog-stored-content-length": facts["size"],
            "x-goog-stored-content-encoding": "identity",
            "x-goog-hash": f"crc32c={facts['crc32c']},md5={facts['md5Hash']}",
            "ETag": facts["etag"],
            "Content-Type": "application/octet-stream",
        }
        span = re.fullmatch(r"bytes=(-?\d+)-(\d*)", self.headers.get("Range") or "")
        last = re.fullmatch(r"bytes=-(\d+)", self.headers.get("Range") or "")
        if not (span or last):
            return self.answer(content, 200, headers)
        first = max(len(content) - int(last[1]), 0) if last else int(span[1])
        stop = int(span[2]) + 1 if span and span[2] else len(content)
        if first >= len(content):
            return self.answer(b"", 416, {"Content-Range": f"bytes */{len(content)}"})
        part = content[first:stop]
        headers["Content-Range"] = f"bytes {first}-{first + len(part) - 1}/{len(content)}"
        self.answer(part, 206, headers)

    def upload(self, bucket):
        kind, name, content = (
            self.query.get("uploadType", "media"),
            self.query.get("name"),
            self.body,
        )
        if kind == "resumable":
            name = name or json.loads(content)["name"]
            if self.precondition_fails(bucket, name):
                return
            token = f"u{len(self.server.store.uploads)}"
            self.server.store.uploads[token] = bucket, name, b""
            place = f"http://{self.headers['Host']}/resume?uploadType=resumable&upload_id={token}"
            return self.answer({}, 200, {"Location": place})
        if kind == "multipart":
            name, content = multipart(self.headers, content)
        if not self.precondition_fails(bucket, name):
            self.answer(self.server.store.put(bucket, name, content))

    def resume(self):
        token = self.query["upload_id"]
        bucket, name, before = self.server.store.uploads[token]
        span = self.headers.get("Content-Range", "")
        whole = before + self.body
        if span.endswith("/*"):
            self.server.store.uploads[token] = bucket, name, whole
            return self.answer(b"", 308, {"Range": f"bytes=0-{len(whole) - 1}"})
        self.answer(self.server.store.put(bucket, name, whole))

    def delete(self, bucket, name):
        if self.is_missing(bucket, name) or self.precondition_fails(bucket, name):
            return
        del self.server.store.objects[bucket, name]
        self.answer(b"", 204)

    def rewrite(self, bucket, name, to_bucket, to_name):
        if self.is_missing(bucket, name):
            return
        content = self.server.store.objects[bucket, name][0]
        facts = self.server.store.put(to_bucket, to_name, content)
        size = str(len(content))
        self.answer(
            {"done": True, "resource": facts, "objectSize": size, "totalBytesRewritten": size}
        )

    def move(self, bucket, name, to_name):
        if self.is_missing(bucket, name):
            return
        content, _ = self.server.store.objects.pop((bucket, name))
        self.answer(self.server.store.put(bucket, to_name, content))

    def log_message(self, *arguments):
        pass


ROUTES = (
    ("GET /storage/v1/b/([^/]+)", "bucket"),
    ("GET /storage/v1/b/([^/]+)/storageLayout", "bucket"),
    ("GET /storage/v1/b/([^/]+)/o/?", "list"),
    ("POST /upload/storage/v1/b/([^/]+)/o", "upload"),
    ("POST /resume", "resume"),
    ("PUT /resume", "resume"),
    ("POST /storage/v1/b/([^/]+)/o/([^/]+)/rewriteTo/b/([^/]+)/o/([^/]+)", "rewrite"),
    ("POST /storage/v1/b/([^/]+)/o/([^/]+)/moveTo/o/([^/]+)", "move"),
    ("GET /(?:download/)?storage/v1/b/([^/]+)/o/(.+)", "get"),
    ("DELETE /storage/v1/b/([^/]+)/o/(.+)", "delete"),
    ("GET /([^/]+)/(.+)", "media"),
)


def multipart(headers, body):
    """Name and content of a multipart upload."""
    message = Message()
    message["Content-Type"] = headers["Content-Type"]
    boundary = b"--" + message.get_param("boundary").encode()
    _, facts, rest = body.split(boundary, 2)
    content, _, _ = rest.rpartition(boundary)
    facts, content = (re.split(rb"\r?\n\r?\n", part, maxsplit=1)[1] for part in (facts, content))
    return json.loads(facts)["name"], re.sub(rb"\r?\n\Z", b"", content, count=1)


class Server(ThreadingHTTPServer):
    daemon_threads = True

    store: Store  # or what else holds the objects, and refuses

    def handle_error(self, request, client_address):
        """A client that has read enough breaks off."""


@contextmanager
def serve():
    """Within it, a server runs: gives its store and the environment that leads to it."""
    with running(Handler) as (server, url):
        server.store = Store()
        yield server.store, environment(url)


@contextmanager
def running(handler):
    """Within it, a server of this process runs, which has yet to get its store; and its address."""
    server = Server(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield server, f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


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
