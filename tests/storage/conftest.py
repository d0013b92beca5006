"""Real servers of S3 (moto's) and of Google's storage, and proxies in front that can be slow, break and vanish."""

import http.client
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import boto3
import pytest
import requests

from kenotron.storage import drivers, fetching
from kenotron.storage.blocks import block_store
from support.local_server import LocalServer, QuietHandler


class Proxy(LocalServer):
    """Passes requests on. `breaks(handler)` may answer in place of the server, and returns whether it did."""

    def __init__(self, port: int, at_once: int = 64) -> None:
        self.port, self.latency = port, 0.0
        self.breaks: Callable[[BaseHTTPRequestHandler], bool] = lambda handler: False
        self.reads: list[str] = []
        self.at_once = threading.Semaphore(at_once)
        super().__init__(_Handler)

    def mend(self) -> None:
        """Whole and fast again."""
        self.latency, self.breaks = 0.0, lambda handler: False
        self.reads.clear()


class _Handler(QuietHandler):
    server: Proxy

    def do_GET(self) -> None:
        self.server.reads.append(f"{self.command} {self.path} {self.headers.get('Range', '')}")
        time.sleep(self.server.latency)
        if self.server.breaks(self):
            return
        upstream = http.client.HTTPConnection("127.0.0.1", self.server.port)
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        with self.server.at_once:
            upstream.request(self.command, self.path, body, dict(self.headers))
            answer = upstream.getresponse()
            data = answer.read()
        hop = ("transfer-encoding", "connection", "server", "date")
        self.answer(answer.status, data, {k: value for k, value in answer.getheaders() if k.lower() not in hop})
        upstream.close()

    do_HEAD = do_PUT = do_POST = do_DELETE = do_GET


@pytest.fixture(scope="session")
def proxy() -> Iterator[Proxy]:
    from moto.server import ThreadedMotoServer

    moto = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    moto.start()
    with Proxy(moto.get_host_and_port()[1]) as made:
        yield made
    moto.stop()


@pytest.fixture
def server(proxy: Proxy, monkeypatch: pytest.MonkeyPatch) -> Iterator[Proxy]:
    """The proxy, whole and fast."""
    access = {"AWS_ACCESS_KEY_ID": "robot", "AWS_SECRET_ACCESS_KEY": "secret", "AWS_DEFAULT_REGION": "us-east-1"}
    for name, value in {**access, "AWS_ENDPOINT_URL": proxy.url}.items():
        monkeypatch.setenv(name, value)
    for name in ("AWS_PROFILE", "HTTP_PROXY", "http_proxy"):
        monkeypatch.delenv(name, raising=False)
    proxy.mend()
    yield proxy
    proxy.mend()


@pytest.fixture
def bucket(server: Proxy) -> str:
    """An empty bucket."""
    s3 = boto3.resource("s3", endpoint_url=f"http://127.0.0.1:{server.port}")
    made = s3.create_bucket(Bucket="robots")
    made.objects.all().delete()
    return "robots"


def objects(path: Path, key: str) -> dict[str, bytes]:
    """Names and bytes of a file, or of a folder's files, put at `key`."""
    if path.is_file():
        return {key: path.read_bytes()}
    return {f"{key}/{p.relative_to(path).as_posix()}": p.read_bytes() for p in sorted(path.rglob("*")) if p.is_file()}


@pytest.fixture
def upload(server: Proxy, bucket: str) -> Callable[[Path, str], str]:
    """Puts a file or folder into the bucket; returns its URL."""
    client = boto3.client("s3", endpoint_url=f"http://127.0.0.1:{server.port}")

    def put(path: Path, key: str) -> str:
        for name, data in objects(path, key).items():
            client.put_object(Bucket=bucket, Key=name, Body=data)
        return f"s3://{bucket}/{key}"

    return put


@pytest.fixture(scope="session")
def google_proxy() -> Iterator[Proxy]:
    emulator = pytest.importorskip("gcp_storage_emulator.server")
    server = emulator.create_server("127.0.0.1", 0, in_memory=True, default_bucket="robots")
    server.start()
    made = Proxy(server._api._httpd.server_address[1], at_once=4)  # its backlog is 5
    yield made
    made.shutdown()
    made.server_close()
    server.stop()


@pytest.fixture
def google(google_proxy: Proxy, monkeypatch: pytest.MonkeyPatch) -> Iterator[Proxy]:
    """A proxy of the emulator of Google's storage, with an empty bucket `robots`."""
    for name in ("GOOGLE_APPLICATION_CREDENTIALS", "HTTP_PROXY", "http_proxy"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NO_GCE_CHECK", "true")  # which takes seconds
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", google_proxy.url)
    requests.get(f"{google_proxy.url}/wipe?keep-buckets=1", timeout=10)
    google_proxy.mend()
    drivers.reset()
    yield google_proxy
    google_proxy.mend()


@pytest.fixture
def google_upload(google: Proxy) -> Callable[[Path, str], str]:
    """Puts a file or folder into the bucket; returns its URL."""

    def put(path: Path, key: str) -> str:
        for name, data in objects(path, key).items():
            about = {"uploadType": "media", "name": name}
            address = f"{google.url}/upload/storage/v1/b/robots/o"
            requests.post(address, params=about, data=data, timeout=10).raise_for_status()
        return f"gs://robots/{key}"

    return put


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(fetching, "FIRST_WAIT", 0.01)
    monkeypatch.setenv("KENOTRON_CACHE", str(tmp_path / "cache"))
    block_store.cache_clear()
    return tmp_path / "cache"
