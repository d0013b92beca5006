"""`kenotron plan --serve`: serve a page on which the config can be changed, and its plan is drawn again.

    serve(Server(8420, "my", text, gpu, plan, rank))

Only the page from this address may send requests, because a YAML file can name code to run.
"""

from __future__ import annotations

import json
import signal
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from select import select
from socket import MSG_PEEK
from typing import TYPE_CHECKING, Any, Literal, get_args, get_origin

from kenotron.config import Config
from kenotron.config.errors import InputError, RunFailed, os_errors
from kenotron.planner.hardware import GPUS
from kenotron.planner.page import KEYS, page_data, page_of
from kenotron.planner.search import table
from kenotron.storage.hub import first_line

if TYPE_CHECKING:
    from kenotron.planner.planning import RunPlan

HOST = "127.0.0.1"


class PageServer(ThreadingHTTPServer):
    """Serves the page, the data of plans, which are cached, and ranked layouts.

    `plan` plans the text of a YAML file on a kind of GPU (None: this machine's), with some overrides. `rank` takes the
    same arguments, searches `Layout`s, and reports the number of planned layouts, and of all.
    """

    daemon_threads = True

    def __init__(
        self, port: int, name: str, text: str, gpu: str | None, plan: Callable[..., RunPlan], rank: Callable[..., Any]
    ) -> None:
        gpu = gpu.lower() if gpu is not None and gpu.lower() in GPUS else gpu
        kinds = [*GPUS, *{gpu} - {None, *GPUS}]  # with the file, if `gpu` is the name of one
        self.first = {"yaml": text, "gpu": gpu, "gpus": kinds, "keys": {key: _choices(key) for key in KEYS}}
        self.name, self.plan, self.rank = name, plan, rank
        self.one_at_a_time = threading.Lock()
        self.planned = cache(self._planned)
        with os_errors(f"--port {port}", "; expected one that is free, or 0 for any"):
            super().__init__((HOST, port), Handler)

    def answer(self, page: Handler, report: Callable[[int, int], None] | None) -> dict[str, Any]:
        """Return the data of a plan, or with `report` of layouts; or the message of an "error".

        Raises ConnectionError for a page that is gone before it is its turn, or that `report` does not reach.
        """
        try:
            request = json.loads(page.rfile.read(int(page.headers["Content-Length"] or 0)))
            run = request["yaml"], request["gpu"] or None, tuple(request["overrides"])
            with self.one_at_a_time:
                if page.is_gone():
                    raise ConnectionAbortedError
                if report is None:
                    return self.planned(*run)
                layouts = self.rank(*run, report)
        except ConnectionError:
            raise
        except Exception as error:
            known = isinstance(error, InputError | RunFailed)
            return {"error": str(error) if known else f"{type(error).__name__}: {first_line(error)}"}
        header, rows = table(layouts)
        return {"header": header, "rows": rows, "overrides": [layout.overrides for layout in layouts]}

    def _planned(self, text: str, gpu: str | None, overrides: Sequence[str]) -> dict[str, Any]:
        return page_data(self.plan(text, gpu, list(overrides)), self.name)


class Handler(BaseHTTPRequestHandler):
    """Handles the requests of the page."""

    server: PageServer

    def handle(self) -> None:
        """Handle a request, whose answer is for nobody if the page was closed, or asks for something newer."""
        with suppress(ConnectionError):
            super().handle()

    def do_GET(self) -> None:
        """Send the page, which then requests its first plan."""
        if self.path != "/" or not self._is_local():
            self._send(404, "text/plain", "")
            return
        self._send(200, "text/html; charset=utf-8", page_of({"served": self.server.first}))

    def do_POST(self) -> None:
        """Send the data of a plan, or of layouts, after a line for each planned layout.

        Another site's page could not send JSON without a preflight request, which is not answered.
        """
        if self.headers["Content-Type"] != "application/json" or not self._is_local():
            self._send(403, "text/plain", "")
            return
        if self.path != "/layouts":
            self._send(200, "application/json", json.dumps(self.server.answer(self, None), allow_nan=False))
            return
        self.send_response(200)
        self.end_headers()
        self._line(self.server.answer(self, lambda done, of: self._line({"done": done, "of": of})))

    def is_gone(self) -> bool:
        """Return whether the page has closed the connection: it was closed, or asks for something newer."""
        readable, _, _ = select([self.connection], [], [], 0)
        return bool(readable) and not self.connection.recv(1, MSG_PEEK)

    def _line(self, data: dict[str, Any]) -> None:
        self.wfile.write(json.dumps(data).encode() + b"\n")

    def _is_local(self) -> bool:
        """Return whether the request names this machine, with any port: another site's host name may resolve to it."""
        return (self.headers["Host"] or "").partition(":")[0] in (HOST, "localhost")

    def _send(self, status: int, kind: str, text: str) -> None:
        body = text.encode()
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args: object) -> None:
        """Log nothing, as the page shows errors."""


def _choices(key: str) -> list[Any]:
    """Return the values that a key of a section may have; an empty list means any value."""
    section, name = key.split(".")
    fields: Any = Config.model_fields[section].annotation
    kind = fields.model_fields[name].annotation
    literals = [option for option in (kind, *get_args(kind)) if get_origin(option) is Literal]
    return [value for literal in literals for value in get_args(literal)]


def serve(server: PageServer) -> None:
    """Serve until Ctrl-C, SIGTERM, or the end of the terminal."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.default_int_handler)
    try:
        print(f"Open http://{HOST}:{server.server_port} in a browser; Ctrl-C ends it.", flush=True)
        server.serve_forever()
    except KeyboardInterrupt:
        server.server_close()
