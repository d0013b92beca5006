"""Tokenized files read from an S3 server are those on the disk."""

import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kenotron.config import InputError
from kenotron.config.remote_data import RemoteData
from kenotron.data.formats import open_token_files
from kenotron.data.sources.token_files import TokenPath, open_folder
from kenotron.storage import drivers, fetching
from kenotron.storage.paths import as_path
from support.data_runs import assert_same_runs, batches_of, run_config
from support.megatron_files import write_megatron
from support.written_tokens import write_ds

Upload = Callable[[Path, str], str]


def write_folder(folder: Path, files: int = 3, tokens: int = 5000, loss: bool = True) -> Path:
    for number in range(files):
        generator = np.random.default_rng(number)
        ids = generator.integers(0, 500, tokens)
        documents = np.split(ids, np.sort(generator.choice(tokens, tokens // 40, replace=False)))
        mask = (generator.random(tokens) < 0.9).tolist() if loss else None
        write_ds(folder / f"part {number % 2}" / f"{number}.ds", documents, loss=mask)  # type: ignore[arg-type]
    write_ds(folder / ".hidden" / "x.ds", [[1, 2, 3]])
    return folder


@pytest.mark.cases(1)
@pytest.mark.parametrize("sparse", [False, True])
def test_nanoset(tmp_path: Path, upload: Upload, monkeypatch: pytest.MonkeyPatch, sparse: bool) -> None:
    monkeypatch.setattr(fetching, "SPARSE_BLOCK" if sparse else "BLOCK", 2000)  # many windows lie across two blocks
    settings = RemoteData(cache_gb=5e-5 if sparse else 1.0)
    here = write_folder(tmp_path / "tokens")
    there = upload(here, "a/tokens")
    local = open_folder(TokenPath("dataset.dataset_folder", str(here)), 32, 512, 0)
    remote = open_folder(TokenPath("dataset.dataset_folder", there), 32, 512, 0, settings)
    names = [[file.path.name for file in folder.token_files] for folder in (remote, local)]
    assert names[0] == names[1]
    indices = np.random.default_rng(0).permutation(len(local))
    assert len(remote) == len(local) == 3 * (5000 // 33)
    found, expected = remote.read(indices), local.read(indices)
    np.testing.assert_array_equal(found.tokens, expected.tokens)
    np.testing.assert_array_equal(found.document_ids, expected.document_ids)  # type: ignore[arg-type]
    np.testing.assert_array_equal(found.loss_mask, expected.loss_mask)  # type: ignore[arg-type]
    assert remote.fingerprint == local.fingerprint
    assert remote.describe() == local.describe()


@pytest.mark.parametrize("format", ["megatron", "numpy"])
def test_other_formats(tmp_path: Path, upload: Upload, format: str) -> None:
    generator = np.random.default_rng(0)
    for number in range(2):
        (tmp_path / "f").mkdir(exist_ok=True)
        lengths = generator.integers(0, 50, 600)
        ids = generator.integers(0, 500, lengths.sum()).astype(np.uint16)
        if format == "numpy":
            np.save(tmp_path / "f" / f"{number}.npy", ids)
            continue
        write_megatron(tmp_path / "f" / str(number), np.split(ids, np.cumsum(lengths)[:-1]), "uint16")
    there = upload(tmp_path / "f", "f")
    pairs = list(zip(open_token_files(tmp_path / "f", "PATH"), open_token_files(there, "PATH"), strict=True))
    assert len(pairs) == 2
    for local, remote in pairs:
        np.testing.assert_array_equal(remote.tokens[:], local.tokens)
        np.testing.assert_array_equal(remote.tokens[-7:-2], local.tokens[-7:-2])
        assert remote.tokens[-3] == local.tokens[-3]
        assert remote.tokens.nbytes == local.tokens.nbytes
        assert (remote.ends is None) == (local.ends is None) == (format == "numpy")
        if local.ends is not None:
            np.testing.assert_array_equal(remote.ends, local.ends)  # type: ignore[arg-type]


def test_raw_and_single_file(tmp_path: Path, upload: Upload) -> None:
    ids = np.random.default_rng(0).integers(0, 500, 3000).astype("<u2")
    ids.tofile(tmp_path / "raw.bin")
    there = upload(tmp_path / "raw.bin", "raw.bin")
    np.testing.assert_array_equal(open_token_files(there, "PATH", "uint16")[0].tokens[10:2000], ids[10:2000])
    with pytest.raises(InputError, match=r"raw\.bin has no raw\.idx"):
        open_token_files(there, "PATH")
    with pytest.raises(InputError, match=r"no such file or folder: s3://robots/nothing"):
        open_token_files("s3://robots/nothing", "PATH")


def test_a_packed_run_and_its_resume(tmp_path: Path, upload: Upload) -> None:
    here = write_folder(tmp_path / "tokens")
    there = upload(here, "tokens")
    local, remote = ({"dataset_folder": path, "packing": "best_fit"} for path in (str(here), there))
    for start_step in (1, 7):
        assert_same_runs(local, remote, start_step, data__num_loading_workers=2)


def test_local_copy_is_read(tmp_path: Path, upload: Upload, server: Any) -> None:
    here = write_folder(tmp_path / "tokens", loss=False)
    wanted = TokenPath("dataset.dataset_folder", upload(here, "tokens"), read_path=str(here))
    folder = open_folder(wanted, 32, 512, 0)
    server.reads.clear()
    folder.read(np.arange(len(folder)))
    assert not server.reads
    with pytest.raises(InputError, match="expected a folder on this machine"):
        open_folder(TokenPath("dataset.dataset_folder", wanted.path, read_path=wanted.path), 32, 512, 0)


@pytest.mark.parametrize(
    ("url", "module", "extra"),
    [
        ("s3://bucket/x", "s3fs", "s3"),
        ("gs://bucket/x", "gcsfs.core", "gcs"),
        ("https://host/x", "fsspec.implementations.http", "http"),
    ],
)
def test_a_missing_driver_names_its_extra(url: str, module: str, extra: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, module, None)  # importing it fails
    monkeypatch.delitem(sys.modules, "kenotron.storage.google", raising=False)  # which imports gcsfs
    protocol = url.partition("://")[0]
    known = import_module("fsspec.registry")._registry
    monkeypatch.delitem(known, protocol, raising=False)  # it may be imported already
    drivers.reset()
    with pytest.raises(
        InputError, match=rf"^{protocol}://: its driver is not installed: pip install 'kenotron\[{extra}\]'$"
    ):
        as_path(url)


def test_cache_folder_and_cap(tmp_path: Path, upload: Upload, own_cache: Path) -> None:
    here = write_folder(tmp_path / "tokens", loss=False)
    settings = RemoteData(cache_folder=str(tmp_path / "elsewhere"), cache_gb=3e-5)
    config = run_config({"tokens": {upload(here, "tokens"): 1}}).model_copy(update={"remote_data": settings})
    assert len(batches_of(config)) > 24
    sizes = [file.stat().st_size for file in (tmp_path / "elsewhere").rglob("*") if file.is_file()]
    assert 1000 < sum(sizes) <= 3e4
    assert not own_cache.exists()
    with pytest.raises(InputError, match=r"remote_data\.cache_gb: 1e-06 GB cannot hold s3://.*\.ds\.index"):
        open_folder(TokenPath("dataset.tokens", "s3://robots/tokens"), 32, 512, 0, RemoteData(cache_gb=1e-6))
