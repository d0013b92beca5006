"""Checkpoints on S3 (moto's server) and Google's storage (its emulator), while the network breaks."""

import http.client
import os
import shutil
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import boto3
import numpy as np
import pytest

from kenotron.checkpoint.engine import Keep
from kenotron.checkpoint.remote import RemoteCheckpoints
from kenotron.checkpoint.upload import Uploader
from kenotron.config import InputError
from kenotron.config.remote_data import RemoteData
from kenotron.storage import drivers, stores
from kenotron.storage.stores import Store, part_size
from support.checkpoint_states import load_and_compare, save_step
from support.nursery import Nursery
from support.tiny_run import losses, tiny_config, tiny_yaml

MIB = 1 << 20


@pytest.fixture
def store(bucket: str, monkeypatch: pytest.MonkeyPatch) -> Store:
    monkeypatch.setattr(stores, "PART", 5 * MIB)  # S3's smallest
    drivers.reset()
    return Store(f"s3://{bucket}/run")


def answer(handler: Any, status: int) -> bool:
    handler.rfile.read(int(handler.headers.get("Content-Length") or 0))
    return handler.answer(status)


def cut(handler: Any) -> bool:
    """Half of the body arrives, then the connection is gone."""
    handler.rfile.read(int(handler.headers.get("Content-Length") or 0) // 2)
    return hang_up(handler)


def hang_up(handler: Any) -> bool:
    handler.connection.shutdown(socket.SHUT_RDWR)
    handler.close_connection = True
    return True


def silent(handler: Any) -> bool:
    """No answer, for longer than the client waits."""
    handler.rfile.read(int(handler.headers.get("Content-Length") or 0))
    time.sleep(3)
    return hang_up(handler)


def lose(handler: Any) -> bool:
    """The server gets the request; its answer gets lost."""
    upstream = http.client.HTTPConnection("127.0.0.1", handler.server.port)
    body = handler.rfile.read(int(handler.headers.get("Content-Length") or 0))
    upstream.request(handler.command, handler.path, body, dict(handler.headers))
    upstream.getresponse().read()
    return hang_up(handler)


def failing(times: int, how: Callable[[Any], bool], only: str = "PUT") -> Callable[[Any], bool]:
    left = [times]

    def breaks(handler: Any) -> bool:
        if handler.command != only or not left[0]:
            return False
        left[0] -= 1
        return how(handler)

    return breaks


def random_file(folder: Path, mebibytes: int) -> Path:
    file = folder / "weights"
    file.write_bytes(np.random.default_rng(0).bytes(mebibytes * MIB))
    return file


@pytest.mark.parametrize("how", [lambda handler: answer(handler, 503), cut, lose], ids=["503", "cut", "lost answer"])
def test_a_large_file_arrives_in_parts(tmp_path: Path, store: Store, server: Any, how: Callable[[Any], bool]) -> None:
    """Whatever breaks on the way."""
    file = random_file(tmp_path, 11)
    server.breaks = failing(2, how)
    sent: list[int] = []
    store.upload("10/weights", file, sent.append)
    puts = [line for line in server.reads if line.startswith("PUT") and "partNumber" in line]
    assert {line.split("partNumber=")[1].split("&")[0].split()[0] for line in puts} == {"1", "2", "3"}
    assert len(puts) == 5  # the two that failed were sent again, and no other
    assert not [line for line in server.reads if line.startswith("GET") and "weights" in line]  # its MD5 shows it
    size, version = store.version("10/weights") or (0, "")
    assert (size, version.strip('"')[-2:]) == (11 * MIB, "-3")
    assert sent[-1] == 11 * MIB
    assert b"".join(store.stream("10/weights")) == file.read_bytes()


def test_a_request_without_an_answer_is_sent_again(tmp_path: Path, store: Store, server: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr("s3fs.S3FileSystem.read_timeout", 1)
    drivers.reset()
    file = random_file(tmp_path, 6)
    server.breaks = failing(1, silent)
    started = time.monotonic()
    store.upload("10/weights", file)
    assert time.monotonic() - started > 1
    assert len([line for line in server.reads if line.startswith("PUT") and "weights" in line]) == 2
    server.breaks = failing(1, silent, "GET")
    assert b"".join(store.stream("10/weights")) == file.read_bytes()


def test_a_store_that_stays_away_is_named(tmp_path: Path, store: Store, server: Any, monkeypatch: Any) -> None:
    (tmp_path / "weights").write_bytes(b"x" * 100)
    server.breaks = lambda handler: answer(handler, 500)
    small = Store(store.url, RemoteData(tries=2))
    server.reads.clear()
    with pytest.raises(InputError, match=r"/note: cannot be written, tried 2 times \("):
        small.put("note", b"x")
    assert len([line for line in server.reads if "/note" in line]) == 2  # the driver adds none of its own
    monkeypatch.setattr(stores, "PART_TRIES", 1)
    with pytest.raises(InputError, match=rf"^{store.url}/10/weights: cannot be written, tried 2 times \("):
        small.upload("10/weights", tmp_path / "weights")
    server.breaks = lambda handler: answer(handler, 403)
    with pytest.raises(InputError, match=rf"^{store.url}/10/weights: cannot be written \(PermissionError"):
        small.upload("10/weights", tmp_path / "weights")
    server.mend()
    with pytest.raises(InputError, match=r"^s3://nobodys/10/weights: cannot be written: there is no such bucket"):
        Store("s3://nobodys").upload("10/weights", tmp_path / "weights")


def test_parts_of_a_huge_file_are_fewer_than_s3_allows() -> None:
    for size in (0, stores.PART, 160 * 10**9, 5 * 10**12, 5 * 10**12 + 1):
        assert part_size(size) * stores.MOST_PARTS >= size
    assert part_size(10**9) == stores.PART


@pytest.mark.parametrize("tag", ["0123456789abcdef" * 2, "0x8DCD1F3A"], ids=["encrypted by KMS", "of another store"])
def test_an_object_whose_tag_is_no_md5_is_read_back(tag: str, tmp_path: Path, store: Store, monkeypatch: Any) -> None:
    (tmp_path / "weights").write_bytes(b"x" * 1000)
    monkeypatch.setattr(Store, "_info", lambda *_: {"type": "file", "size": 1000, "ETag": f'"{tag}"'})
    monkeypatch.setattr(Store, "stream", lambda self, name: iter([self._fs.cat_file(self.at(name))]))
    store.upload("10/weights", tmp_path / "weights")
    monkeypatch.setattr(Store, "stream", lambda *_: iter([b"x" * 600, b"y" * 400]))
    with pytest.raises(InputError, match="what arrived is not what was sent"):
        Store(store.url, RemoteData(tries=1)).upload("10/weights", tmp_path / "weights")


@pytest.mark.parametrize("url", ["file://{}/there", pytest.param("gs://robots/run", marks=pytest.mark.slow)])
def test_a_folder_of_this_machine_and_googles_storage_are_stores(url: str, tmp_path: Path, request: Any) -> None:
    if url.startswith("gs"):
        request.getfixturevalue("google")
    for step in (10, 20):
        save_step(tmp_path / "here", step)
    uploader = Uploader(tmp_path / "here", url.format(tmp_path), keep=Keep(1))
    uploader.upload_pending()
    assert uploader.problems == {}
    remote = RemoteCheckpoints(url.format(tmp_path))
    assert [entry.step for entry in remote.all()] == [20]
    assert load_and_compare(remote.fetch(20, tmp_path / "again")) == 20


def test_nothing_of_a_failed_upload_stays_in_the_bucket(tmp_path: Path, store: Store, server: Any, monkeypatch: Any):
    """Parts that no object has are invisible, and cost as others do."""
    monkeypatch.setattr(stores, "PART_TRIES", 1)
    server.breaks = lambda handler: "partNumber=2" in handler.path and answer(handler, 500)
    with pytest.raises(InputError, match="tried 1 time"):
        Store(store.url, RemoteData(tries=1)).upload("10/weights", random_file(tmp_path, 11))
    server.mend()
    client = boto3.client("s3", endpoint_url=server.url)
    assert "Uploads" not in client.list_multipart_uploads(Bucket="robots")


@pytest.mark.slow
def test_two_ranks_go_on_from_the_bucket_alone(tmp_path: Path, bucket: str, server: Any, nursery: Nursery) -> None:
    access = {name: os.environ[name] for name in os.environ if name.startswith("AWS_")}
    more = access | {"KENOTRON_CACHE": str(tmp_path / "cache")}
    found: dict[str, list[float]] = {}

    def train(name: str, *overrides: str) -> str:
        (tmp_path / name).mkdir(exist_ok=True)
        layout = ("parallelism.dp=2", "tokens.micro_batch_size=2", "optimizer.zero_stage=3")
        done = nursery.run("train", tiny_yaml(tmp_path / name), *layout, *overrides, folder=tmp_path, env=more)
        assert done.code == 0, done.stderr
        found[name] = losses(tiny_config(tmp_path / name))
        return done.stdout

    remote = (f"checkpoints.checkpoints_path=s3://{bucket}/run", "checkpoints.checkpoint_interval=2")
    train("whole", "tokens.train_steps=6")
    said = train("first", "tokens.train_steps=4", *remote)
    assert f"Uploaded s3://{bucket}/run/4: " in said
    shutil.rmtree(tmp_path / "first")
    said = train("again", "tokens.train_steps=6", *remote, "parallelism.tp=1")
    assert f"Fetching s3://{bucket}/run/4: " in said
    assert found["first"] + found["again"] == found["whole"]
