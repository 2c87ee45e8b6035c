"""A server of HTTP in this process, for what stands in for a service."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class Handler(BaseHTTPRequestHandler):
    """Reads the body of each request and calls `respond`, which answers."""

    protocol_version = "HTTP/1.1"

    def read(self) -> None:
        self.body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.respond()

    do_GET = do_HEAD = do_POST = do_PUT = do_PATCH = do_DELETE = read  # noqa: N815

    def respond(self) -> None:
        raise NotImplementedError

    def answer(self, content: object, status: int = 200, headers: dict[str, str] | None = None):
        """Sends bytes as they are, everything else as JSON."""
        given = headers or {}
        if not isinstance(content, bytes):
            content = json.dumps(content).encode()
            given = {"Content-Type": "application/json"} | given
        self.send_response(status)
        for name, value in {"Content-Length": str(len(content)), **given}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def log_message(self, *arguments: object) -> None:
        pass


class Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request, client_address):
        """A client that has read enough breaks off."""


@contextmanager
def serving(handler: type[Handler], **attributes: object) -> Iterator[str]:
    """Within it, such handlers with these attributes answer at this address."""
    server = Server(("127.0.0.1", 0), type("", (handler,), attributes))
    threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
    try:
        yield f"127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
