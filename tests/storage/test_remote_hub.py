"""hf://: files of repositories of the Hugging Face hub, read from a server with its answers."""

import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import numpy as np
import pytest
from huggingface_hub import constants
from test_remote_failures import failing, opened, waits_of
from test_remote_tokens import write_folder

from kenotron.checkpoint.hf_files import INDEX, SINGLE, locate
from kenotron.config import InputError
from kenotron.config.remote_data import RemoteData
from kenotron.data.formats import open_token_files
from kenotron.storage import drivers, fetching
from kenotron.storage.hub import OFFLINE_VARIABLES
from kenotron.storage.paths import RemotePath, as_path
from support.data_runs import assert_same_runs
from support.hub_server import Hub
from support.written_tokens import write_ds

Push = Callable[[Path, str], str]


@pytest.fixture(scope="module")
def _server() -> Iterator[Hub]:
    with Hub() as made:
        yield made


@pytest.fixture
def hub(_server: Hub, monkeypatch: pytest.MonkeyPatch) -> Hub:
    template = constants.HUGGINGFACE_CO_URL_TEMPLATE.replace(constants.ENDPOINT, _server.url)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr(constants, "ENDPOINT", _server.url)  # which HF_ENDPOINT sets, before the import
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", "/nowhere")
    for name in (*OFFLINE_VARIABLES, "HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HTTP_PROXY", "http_proxy"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    drivers.reset()
    _server.repositories.clear()
    _server.tokens.clear()
    _server.mend()
    return _server


@pytest.fixture
def push(hub: Hub) -> Push:
    """Puts a folder into a repository; returns the URL."""

    def put(folder: Path, name: str) -> str:
        files = {p.relative_to(folder).as_posix(): p.read_bytes() for p in folder.rglob("*") if p.is_file()}
        hub.push("stas/robots", {f"{name}/{path}": data for path, data in files.items()})
        return f"hf://datasets/stas/robots/{name}"

    return put


@pytest.fixture
def tokens(tmp_path: Path, push: Push) -> tuple[str, np.ndarray]:
    ids = np.random.default_rng(0).integers(0, 500, 20_000).astype("<u2")
    (tmp_path / "f").mkdir()
    np.save(tmp_path / "f" / "ids.npy", ids)
    return f"{push(tmp_path / 'f', 'a folder')}/ids.npy", ids


@pytest.mark.parametrize("revision", ["", "@a commit"])
def test_a_run_equals_that_of_the_files_here(tmp_path: Path, push: Push, hub: Hub, revision: str) -> None:
    here = write_folder(tmp_path / "tokens")
    url = push(here, "tokens")
    if revision == "@a commit":
        revision = "@" + hub.push("stas/robots", {"README.md": b"tokens"})
        hub.push("stas/robots", {"tokens/part 0/0.ds": b"\1\0" * 5000})  # later: not what is asked for
    url = url.replace("robots", f"robots{revision}")
    assert_same_runs({"dataset_folder": str(here)}, {"dataset_folder": url}, data__num_loading_workers=2)


@pytest.mark.parametrize("file", ["ids.npy", "ids.txt"])  # a large one, and one that the hub itself holds
def test_a_revision_that_moves_is_an_error(hub: Hub, file: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetching, "BLOCK", 10_000)
    old, new = b"a" * 30_000, b"b" * 30_000
    commit = hub.push("stas/robots", {file: old})
    url = f"hf://datasets/stas/robots/{file}"
    with as_path(url).open() as moving, as_path(url.replace("robots", f"robots@{commit}")).open() as pinned:
        assert moving.read(100) == pinned.read(100) == old[:100]
        hub.push("stas/robots", {"README.md": b"another file"})
        moving.seek(11_000)
        assert moving.read(100) == old[:100]
        hub.push("stas/robots", {file: new})
        moving.seek(21_000)
        with pytest.raises(InputError, match=f"^{url}: the file has changed since it was opened$"):
            moving.read(100)
        pinned.seek(21_000)
        assert pinned.read(100) == old[:100]
    with as_path(url).open() as again:
        assert again.read() == new
        hub.repositories["stas/robots"]["main"].pop(file)
        with pytest.raises(InputError, match=f"no such file or folder: {url}"):
            open_token_files(url, "PATH")


def test_the_hub_may_ask_to_be_waited_for(hub: Hub, tokens: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    url, ids = tokens
    slept = waits_of(monkeypatch)
    hub.breaks = failing(1, 429, headers={"Retry-After": "7"})
    np.testing.assert_array_equal(opened(url)[:], ids)
    assert slept == [7.0]


@pytest.mark.parametrize("stalls", ["/tree/", "/resolve/"])
def test_a_silent_hub_is_named(tmp_path: Path, hub: Hub, push: Push, stalls: str, monkeypatch: Any) -> None:
    write_ds(tmp_path / "f" / "0.ds", [range(5)], tokenizer=None)
    url = push(tmp_path / "f", "tokens")
    monkeypatch.setattr("kenotron.storage.hub_filesystem.TIMEOUT", 0.2)
    mended = threading.Event()
    asked: SimpleQueue[str] = SimpleQueue()

    def stalling(handler: Any) -> bool:
        if stalls in handler.path:
            asked.put(handler.path)
            mended.wait(20)
        return False

    hub.breaks = stalling
    with pytest.raises(InputError, match=rf"^{url}: cannot be read, tried 2 times \(ReadTimeout: "):
        open_token_files(as_path(url, RemoteData(tries=2)), "PATH")
    mended.set()
    for _ in range(2):
        asked.get(timeout=20)  # on a busy machine a request may be handled after the client has given it up
    assert asked.empty()
    assert len(open_token_files(url, "PATH")) == 1


def test_a_listing_in_pages_is_read_to_its_end(hub: Hub) -> None:
    files = {f"a folder/{number}.txt": b"x" * number for number in range(1, 8)}
    hub.push("stas/robots", files | {"a folder too/no.txt": b"x"})
    hub.page = 3
    folder = as_path("hf://datasets/stas/robots/a folder")
    assert isinstance(folder, RemotePath)
    found = {file.name: file.stat().st_size for file in folder.walk()}
    assert found == {f"{number}.txt": number for number in range(1, 8)}
    listings = [read.split("?")[0] for read in hub.reads if "/tree/" in read]
    assert listings == ["GET /api/datasets/stas/robots/tree/main/a%20folder"] * 3


def test_what_is_not_there_or_not_for_us(hub: Hub, tokens: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    url, ids = tokens
    with pytest.raises(InputError, match=r"^PATH: no such file or folder: hf://datasets/stas/robots/nothing$"):
        open_token_files("hf://datasets/stas/robots/nothing", "PATH")
    with pytest.raises(InputError, match=r"^hf://datasets/stas/robots@old/a folder: its repository has no such"):
        open_token_files("hf://datasets/stas/robots@old/a folder", "PATH")
    gone = (
        "no such repository on the Hugging Face hub, or no access to it .access comes from `hf auth login`, or HF_TOK"
    )
    with pytest.raises(InputError, match=f"^hf://datasets/stas/gone/x: {gone}"):
        open_token_files("hf://datasets/stas/gone/x", "PATH")
    hub.tokens["stas/robots"] = "hf_secret"
    drivers.reset()
    with pytest.raises(InputError, match=f"^{url}: {gone}"):
        open_token_files(url, "PATH")
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    np.testing.assert_array_equal(opened(url)[:], ids)


@pytest.mark.parametrize("variable", OFFLINE_VARIABLES)
def test_without_network_it_is_said_at_once(hub: Hub, tokens: Any, variable: str, monkeypatch: Any) -> None:
    monkeypatch.setenv(variable, "1")
    with pytest.raises(InputError, match=f"^{tokens[0]}: {variable}=1 forbids access to the Hugging Face hub$"):
        open_token_files(tokens[0], "PATH")


def test_a_model_with_an_index_and_another_file_is_refused(hub: Hub, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    index = json.dumps({"weight_map": {"w": "model-00001-of-00001.safetensors"}}).encode()
    files = {"config.json": b"{}", INDEX: index, "model-00001-of-00001.safetensors": b"new"}
    hub.push("o/one", files)
    assert {file.name for file in locate("o/one").iterdir()} == set(files)
    hub.push("o/two", {**files, SINGLE: b"old"})
    with pytest.raises(InputError, match=f"repository 'o/two' has both {SINGLE} and {INDEX}"):
        locate("o/two")
