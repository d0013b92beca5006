"""What datatrove itself writes is read, and what is written here datatrove reads: token for token, byte for byte."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kenotron.data.formats import open_token_files
from kenotron.data.formats.datatrove import TokenWriter
from kenotron.data.sources.token_folder import TokenFolder

random = np.random.default_rng(0)


@pytest.fixture(params=[2, 4])
def documents(request: pytest.FixtureRequest) -> tuple[int, list[list[int]]]:
    limit = 65536 if request.param == 2 else 1 << 18
    return request.param, [random.integers(0, limit, size).tolist() for size in (5, 1, 700, 33, 260)]


def datatrove_file(folder: Path, size: int, docs: list[list[int]], tokenizer: str | None = "gpt2", name: str = "x.ds"):
    tokenizer_module = pytest.importorskip("datatrove.pipeline.tokens.tokenizer")
    file = tokenizer_module.TokenizedFile(
        str(folder), name, save_loss_metadata=True, tokenizer_name_or_path=tokenizer, save_final_metadata=True,
        token_size=size,
    )  # fmt: skip
    for doc in docs:
        file.write(doc, np.array(doc) % 3 != 0)
    file.close()
    return file


def test_what_datatrove_writes_is_read_and_written_so(tmp_path: Path, documents: tuple[int, list[list[int]]]) -> None:
    size, docs = documents
    (tmp_path / "theirs").mkdir()
    datatrove_file(tmp_path / "theirs", size, docs)
    (file,) = open_token_files(tmp_path / "theirs", "PATH")
    flat = np.concatenate(docs)
    assert (file.tokens.itemsize, file.tokenizer) == (size, "gpt2")
    for found, expected in (
        (file.tokens, flat),
        (file.ends, np.cumsum([len(doc) for doc in docs])),
        (file.loss, flat % 3 != 0),
    ):
        assert np.array_equal(found, expected)  # type: ignore[arg-type]
    with TokenWriter(tmp_path / "ours" / "x.ds", file.tokens.dtype, "gpt2") as writer:
        writer.write(flat, np.array([len(doc) for doc in docs]), flat % 3 != 0)
    for suffix in ("", ".index", ".loss", ".metadata"):
        theirs = (tmp_path / "theirs" / f"x.ds{suffix}").read_bytes()
        assert (tmp_path / "ours" / f"x.ds{suffix}").read_bytes() == theirs


@pytest.mark.parametrize("count", [0, 1, 999, 12345, 999_999])
def test_the_metadata_is_datatroves(tmp_path: Path, count: int) -> None:
    """The name that datatrove gives a tokenizer it does not know has a bar of its own."""
    for folder in ("theirs", "ours"):
        (tmp_path / folder).mkdir()
    datatrove_file(tmp_path / "theirs", 2, [[1] * count], tokenizer=None)
    with TokenWriter(tmp_path / "ours" / "x.ds", np.dtype("uint16")) as writer:
        writer.write(np.ones(count, int), np.array([count]))
    theirs = (tmp_path / "theirs" / "x.ds.metadata").read_text()
    assert (tmp_path / "ours" / "x.ds.metadata").read_text() == theirs
    assert open_token_files(tmp_path / "theirs", "PATH")[0].tokenizer is None


@pytest.mark.parametrize("length", [7, 64, 1000])
def test_samples_are_those_of_datatroves_own_dataset(tmp_path: Path, documents: Any, length: int) -> None:
    dataset_module = pytest.importorskip("datatrove.utils.dataset")
    size, docs = documents
    for name, part in (("b", docs), ("a", docs[2:])):
        datatrove_file(tmp_path, size, part, name=f"{name}.ds")
    theirs = dataset_module.DatatroveFolderDataset(str(tmp_path), length, filename_pattern="*.ds", token_size=size)
    ours = TokenFolder("PATH", open_token_files(tmp_path, "PATH"), length, 1 << 18)
    assert len(ours) == len(theirs)
    samples = ours.read(np.arange(len(ours))).tokens.tolist()
    assert samples == [theirs[i]["input_ids"].tolist() for i in range(len(theirs))]
    assert samples or length == 1000
