"""What goes wrong on the way: tried again, then named; the cache stays below its cap whatever is read."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import boto3
import fsspec
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kenotron.config import InputError
from kenotron.config.remote_data import RemoteData
from kenotron.data.formats import open_token_files
from kenotron.storage import drivers, fetching
from kenotron.storage.arrays import read_rows
from kenotron.storage.blocks import BlockStore, block_store
from kenotron.storage.fsspec_storage import BlockArray
from kenotron.storage.paths import as_path
from support.checkpoint_states import flip_a_byte

Upload = Callable[[Path, str], str]


@pytest.fixture
def tokens(tmp_path: Path, upload: Upload) -> tuple[str, np.ndarray]:
    ids = np.random.default_rng(0).integers(0, 500, 20_000).astype("<u2")
    np.save(tmp_path / "ids.npy", ids)
    return upload(tmp_path / "ids.npy", "ids.npy"), ids


def opened(url: str, **changes: Any) -> BlockArray:
    found = open_token_files(as_path(url, RemoteData(**changes)), "PATH")[0].tokens
    assert isinstance(found, BlockArray)
    return found


def failing(times: int, status: int = 500, body: bytes = b"", headers: Any = None) -> Callable[[Any], bool]:
    """The first `times` reads of bytes are answered with `status`."""
    left = [times]

    def breaks(handler: Any) -> bool:
        if handler.command != "GET" or not handler.headers.get("Range") or left[0] == 0:
            return False
        left[0] -= 1
        return handler.answer(status, body, headers)

    return breaks


def test_two_failures_then_an_answer(server: Any, tokens: Any, capsys: pytest.CaptureFixture[str]) -> None:
    url, ids = tokens
    server.breaks = failing(2)
    np.testing.assert_array_equal(opened(url)[:], ids)
    said = capsys.readouterr().err
    assert said.count("warning") == 1  # from the second failure on
    assert f"warning: {url}, bytes 0-40127: try 2 of 5 failed (" in said


@pytest.mark.parametrize(("asked", "waited"), [("7", 7.0), ("3600", 60.0), ("Fri, 31 Dec 1999 23:59:59 GMT", None)])
def test_a_server_may_ask_to_be_waited_for(server: Any, tokens: Any, asked: str, waited: Any, monkeypatch: Any) -> None:
    url, ids = tokens
    slept = waits_of(monkeypatch)
    server.breaks = failing(1, 503, headers={"Retry-After": asked})
    np.testing.assert_array_equal(opened(url)[:], ids)
    assert slept == ([waited] if waited else [pytest.approx(0.01, rel=0.3)])


def gets(server: Any) -> list[str]:
    return [read for read in server.reads if "GET" in read]


def waits_of(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Instead of the waits between tries."""
    slept: list[float] = []
    monkeypatch.setattr(fetching, "time", SimpleNamespace(sleep=slept.append))
    return slept


def test_a_short_answer_is_tried_again(server: Any, tokens: Any) -> None:
    url, ids = tokens
    array = opened(url, cache_gb=1e-6)  # smaller than the block: nothing is kept
    server.breaks = failing(1, 206, b"x" * 100)
    server.reads.clear()
    np.testing.assert_array_equal(array[:], ids)
    assert len(gets(server)) == 2


@pytest.mark.parametrize("tries", [1, 3])
def test_a_server_that_dies_is_named(server: Any, tokens: Any, tries: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetching, "BLOCK", 10_000)
    url, ids = tokens
    array = opened(url, tries=tries)
    np.testing.assert_array_equal(array[:4000], ids[:4000])
    server.breaks = failing(10**6)
    server.reads.clear()
    np.testing.assert_array_equal(array[100:200], ids[100:200])  # which lies here
    assert not server.reads
    told = "cannot be read, tried 3 times" if tries == 3 else "cannot be read, tried 1 time"
    with pytest.raises(InputError, match=rf"ids\.npy, bytes 30000-39999: {told} \(.*"):
        array[15_000:15_010]
    assert len(gets(server)) == tries
    server.breaks = failing(0)
    np.testing.assert_array_equal(array[15_000:15_010], ids[15_000:15_010])


@pytest.mark.parametrize("status", [403, 404])
def test_what_no_retry_mends_is_reported_at_once(server: Any, tokens: Any, status: int) -> None:
    url, _ = tokens
    array = opened(url, cache_gb=1e-6)  # smaller than the block: nothing is kept
    server.breaks = failing(10**6, status)
    server.reads.clear()
    with pytest.raises(InputError, match="has vanished since" if status == 404 else "cannot be read \\(Permission"):
        array[:]
    assert len(gets(server)) == 1


