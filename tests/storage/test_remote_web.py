"""https://: single files of web servers, whatever those do (the tests' own speaks http)."""

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import numpy as np
import pytest
from test_remote_failures import opened, waits_of

from kenotron.config import InputError
from kenotron.data.formats import open_token_files
from kenotron.storage import drivers, fetching
from kenotron.text.file_documents import FileDocuments, find_files
from support.data_runs import assert_same_runs
from support.local_server import LocalServer, QuietHandler
from support.written_tokens import write_ds

IDS = np.random.default_rng(0).integers(0, 500, 20_000).astype("<u2")


class Web(LocalServer):
    """Serves `files`; a name in `moved` is answered with another. What else it can do is said in `manners`."""

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}
        self.moved: dict[str, str] = {}
        self.manners = {"ranges", "etag"}
        self.status = 0  # what every request is answered with
        self.reads: list[str] = []
        super().__init__(_Handler)


class _Handler(QuietHandler):
    server: Web

    def do_GET(self) -> None:
        web, path = self.server, urlsplit(self.path).path
        web.reads.append(f"{self.command} {self.path} {self.headers.get('Range', '')}".strip())
        data, status = web.files.get(path, b""), 200 if path in web.files else 404
        headers = {}
        if web.status:
            data, status, headers = b"", web.status, {"Retry-After": "7"}
        elif path in web.moved:
            data, status, headers = b"", 302, {"Location": web.moved[path]}
        elif status == 200:
            if "etag" in web.manners:
                headers["ETag"] = f'"{hashlib.sha1(data).hexdigest()}"'
            if "date" in web.manners:
                headers["Last-Modified"] = f"day {sum(data) % 997}"
            if "ranges" in web.manners and (wanted := self.headers.get("Range")):
                start, stop = (int(number) for number in wanted.removeprefix("bytes=").split("-"))
                headers["Content-Range"] = f"bytes {start}-{min(stop + 1, len(data)) - 1}/{len(data)}"
                data, status = data[start : stop + 1], 206
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        if "length" not in web.manners:
            self.send_header("Content-Length", str(len(data)))
        else:
            self.close_connection = True
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    do_HEAD = do_GET


@pytest.fixture(scope="module")
def _server() -> Iterator[Web]:
    with Web() as made:
        yield made


@pytest.fixture
def web(_server: Web, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Web:
    """With `ids.npy`, 40 kB, and blocks of 10 kB."""
    np.save(tmp_path / "ids.npy", IDS)
    monkeypatch.setattr(fetching, "BLOCK", 10_000)
    drivers.reset()
    _server.files, _server.moved = {"/ids.npy": (tmp_path / "ids.npy").read_bytes()}, {}
    _server.manners, _server.status = {"ranges", "etag"}, 0
    _server.reads.clear()
    return _server


def test_ranges(web: Web) -> None:
    array = opened(f"{web.url}/ids.npy")
    web.reads.clear()
    np.testing.assert_array_equal(array[6_000:7_000], IDS[6_000:7_000])  # bytes 12128 to 14128
    assert web.reads == ["GET /ids.npy bytes=10000-19999", "HEAD /ids.npy"]
    np.testing.assert_array_equal(array[:], IDS)


def test_a_file_that_lies_elsewhere(web: Web) -> None:
    web.moved["/latest/tokens.npy"] = f"{web.url}/ids.npy"
    np.testing.assert_array_equal(opened(f"{web.url}/latest/tokens.npy")[:], IDS)


@pytest.mark.parametrize("manners", [{"ranges", "etag"}, {"ranges", "date"}])
def test_a_changed_file_is_an_error(web: Web, manners: set[str]) -> None:
    web.manners = manners
    url = f"{web.url}/ids.npy"
    array = opened(url)
    web.files["/ids.npy"] = web.files["/ids.npy"][:-1] + b"\xff"
    with pytest.raises(InputError, match=f"^{url}: the file has changed since it was opened$"):
        array[15_000:]


def test_a_server_without_ranges(web: Web) -> None:
    web.manners = {"etag"}
    with pytest.raises(InputError, match=r"ids\.npy: its server ignores byte ranges and sends the complete"):
        opened(f"{web.url}/ids.npy")
    assert len([read for read in web.reads if "bytes=" in read]) == 1
    web.files["/small.jsonl"] = b'{"text": "beep"}\n'  # of one block: nothing is lost
    texts = FileDocuments("t", find_files(f"{web.url}/small.jsonl", "key"))
    assert [piece.text for piece in texts.documents()] == ["beep"]


def test_a_server_that_does_not_tell_the_length(web: Web) -> None:
    web.manners = {"length"}
    with pytest.raises(InputError, match=r"ids\.npy: its server does not send the length of the file"):
        opened(f"{web.url}/ids.npy")


def test_a_failing_server_is_no_missing_file(web: Web, monkeypatch: pytest.MonkeyPatch) -> None:
    """A loss mask that is not there is none; one that cannot be asked for is an error."""
    slept = waits_of(monkeypatch)
    web.status = 503
    url = f"{web.url}/ids.npy"
    with pytest.raises(InputError, match=rf"^{url}: cannot be read, tried 5 times \(ClientResponseError: 503"):
        open_token_files(url, "PATH")
    assert slept == [7.0] * 4  # as it asks for
    web.status = 403
    with pytest.raises(InputError, match=rf"^{url}: cannot be read \(ClientResponseError: 403"):
        open_token_files(url, "PATH")
    web.status = 0
    with pytest.raises(InputError, match=f"PATH: no such file or folder: {web.url}/nothing.npy"):
        open_token_files(f"{web.url}/nothing.npy", "PATH")


def test_a_query_is_no_part_of_the_name(web: Web) -> None:
    np.testing.assert_array_equal(opened(f"{web.url}/ids.npy?download=true")[:], IDS)
    web.files["/a.jsonl"] = json.dumps({"text": "beep"}).encode()
    texts = FileDocuments("t", find_files(f"{web.url}/a.jsonl?token=a/b.c", "key"))
    assert [piece.text for piece in texts.documents()] == ["beep"]


def test_a_run_equals_that_of_the_file_here(web: Web, tmp_path: Path) -> None:
    here = tmp_path / "robots.ds"
    write_ds(here, np.split(IDS, range(40, 20_000, 40)), loss=(IDS % 7 > 0).tolist())
    for file in tmp_path.glob("robots.ds*"):
        web.files[f"/{file.name}"] = file.read_bytes()
    assert {"/robots.ds", "/robots.ds.index", "/robots.ds.loss"} <= set(web.files)
    assert_same_runs({"tokens": str(here)}, {"tokens": f"{web.url}/robots.ds"})
