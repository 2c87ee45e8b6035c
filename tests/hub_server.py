"""A server that answers as the Hugging Face Hub does, for its real client (`huggingface_hub`).

It knows one commit of one dataset, and answers what the client asks to list and read its files. The
answers have the fields that the client parses.
"""

import hashlib
import json
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class _Answers(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self):  # the library's name
        path, query = unquote(urlsplit(self.path).path), urlsplit(self.path).query
        api, files = f"/api/datasets/{self.server.repo}", self.server.files
        self.server.asked.append(self.path)
        if path in (api, *(f"{api}/revision/{name}" for name in ("main", COMMIT))):
            siblings = [{"rfilename": name} for name in files]
            facts = {"id": self.server.repo, "sha": COMMIT, "siblings": siblings, "tags": []}
            return self.answer(json.dumps({**facts, "private": False, "downloads": 0}))
        if path.startswith(f"{api}/tree/"):
            folder = path.removeprefix(f"{api}/tree/").partition("/")[2]
            return self.answer(json.dumps(self.entries(folder, "recursive=true" in query)))
        resolve = f"/datasets/{self.server.repo}/resolve/"
        if path.startswith(resolve):
            name = path.removeprefix(resolve).partition("/")[2]
            if name in files:
                return self.answer(files[name])
        return self.answer("{}", 404)

    do_HEAD = do_GET  # noqa: N815

    def do_POST(self):
        size = int(self.headers["Content-Length"])
        asked = self.rfile.read(size).decode()
        self.server.asked.append(f"{self.path} {asked}")
        paths = json.loads(asked)["paths"] if asked.startswith("{") else []
        paths = paths or [unquote(p[6:]) for p in asked.split("&") if p.startswith("paths=")]
        return self.answer(json.dumps([self.entry(p) for p in paths if p in self.server.files]))

    def entries(self, folder, recursive):
        """The files in a folder and the folders in it; with all that is in these, if asked."""
        start = f"{folder}/" if folder else ""
        inside = [name for name in self.server.files if name.startswith(start)]
        deep = {name for name in inside if "/" in name.removeprefix(start)}
        folders = {start + name.removeprefix(start).partition("/")[0] for name in deep}
        listed = [self.entry(name) for name in inside if recursive or name not in deep]
        return [{"type": "directory", "path": name, "oid": COMMIT} for name in folders] + listed

    def entry(self, name):
        content = self.server.files[name]
        oid = hashlib.sha1(content).hexdigest()
        return {"type": "file", "path": name, "size": len(content), "oid": oid}

    def answer(self, content, status=200):
        content = content.encode() if isinstance(content, str) else content
        wanted = self.headers.get("Range")
        whole = len(content)
        if wanted and status == 200:
            first, _, last = wanted.removeprefix("bytes=").partition("-")
            stop = min(int(last) + 1 if last else whole, whole)
            content, status = content[int(first) : stop], 206
        self.send_response(status)
        if status == 206:
            self.send_header("Content-Range", f"bytes {first}-{stop - 1}/{whole}")
        if status == 404:
            self.send_header("X-Error-Code", "EntryNotFound")
        self.send_header("Content-Length", str(len(content)))
        self.send_header("ETag", f'"{hashlib.sha1(content).hexdigest()}"')
        self.send_header("X-Repo-Commit", COMMIT)
        self.send_header("Accept-Ranges", "bytes")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def log_message(self, *arguments):
        pass


@contextmanager
def hub(repo, files):
    """A server with a dataset of these files, by name; what it was asked is in `asked`."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Answers)
    server.repo, server.files, server.asked = repo, files, []
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
