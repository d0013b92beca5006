"""`kenotron plan --serve`: a page on which a config is changed, and its plan drawn anew.

    serve(Server(8420, "my", text, gpu, plan, rank))

Only pages of this very address may ask: a YAML file can name code to run.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any, Literal, get_args, get_origin

from kenotron.config import Config
from kenotron.config.errors import InputError, RunFailed
from kenotron.planner.hardware import GPUS
from kenotron.planner.page import KEYS, page_data, page_of
from kenotron.planner.search import table

if TYPE_CHECKING:
    from kenotron.planner.planning import Plan

HOST = "127.0.0.1"


class Server(ThreadingHTTPServer):
    """Answers with the page, with the data of plans, each made once, and with ranked layouts.

    `plan` makes the plan of a YAML file's text, on a kind of GPU (None: this machine's), with some overrides. `rank`
    searches the `Layout`s of the same, and reports how many are done, and of how many.
    """

    daemon_threads = True

    def __init__(
        self, port: int, name: str, text: str, gpu: str | None, plan: Callable[..., Plan], rank: Callable[..., Any]
    ) -> None:
        gpu = gpu.lower() if gpu is not None and gpu.lower() in GPUS else gpu
        kinds = [*GPUS, *{gpu} - {None, *GPUS}]  # a file's name is one that the page may choose
        self.first = {"yaml": text, "gpu": gpu, "gpus": kinds, "keys": {key: _choices(key) for key in KEYS}}
        self.name, self.plan, self.rank = name, plan, rank
        self.one_at_a_time = threading.Lock()
        self.planned = cache(self._planned)
        try:
            super().__init__((HOST, port), Handler)
        except OSError as error:
            raise InputError(f"--port {port}: {error.strerror}; expected one that is free, or 0 for any") from None

    def answer(self, asked: dict[str, Any], report: Callable[[int, int], None] | None) -> dict[str, Any]:
        """The data of a plan, or with `report` those of layouts; or an "error" in words for people."""
        run = asked["yaml"], asked["gpu"] or None, tuple(asked["overrides"])
        try:
            with self.one_at_a_time:
                if report is None:
                    return self.planned(*run)
                layouts = self.rank(*run, report)
        except (InputError, RunFailed) as error:
            return {"error": str(error)}
        header, rows = table(layouts)
        return {"header": header, "rows": rows, "overrides": [each.overrides for each in layouts]}

    def _planned(self, text: str, gpu: str | None, overrides: Sequence[str]) -> dict[str, Any]:
        return page_data(self.plan(text, gpu, list(overrides)), self.name)


class Handler(BaseHTTPRequestHandler):
    """A request of the page."""

    server: Server

    def do_GET(self) -> None:
        """Send the page, which asks for its first plan itself."""
        if self.path != "/" or not self._from_here():
            self._send(404, "text/plain", "")
            return
        self._send(200, "text/html; charset=utf-8", page_of({"served": self.server.first}))

    def do_POST(self) -> None:
        """Send the data of a plan, or, a line for each that is done, those of layouts.

        Another site's page could not send this type without asking first.
        """
        if self.headers["Content-Type"] != "application/json" or not self._from_here():
            self._send(403, "text/plain", "")
            return
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path != "/layouts":
            self._send(200, "application/json", json.dumps(self.server.answer(asked, None), allow_nan=False))
            return
        self.send_response(200)
        self.end_headers()
        with suppress(ConnectionError):  # the page was closed, or asks for something else
            self._line(self.server.answer(asked, lambda done, of: self._line({"done": done, "of": of})))

    def _line(self, data: dict[str, Any]) -> None:
        self.wfile.write(json.dumps(data).encode() + b"\n")

    def _from_here(self) -> bool:
        """Whether the address is this machine's, by any port: another site's name may lead here, too."""
        return (self.headers["Host"] or "").partition(":")[0] in (HOST, "localhost")

    def _send(self, status: int, kind: str, text: str) -> None:
        body = text.encode()
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args: object) -> None:
        """Say nothing: the page shows what goes wrong."""


def _choices(key: str) -> list[Any]:
    """The values that a key of a section may have; none: any."""
    section, name = key.split(".")
    fields: Any = Config.model_fields[section].annotation
    kind = fields.model_fields[name].annotation
    return [value for each in (kind, *get_args(kind)) if get_origin(each) is Literal for value in get_args(each)]


def serve(server: Server) -> None:
    """Answer until Ctrl-C."""
    print(f"Open http://{HOST}:{server.server_port} in a browser; Ctrl-C ends it.", flush=True)
    try:
        server.serve_forever()
    except KeyboardInterrupt:
        server.server_close()