def test_without_credentials(server: Any, tokens: Any, monkeypatch: pytest.MonkeyPatch, request: Any) -> None:
    url, ids = tokens
    request.addfinalizer(drivers.reset)
    boto3.client("s3", endpoint_url=server.url).put_object_acl(Bucket="robots", Key="ids.npy", ACL="public-read")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    for name in ("AWS_SHARED_CREDENTIALS_FILE", "AWS_CONFIG_FILE"):
        monkeypatch.setenv(name, "/nowhere")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    drivers.reset()
    access = "access comes from AWS_PROFILE, or AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"
    with pytest.raises(InputError, match=rf"^{url}: cannot be read \(NoCredentialsError: [^\n]*\); {access}$"):
        open_token_files(url, "PATH")
    monkeypatch.setitem(fsspec.config.conf, "s3", {"anon": True})  # which FSSPEC_S3_ANON=true sets
    drivers.reset()
    np.testing.assert_array_equal(drivers.filesystem(url).cat_file(url, start=128), ids.view(np.uint8).tobytes())


def test_a_changed_file_is_an_error(tmp_path: Path, tokens: Any, upload: Upload, monkeypatch: Any) -> None:
    monkeypatch.setattr(fetching, "BLOCK", 10_000)
    url, ids = tokens
    array = opened(url)
    for other in (ids + 1, ids[:100]):
        np.save(tmp_path / "ids.npy", other)
        upload(tmp_path / "ids.npy", "ids.npy")
        with pytest.raises(InputError, match=rf"{url}: the file has changed since it was opened"):
            array[15_000:15_010]
    np.testing.assert_array_equal(opened(url)[:], ids[:100])  # another version: nothing old is read


def test_damaged_and_lost_blocks_are_fetched_again(tokens: Any, own_cache: Path, server: Any) -> None:
    url, ids = tokens
    array = opened(url)
    np.testing.assert_array_equal(array[:], ids)
    (block,) = [file for file in (own_cache / "remote").rglob("*") if file.stat().st_size > 30_000 and file.is_file()]
    flip_a_byte(block, 5000)
    block_store.cache_clear()  # another process
    np.testing.assert_array_equal(opened(url)[:], ids)
    block.unlink(missing_ok=True)
    np.testing.assert_array_equal(array[:], ids)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.integers(20, 400), st.lists(st.tuples(st.integers(0, 30), st.integers(1, 120)), max_size=60))
def test_the_cache_stays_below_its_cap(tmp_path_factory: Any, cap: int, writes: list[tuple[int, int]]) -> None:
    folder = tmp_path_factory.mktemp("store")
    stores = [BlockStore(folder, cap) for _ in range(2)]  # two processes
    for turn, (number, size) in enumerate(writes):
        name, data = f"{number:02d}{size}", bytes([number]) * size
        stores[turn % 2].keep(name, data)
        files = [file for file in folder.rglob("*") if file.is_file() and file.name != "size"]
        assert sum(file.stat().st_size for file in files) <= cap
        found = stores[1 - turn % 2].read(name, size, 0, size)
        assert found == (data if size + 8 <= cap else None)  # what was written last is there


def test_least_recently_used_go_first(tmp_path: Path) -> None:
    store = BlockStore(tmp_path, 10 * 108)
    for number in range(10):
        store.keep(f"{number:02d}", bytes(100))
    assert store.read("00", 100, 0, 1) == b"\0"  # used again
    store.keep("10", bytes(100))
    assert [number for number in range(11) if store.holds(f"{number:02d}", 100)] == [0, *range(2, 11)]


def test_many_threads_fetch_a_block_once(server: Any, tokens: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetching, "BLOCK", 4096)
    url, ids = tokens
    array = opened(url)
    server.reads.clear()
    starts = np.random.default_rng(0).integers(0, 19_000, (8, 30))

    def read(starts: np.ndarray) -> np.ndarray:
        rows = np.empty((len(starts), 500), "<u2")
        read_rows([array] * len(starts), starts.tolist(), rows)
        return rows

    with ThreadPoolExecutor(8) as pool:
        for some, rows in zip(starts, pool.map(read, starts), strict=True):
            np.testing.assert_array_equal(rows, np.stack([ids[start : start + 500] for start in some]))
    assert len(gets(server)) == len(set(gets(server))) <= 10


def test_a_block_that_arrives_meanwhile_is_not_fetched_again(server: Any, tokens: Any, monkeypatch: Any) -> None:
    """One thread finds the block missing; before it goes on, another one fetches it completely."""
    url, _ = tokens
    block = next(opened(url)._blocks(0, 10))
    store = block_store(block.file.settings)
    for kept in store.folder.glob("??/*"):
        kept.unlink()
    server.reads.clear()
    holds, others = store.holds, []

    def slow_holds(name: str, size: int) -> bool:
        answer = holds(name, size)
        if not others:
            others.append(pool.submit(lambda: (future := fetching.request_block(block)) and future.result()))
            wait(others, timeout=0.5)  # it is done by then, unless it has to wait for this thread
        return answer

    monkeypatch.setattr(store, "holds", slow_holds)
    with ThreadPoolExecutor(1) as pool:
        future = fetching.request_block(block)
        assert future is None or future.result()
        others[0].result()
    assert len(gets(server)) == 1
