"""Names of other packages that are not their public interface, and that storage and text use: each is named here."""

from __future__ import annotations

import importlib
import sys

import datasets
import pytest

from kenotron.config.errors import InputError

NAMES = {
    "gcsfs.core.GCSFileSystem._request.__wrapped__": "storage/google.py",
    "fsspec.implementations.http.HTTPFileSystem._info": "storage/drivers.py",
    "fsspec.spec.AbstractFileSystem._strip_protocol": "storage/fsspec_storage.py, storage/hub_filesystem.py",
}


@pytest.mark.parametrize("name", NAMES)
def test_a_private_name_is_where_it_was(name: str) -> None:
    parts = name.split(".")
    module = next(".".join(parts[:n]) for n in range(len(parts), 0, -1) if _is_module(".".join(parts[:n])))
    found = importlib.import_module(module)
    for part in name.removeprefix(f"{module}.").split("."):
        assert hasattr(found, part), f"{name} has moved: {NAMES[name]} of src/kenotron uses it"
        found = getattr(found, part)


def test_rows_of_datasets_have_a_fingerprint() -> None:
    rows = datasets.Dataset.from_dict({"text": ["a"]})
    assert hasattr(rows, "_fingerprint"), "Dataset._fingerprint has moved: text/hub_datasets.py uses it"


def _is_module(name: str) -> bool:
    try:
        importlib.import_module(name)
    except ImportError:
        return False
    return True


def test_a_gcsfs_without_it_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    from gcsfs.core import GCSFileSystem

    async def request(self: object) -> None: ...

    monkeypatch.setattr(GCSFileSystem, "_request", request)
    monkeypatch.delitem(sys.modules, "kenotron.storage.google", raising=False)
    with pytest.raises(InputError, match=r"gs://: gcsfs [\d.]+ has no GCSFileSystem\._request\.__wrapped__"):
        importlib.import_module("kenotron.storage.google")
