"""A server that answers as the Hugging Face Hub does, for its real client (`huggingface_hub`).

It knows one commit of one dataset, and answers what the client asks to list and read its files. The
answers have the fields that the client parses.
"""

import hashlib
import json
from contextlib import contextmanager
from urllib.parse import unquote, urlsplit

from http_server import Handler, serving

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class Answers(Handler):
    repo: str
    files: dict[str, bytes]
    asked: list[str]

    def respond(self):
        path, api = unquote(urlsplit(self.path).path), f"/api/datasets/{self.repo}"
        self.asked.append(self.path)
        if path in (api, *(f"{api}/revision/{name}" for name in ("main", COMMIT))):
            siblings = [{"rfilename": name} for name in self.files]
            facts = {"id": self.repo, "sha": COMMIT, "siblings": siblings, "tags": []}
            return self.answer({**facts, "private": False, "downloads": 0})
        if path.startswith(f"{api}/tree/"):
            folder = path.removeprefix(f"{api}/tree/").partition("/")[2]
            return self.answer(self.entries(folder, "recursive=true" in self.path))
        if path.startswith(f"{api}/paths-info/"):
            wanted = json.loads(self.body)["paths"]
            return self.answer([self.entry(name) for name in wanted if name in self.files])
        name = path.removeprefix(f"/datasets/{self.repo}/resolve/").partition("/")[2]
        if name in self.files:
            return self.send_file(self.files[name])
        return self.answer({}, 404, {"X-Error-Code": "EntryNotFound"})

    def entries(self, folder, recursive):
        """The folders, each of which is one of the root, or the files of one; or both, if asked."""
        folders = {name.partition("/")[0] for name in self.files} if not folder else ()
        files = [n for n in self.files if n.startswith(folder)] if folder or recursive else []
        listed = [{"type": "directory", "path": name, "oid": COMMIT} for name in folders]
        return listed + [self.entry(name) for name in files]

    def entry(self, name):
        content = self.files[name]
        oid = hashlib.sha1(content).hexdigest()
        return {"type": "file", "path": name, "size": len(content), "oid": oid}

    def send_file(self, content):
        """All of it, or the range that is asked for."""
        etag = hashlib.sha1(content).hexdigest()
        headers = {"ETag": f'"{etag}"', "X-Repo-Commit": COMMIT, "Accept-Ranges": "bytes"}
        if not (wanted := self.headers.get("Range")):
            return self.answer(content, 200, headers)
        first, _, last = wanted.removeprefix("bytes=").partition("-")
        part = content[int(first) : int(last) + 1 if last else None]
        headers["Content-Range"] = f"bytes {first}-{int(first) + len(part) - 1}/{len(content)}"
        return self.answer(part, 206, headers)


@contextmanager
def hub(repo, files):
    """The address of a server with a dataset of these files, by name; and what it was asked."""
    asked = []
    with serving(Answers, repo=repo, files=files, asked=asked) as address:
        yield f"http://{address}", asked
