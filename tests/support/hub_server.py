"""A server with the answers of the Hugging Face hub that reading needs (huggingface.co/docs/hub/api).

GET  /api/datasets/o/n[/revision/R]           the commit of a revision
GET  /api/datasets/o/n/tree/R/path            what a folder holds, page by page
GET  /datasets/o/n/resolve/R/path             the bytes; of a large file (here .ds, .npy, .parquet) the address
GET  /cdn/…                                   of its bytes, elsewhere
"""

import hashlib
import json
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler
from typing import Any
from urllib.parse import parse_qs, quote, unquote, urlsplit

from support.local_server import LocalServer, QuietHandler

LARGE = (".ds", ".npy", ".parquet")


class Hub(LocalServer):
    """`push` makes a commit; `token` is what reading a repository takes; `breaks` is as in `conftest.Proxy`."""

    def __init__(self) -> None:
        self.repositories: dict[str, dict[str, dict[str, bytes]]] = {}  # name -> revision -> path -> bytes
        self.tokens: dict[str, str] = {}
        self.blobs: dict[str, bytes] = {}
        self.mend()
        super().__init__(_Handler)

    def mend(self) -> None:
        self.reads: list[str] = []
        self.page = 1000
        self.breaks: Callable[[BaseHTTPRequestHandler], bool] = lambda handler: False

    def push(self, name: str, files: dict[str, bytes]) -> str:
        """A commit on `main` that adds or replaces files; its name."""
        revisions = self.repositories.setdefault(name, {"main": {}})
        tree = revisions["main"] | files
        commit = hashlib.sha1(repr(sorted(tree.items())).encode()).hexdigest()
        revisions["main"] = revisions[commit] = tree
        return commit


class _Handler(QuietHandler):
    server: Hub

    def do_GET(self) -> None:
        self.server.reads.append(f"{self.command} {self.path} {self.headers.get('Range', '')}")
        if self.server.breaks(self):
            return
        path = unquote(urlsplit(self.path).path).lstrip("/")
        if path.startswith("cdn/"):
            self._bytes(self.server.blobs[path.removeprefix("cdn/")], {})
        elif path.startswith("api/datasets/"):
            self._api(path.removeprefix("api/datasets/").split("/", 4))
        else:
            self._resolve(path.removeprefix("datasets/").split("/", 4))

    do_HEAD = do_GET

    def _tree(self, name: str, revision: str) -> dict[str, bytes] | None:
        """The files of a revision; None where an error was answered."""
        wanted = self.server.tokens.get(name)
        if name not in self.server.repositories or (wanted and self.headers.get("Authorization") != f"Bearer {wanted}"):
            self._json({"error": "Repository not found"}, 401, {"X-Error-Code": "RepoNotFound"})
        elif revision not in self.server.repositories[name]:
            self._json({"error": "Invalid rev id"}, 404, {"X-Error-Code": "RevisionNotFound"})
        else:
            return self.server.repositories[name][revision]
        return None

    def _api(self, parts: list[str]) -> None:
        name, what, revision = "/".join(parts[:2]), *(parts[2:4] or ["revision", "main"])
        if (tree := self._tree(name, revision)) is None:
            return
        path = parts[4] if len(parts) > 4 else ""
        if what == "revision":
            self._json({"id": name, "sha": self._commit(name, revision), "private": False, "tags": [], "downloads": 0})
        else:
            below = [entry for entry in self._entries(tree) if entry["path"].startswith(f"{path}/" if path else "")]
            missing = not below and path
            error = ({"error": "Entry not found"}, 404, {"X-Error-Code": "EntryNotFound"})
            query = parse_qs(urlsplit(self.path).query)
            start = int(query.get("cursor", ["0"])[0])
            page, rest = below[start : start + self.server.page], below[start + self.server.page :]
            after = f"{self.server.url}{self.path.split('&cursor')[0]}&cursor={start + len(page)}"
            self._json(*error) if missing else self._json(page, 200, {"Link": f'<{after}>; rel="next"'} if rest else {})

    def _entries(self, tree: dict[str, bytes]) -> list[dict[str, Any]]:
        folders = {path[:at] for path in tree for at, letter in enumerate(path) if letter == "/"}
        found: list[dict[str, Any]] = [{"type": "directory", "path": path, "oid": "0", "size": 0} for path in folders]
        for path, data in tree.items():
            entry: dict[str, Any] = {"type": "file", "path": path, "size": len(data), "oid": _blob(path, data)}
            if path.endswith(LARGE):
                entry["lfs"] = {"oid": hashlib.sha256(data).hexdigest(), "size": len(data), "pointerSize": 134}
            found.append(entry)
        return sorted(found, key=lambda entry: entry["path"])

    def _resolve(self, parts: list[str]) -> None:
        name, revision, path = "/".join(parts[:2]), parts[3], parts[4]
        if (tree := self._tree(name, revision)) is None:
            return
        headers = {"X-Repo-Commit": self._commit(name, revision)}
        if path not in tree:
            self._json({"error": "Entry not found"}, 404, {"X-Error-Code": "EntryNotFound"} | headers)
            return
        data = tree[path]
        if not path.endswith(LARGE):
            self._bytes(data, {"ETag": f'"{_blob(path, data)}"'} | headers)
            return
        digest = hashlib.sha256(data).hexdigest()
        self.server.blobs[digest] = data
        linked = {"X-Linked-Etag": f'"{digest}"', "X-Linked-Size": str(len(data)), "ETag": '"of the redirection"'}
        elsewhere = f"http://localhost:{self.server.server_address[1]}/cdn/{quote(digest)}"
        self.answer(302, b"", linked | headers | {"Location": elsewhere})

    def _commit(self, name: str, revision: str) -> str:
        revisions = self.server.repositories[name]
        return next(commit for commit, tree in revisions.items() if commit != "main" and tree is revisions[revision])

    def _bytes(self, data: bytes, headers: dict[str, str]) -> None:
        if not (wanted := self.headers.get("Range")):
            self.answer(200, data, headers | {"ETag": headers.get("ETag", '"the store\'s own"')})
            return
        start, stop = (int(number) for number in wanted.removeprefix("bytes=").split("-"))
        part = data[start : stop + 1]
        if not part:
            self.answer(416, b"", headers | {"Content-Range": f"bytes */{len(data)}"})
        else:
            place = f"bytes {start}-{start + len(part) - 1}/{len(data)}"
            self.answer(206, part, {"ETag": '"the store\'s own"'} | headers | {"Content-Range": place})

    def _json(self, answer: Any, status: int = 200, headers: dict[str, str] | None = None) -> None:
        self.answer(status, json.dumps(answer).encode(), {"Content-Type": "application/json"} | (headers or {}))


def _blob(path: str, data: bytes) -> str:
    """Git's name of what is committed: the file, or of a large one a pointer."""
    if path.endswith(LARGE):
        data = f"oid sha256:{hashlib.sha256(data).hexdigest()}\nsize {len(data)}\n".encode()
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()
