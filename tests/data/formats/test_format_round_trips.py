"""Random documents through the writer and its reader, and from other formats into it."""

from itertools import chain
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kenotron.config.errors import InputError
from kenotron.data.formats import open_token_files
from kenotron.data.formats.datatrove import TokenWriter
from kenotron.data.formats.token_file import document_blocks, documents_between
from kenotron.prepare.merge import merge
from support.megatron_files import write_megatron

documents = st.lists(st.lists(st.integers(0, 65535), max_size=9), max_size=8)


def flat(docs: list[list[int]]) -> tuple[np.ndarray, np.ndarray]:
    return np.array(list(chain(*docs)), dtype=np.int64), np.array([len(d) for d in docs], dtype=np.int64)


@given(batches=st.lists(st.tuples(documents, st.booleans()), max_size=4), seed=st.integers(0, 99))
def test_a_loss_mask_may_begin_late_and_pause(batches: list[tuple[list[list[int]], bool]], seed: int) -> None:
    random = np.random.default_rng(seed)
    expected: list[np.ndarray] = []
    with TemporaryDirectory() as folder:
        with TokenWriter(Path(folder) / "a.ds", np.dtype("uint16")) as writer:
            for batch, masked in batches:
                ids, lengths = flat(batch)
                loss = random.random(len(ids)) < 0.5 if masked else None
                writer.write(ids, lengths, loss)
                expected.append(np.ones(len(ids), bool) if loss is None else loss)
        (file,) = open_token_files(folder, "PATH")
        masked = any(masked for _, masked in batches)
        assert np.array_equal(file.loss, np.concatenate(expected)) if masked else file.loss is None


@pytest.mark.parametrize("dtype", ["uint16", "int64"])
@given(docs=documents.filter(len))
def test_another_format_keeps_ids_and_documents(dtype: str, docs: list) -> None:
    with TemporaryDirectory() as folder:
        root = Path(folder)
        for name in ("a", "b/c"):
            (root / "src" / name).parent.mkdir(parents=True, exist_ok=True)
            write_megatron(root / "src" / name, docs, dtype)
        merge([str(root / "src")], root / "dst")
        (file,) = open_token_files(root / "dst", "B")
        expected = "uint16" if dtype == "uint16" else "uint32"
        assert (file.format, file.tokens.dtype) == ("datatrove", np.dtype(expected))
        ids, lengths = flat([*docs, *docs])
        assert np.array_equal(file.tokens, ids)
        assert np.array_equal(file.ends, np.cumsum(lengths))  # type: ignore[arg-type]


@given(docs=documents, length=st.integers(0, 70), size=st.integers(1, 9))
def test_documents_between_and_blocks_by_a_plain_loop(docs: list, length: int, size: int) -> None:
    with TemporaryDirectory() as folder:
        with TokenWriter(Path(folder) / "a.ds", np.dtype("uint16")) as writer:
            writer.write(*flat(docs))
        (file,) = open_token_files(folder, "PATH")
        ends = np.cumsum([len(d) for d in docs]).tolist()
        for start in range(len(file.tokens) + 2):
            stop = start + length
            assert documents_between(file, start, stop).tolist() == [end for end in ends if start < end <= stop]
        blocks = list(document_blocks(file, size))
        assert [length for _, lengths in blocks for length in lengths.tolist()] == [len(d) for d in docs]
        assert [start for start, _ in blocks] == [0, *ends[size - 1 : -1 : size]][: len(blocks)]


@pytest.mark.parametrize(("last", "message"), [(65536, "token 2 is 65536, beyond uint16"), (-1, "token 2 is negative")])
def test_an_error_in_the_block_leaves_nothing_behind(tmp_path: Path, last: int, message: str) -> None:
    def work() -> None:
        with TokenWriter(tmp_path / "a.ds", np.dtype("uint16")) as writer:
            writer.write(*flat([[1, 2]]))
            writer.write(*flat([[last, 2]]))

    with pytest.raises(InputError, match=message):
        work()
    assert list(tmp_path.iterdir()) == []
