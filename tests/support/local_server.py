"""A web server of a test: it serves from its construction to the end of its `with` block, in silence."""

import threading
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class LocalServer(ThreadingHTTPServer):
    """Answers by `handler` on a free port of this machine."""

    daemon_threads = True

    def __init__(self, handler: type[BaseHTTPRequestHandler]) -> None:
        super().__init__(("127.0.0.1", 0), handler)
        threading.Thread(target=self.serve_forever, args=(0.05,), daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def handle_error(self, *_: object) -> None:
        """A client that went away is no error."""

    def __exit__(self, *_: object) -> None:
        self.shutdown()
        self.server_close()


class QuietHandler(BaseHTTPRequestHandler):
    """Keeps connections, prints nothing."""

    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        pass

    def answer(self, status: int, body: bytes = b"", headers: Mapping[str, str] | None = None) -> bool:
        """`headers` may say another length than the body's, as those of a HEAD do. Returns True: it is answered."""
        self.send_response(status)
        for name, value in ({"Content-Length": str(len(body))} | dict(headers or {})).items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)
        return True
