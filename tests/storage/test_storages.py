"""A scheme may be served by a package's own storage; without a URL no driver is loaded."""

import io
from collections.abc import Iterator
from importlib.metadata import EntryPoint, EntryPoints
from pathlib import Path
from typing import IO

import fsspec
import numpy as np
import pytest
from numpy.typing import NDArray

from kenotron.data.formats import find_token_files, open_token_files
from kenotron.storage import paths
from kenotron.storage.paths import RemotePath, RemoteStat, as_path
from kenotron.text.file_documents import FileDocuments, find_files

IDS = np.arange(1000, dtype="<u2")
FILES = {"vault://texts/a.jsonl": b'{"text": "beep"}\n', "vault://texts/deep/b.txt": b"boop"}


def npy() -> bytes:
    stream = io.BytesIO()
    np.save(stream, IDS)
    return stream.getvalue()


class VaultPath(RemotePath):
    """Files in a dictionary."""

    @property
    def _data(self) -> bytes:
        return (FILES | {"vault://ids.npy": npy()})[self.url]

    def stat(self) -> RemoteStat:
        try:
            return RemoteStat(len(self._data), "1")
        except KeyError:
            raise FileNotFoundError(self.url) from None

    def is_file(self) -> bool:
        return self.url in FILES or self.url == "vault://ids.npy"

    def is_dir(self) -> bool:
        return any(url.startswith(self.url + "/") for url in FILES)

    def walk(self) -> Iterator[RemotePath]:
        return (VaultPath(url) for url in sorted(FILES) if url.startswith(self.url + "/"))

    def open(self, mode: str = "rb") -> IO[bytes]:
        return io.BytesIO(self._data)

    def map_array(self, dtype: np.dtype, offset: int, count: int, download: bool) -> NDArray:
        return np.frombuffer(self._data, dtype, count, offset)


@pytest.fixture
def vault(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A package that registers `vault`."""
    entry = EntryPoint("vault", f"{__name__}:VaultPath", paths.STORAGES)
    known = lambda **wanted: EntryPoints([entry]).select(**wanted)  # noqa: E731
    monkeypatch.setattr("kenotron.storage.paths.entry_points", known)
    monkeypatch.setattr("kenotron.config.dotted.entry_points", known)
    paths.storage_of.cache_clear()
    yield
    paths.storage_of.cache_clear()


def test_tokens_and_texts_of_a_registered_storage(vault: None) -> None:
    np.testing.assert_array_equal(open_token_files("vault://ids.npy", "PATH")[0].tokens[:], IDS)
    files = find_files("vault://texts", "text_files")
    assert [file.relative_to(as_path("vault://texts")).as_posix() for file in files] == ["a.jsonl", "deep/b.txt"]
    assert [chunk.text for chunk in FileDocuments("texts", files).documents()] == ["beep", "boop"]


def test_token_files_of_a_url_come_in_the_order_of_a_local_copy(tmp_path: Path) -> None:
    """In which ``-`` and ``.`` do not come before ``/``: samples have the same numbers there and here."""
    memory = fsspec.filesystem("memory")
    for name in ("web/0.ds", "web-2/0.ds", "web.old/1.ds", "a.ds"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(b"12")
        memory.pipe(f"/order/{name}", b"12")
    local = [str(path).removeprefix(str(tmp_path)) for path, _ in find_token_files(tmp_path, "PATH")]
    remote = [str(path).removeprefix("memory://order") for path, _ in find_token_files("memory://order", "PATH")]
    assert remote == local == ["/a.ds", "/web/0.ds", "/web-2/0.ds", "/web.old/1.ds"]
