"""From an S3 server: texts, commands, and how early blocks are asked for."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet
from test_remote_tokens import write_folder

from kenotron.data import open_run
from kenotron.data.formats import open_token_files
from kenotron.data.run import AHEAD
from kenotron.storage import fsspec_storage
from kenotron.storage.fetching import CachedBlock
from kenotron.text.file_documents import FileDocuments, find_files
from support.data_runs import run_config
from support.tiny_run import Shell

Upload = Callable[[Path, str], str]


def write_texts(folder: Path) -> Path:
    import gzip

    rows = [{"text": f"robot {i} says {'beep ' * (i % 7)}", "n": i} for i in range(300)]
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    (folder / "deep").mkdir(parents=True)
    (folder / "a.jsonl").write_text(lines)
    (folder / "deep" / "b.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
    (folder / "c.txt").write_text("line of a book\n\n" * 2000)
    parquet.write_table(pa.Table.from_pylist(rows), folder / "d.parquet", row_group_size=50)
    table = pa.table({"text": ["x", "y"]})
    with pa.OSFile(str(folder / "e.arrow"), "wb") as sink, pa.ipc.new_stream(sink, table.schema) as stream:
        stream.write_table(table)
    (folder / ".hidden").mkdir()
    (folder / ".hidden" / "no.txt").write_text("no")
    return folder


def test_texts(tmp_path: Path, upload: Upload) -> None:
    here = write_texts(tmp_path / "texts")
    url = upload(here, "texts")
    local = FileDocuments("t", find_files(here, "key"))
    remote = FileDocuments("t", find_files(url, "key"))
    assert [str(f).removeprefix(url) for f in remote.files] == [str(f).removeprefix(str(here)) for f in local.files]
    assert list(remote.documents()) == list(local.documents())
    assert list(remote.byte_ranges(3000)) == list(local.byte_ranges(3000))
    for byte_range in local.byte_ranges(3000):
        assert list(remote.read(byte_range)) == list(local.read(byte_range))
    assert remote.content_hash() == local.content_hash()
    assert remote.signature() == FileDocuments("t", find_files(url, "key")).signature() is not None


@pytest.mark.slow
def test_commands(tmp_path: Path, upload: Upload, shell: Shell) -> None:
    def run(*arguments: str | Path) -> str:
        code, said, _ = shell("data", *arguments)
        assert code == 0
        return said

    here = write_texts(tmp_path / "texts")
    url = upload(here, "texts")
    run("train-tokenizer", here / "a.jsonl", "--vocab-size", "300", "--output", tmp_path / "tok")
    for name, path in (("local", str(here)), ("remote", url)):
        shards = ["--shard-size", "0.01", "--workers", "2"]
        run("tokenize", path, "--tokenizer", tmp_path / "tok", "--output", tmp_path / name, *shards)
    files = sorted(path.name for path in (tmp_path / "local").glob("*.ds"))
    assert len(files) > 3
    for file in files:
        assert (tmp_path / "remote" / file).read_bytes() == (tmp_path / "local" / file).read_bytes()
    tokens = upload(tmp_path / "local", "tokens")
    told = json.loads(run("inspect", tokens, "--json"))
    assert told | {"path": ""} == json.loads(run("inspect", str(tmp_path / "local"), "--json")) | {"path": ""}
    run("merge", tokens, "--output", tmp_path / "all.ds")
    parts = [open_token_files(tmp_path / "local" / file, "PATH")[0].tokens for file in files]
    found = open_token_files(tmp_path / "all.ds", "PATH")[0].tokens
    np.testing.assert_array_equal(found, np.concatenate(parts))
    assert len(found) == told["tokens"]


@pytest.mark.parametrize("packing", ["windows", pytest.param("best_fit", marks=pytest.mark.slow)])
def test_blocks_are_asked_for_ahead(tmp_path: Path, upload: Upload, monkeypatch: Any, packing: str) -> None:
    monkeypatch.setattr("kenotron.storage.fetching.BLOCK", 256)  # of one sample's size
    url = upload(write_folder(tmp_path / "tokens", 2, tokens=10_000), "tokens")  # with masks
    config = run_config({"tokens": url, "packing": packing}, train_steps=24, val_check_interval=-1)
    asked: dict[str, int] = {}
    leads: dict[int, list[int]] = {}
    with open_run(config, report=lambda line: None) as data, monkeypatch.context() as watched:
        fetch_ahead, ask = data._fetch_ahead, fsspec_storage.request_block
        now: list[int] = []

        def fetch_for(step: int, *rest: int) -> None:
            now[:] = [step]
            leads[step] = []
            fetch_ahead(step, *rest)
            now.append(step)

        def asking(block: CachedBlock) -> Any:
            lead = now[0] - asked.setdefault(block.name, now[0])
            if len(now) > 1:  # it is being read
                leads[now[0]].append(lead)
            return ask(block)

        watched.setattr(data, "_fetch_ahead", fetch_for)
        watched.setattr(fsspec_storage, "request_block", asking)
        with data.loader(1) as loader:
            steps = list(loader)
    assert len(steps) == 24
    assert all(leads.values())
    assert min(lead for step in range(AHEAD, 25) for lead in leads[step]) == AHEAD - 1
