"""A package can register a reader for files of rows of its own form."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib.metadata import EntryPoint, EntryPoints
from pathlib import Path

import pytest

from kenotron.text import documents
from kenotron.text.documents import RowDocument, RowHook
from kenotron.text.file_documents import FileDocuments, find_files


class TabReader:
    """Lines `id<TAB>text`; a range counts lines."""

    def ranges(self, file: Path, whole: int, size: int) -> Iterator[tuple[int, int | None, int]]:
        count = len(file.read_text().splitlines())
        for line in range(count):
            yield line, line + 1, whole // count

    def start_of(self, file: Path, row: int) -> int:
        return row

    def read(
        self,
        file: Path,
        column: str,
        start: int,
        stop: int | None,
        hook: RowHook | None,
        bad: Callable[[str], None],
    ) -> Iterator[RowDocument]:
        lines = file.read_text().splitlines()
        for row, line in list(enumerate(lines))[start:stop]:
            yield RowDocument(line.split("\t")[1], row, row / len(lines))


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    entry = EntryPoint("tsv", f"{__name__}:TabReader", documents.ROW_READERS)
    known = lambda **wanted: EntryPoints([entry]).select(**wanted)  # noqa: E731
    monkeypatch.setattr("kenotron.text.documents.entry_points", known)
    monkeypatch.setattr("kenotron.config.dotted.entry_points", known)
    documents.row_reader.cache_clear()
    documents.row_suffixes.cache_clear()
    yield
    documents.row_reader.cache_clear()
    documents.row_suffixes.cache_clear()


def test_its_files_are_found_and_read(registered: None, tmp_path: Path) -> None:
    (tmp_path / "a.tsv").write_text("1\tbeep\n2\tboop\n3\tblip\n")
    (tmp_path / "notes.log").write_text("not text")
    files = find_files(tmp_path, "text_files")
    assert [file.name for file in files] == ["a.tsv"]
    texts = FileDocuments("robots", files)
    assert [chunk.text for chunk in texts.documents()] == ["beep", "boop", "blip"]
    assert [chunk.text for some in texts.byte_ranges(5) for chunk in texts.read(some)] == ["beep", "boop", "blip"]
    first = next(texts.chunks_from(0, 0))
    assert [chunk.text for chunk in texts.chunks_from(0, first.done)] == ["boop", "blip"]
