"""gs://: files read through gcsfs from a server that speaks Google's JSON API."""

import importlib
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_remote_failures import failing, opened
from test_remote_tokens import write_folder

from kenotron.config import InputError
from kenotron.data.formats import open_token_files
from kenotron.storage import drivers, fetching
from kenotron.storage.fsspec_storage import BlockArray
from kenotron.storage.paths import as_path
from support.data_runs import assert_same_runs

Upload = Callable[[Path, str], str]


@pytest.fixture
def tokens(tmp_path: Path, google_upload: Upload) -> tuple[str, np.ndarray]:
    ids = np.random.default_rng(0).integers(0, 500, 20_000).astype("<u2")
    np.save(tmp_path / "ids.npy", ids)
    return google_upload(tmp_path / "ids.npy", "a folder/ids.npy"), ids


def test_a_run_equals_that_of_the_files_here(tmp_path: Path, google_upload: Upload) -> None:
    here = write_folder(tmp_path / "tokens")
    there = google_upload(here, "tokens")
    assert_same_runs({"dataset_folder": str(here)}, {"dataset_folder": there}, data__num_loading_workers=2)


def test_failures_are_tried_again_then_named(google: Any, tokens: Any, monkeypatch: Any, capfd: Any) -> None:
    monkeypatch.setattr(fetching, "BLOCK", 10_000)
    url, ids = tokens
    google.breaks = failing(2, 503)
    array = opened(url, tries=3)
    np.testing.assert_array_equal(array[:4000], ids[:4000])
    google.breaks = failing(10**6, 503)
    google.reads.clear()
    with pytest.raises(InputError, match=r"ids\.npy, bytes 30000-39999: cannot be read, tried 3 times \(HttpError"):
        array[15_000:15_010]
    assert [read.split()[-1] for read in google.reads if "bytes=" in read] == ["bytes=30000-39999"] * 3
    assert "Traceback" not in capfd.readouterr().err


@pytest.mark.parametrize(
    ("status", "message"),
    [(401, "Anonymous caller does not have storage.objects.get access"), (403, "robot has no access")],
)
def test_who_may_not_read_is_told_at_once(google: Any, status: int, message: str) -> None:
    body = f'{{"error": {{"code": {status}, "message": "{message}"}}}}'.encode()
    google.breaks = lambda handler: handler.answer(status, body)
    with pytest.raises(InputError) as told:
        open_token_files("gs://robots/private", "PATH")
    access = "access comes from `gcloud auth application-default login`, or GOOGLE_APPLICATION_CREDENTIALS"
    expected = rf"gs://robots/private: cannot be read \(PermissionError: .*{message}.*; {access}"
    assert re.fullmatch(expected, str(told.value))
    assert len(google.reads) == len(set(google.reads))  # the object, and what lies below


def test_what_is_not_there(google: Any) -> None:
    for url in ("gs://robots/nothing", "gs://nobodys/x"):
        with pytest.raises(InputError, match=f"no such file or folder: {url}"):
            open_token_files(url, "PATH")
    with pytest.raises(InputError, match="expected a path after gs://"):
        as_path("gs://")


def test_a_changed_file_is_an_error(tmp_path: Path, tokens: Any, google_upload: Upload, monkeypatch: Any) -> None:
    monkeypatch.setattr(fetching, "BLOCK", 10_000)
    url, ids = tokens
    array = opened(url)
    assert isinstance(array, BlockArray)
    assert drivers.filesystem(url).info(url)["generation"] == array.file.version
    np.save(tmp_path / "ids.npy", ids + 1)
    google_upload(tmp_path / "ids.npy", "a folder/ids.npy")
    with pytest.raises(InputError, match=r"ids\.npy: the file has changed since it was opened"):
        array[15_000:15_010]
    np.testing.assert_array_equal(opened(url)[:], ids + 1)


def test_a_gcsfs_without_it_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    from gcsfs.core import GCSFileSystem

    async def request(self: object) -> None: ...

    monkeypatch.setattr(GCSFileSystem, "_request", request)
    monkeypatch.delitem(sys.modules, "kenotron.storage.google", raising=False)
    with pytest.raises(InputError, match=r"gs://: gcsfs [\d.]+ has no GCSFileSystem\._request\.__wrapped__"):
        importlib.import_module("kenotron.storage.google")
