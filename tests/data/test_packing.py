"""Best-fit packing: the bins of a plain search, every token once, no document cut that fits."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kenotron.config.errors import InputError
from kenotron.data import NO_LOSS, open_run
from kenotron.data.formats import TokenFile
from kenotron.data.provenance import step_origins
from kenotron.data.sources import packed_rows as packing
from kenotron.data.sources.packed_rows import best_fit_decreasing, open_plan, pack
from support.data_runs import quiet, run_config
from support.written_tokens import counting, write_ds

L = 8
LENGTHS = (5, 30, 1, 12, 40, 7, 9, 25, 2, 3, 8, 8, 4)


def naive_bins(lengths: list[int], capacity: int) -> list[int]:
    """Every open bin is looked at for every item; of equal rooms the one that changed last wins."""
    rooms: list[int] = []
    changed: list[int] = []
    found = [0] * len(lengths)
    for clock, item in enumerate(sorted(range(len(lengths)), key=lambda i: -lengths[i])):
        fitting = [b for b, room in enumerate(rooms) if room >= lengths[item]]
        if not fitting:
            rooms.append(capacity)
            changed.append(clock)
            fitting = [len(rooms) - 1]
        best = min(fitting, key=lambda b: (rooms[b], -changed[b]))
        rooms[best] -= lengths[item]
        changed[best] = clock
        found[item] = best
    return found


@given(st.integers(1, 30).flatmap(lambda c: st.tuples(st.just(c), st.lists(st.integers(1, c), max_size=80))))
def test_bins_are_those_of_a_plain_search(drawn: tuple[int, list[int]]) -> None:
    capacity, lengths = drawn
    assert best_fit_decreasing(np.array(lengths, dtype=np.int64), capacity).tolist() == naive_bins(lengths, capacity)


@example(4, [1, 6])
@given(st.integers(1, 12), st.lists(st.integers(0, 40), max_size=40))
def test_every_token_is_in_one_row_and_only_long_documents_are_cut(length: int, lengths: list[int]) -> None:
    sizes = np.array(lengths, dtype=np.int64)
    ends = np.cumsum(sizes)
    starts, pieces, rows = pack(ends - sizes, sizes, length)
    assert rows.sum() == len(starts)
    borders = np.cumsum(rows) - rows
    if len(rows):
        assert np.add.reduceat(pieces, borders).max() <= length + 1
    held = sorted(zip(starts.tolist(), pieces.tolist()))
    labels = sorted(start + place for start, size in held for place in range(1, size))
    expected = []
    for end, size in zip(ends.tolist(), lengths):
        own = [(start, each) for start, each in held if end - size <= start < end]
        expected += range(end - size + 1, end)  # all but the first token of a document are a label, once
        assert len(own) == (1 if 0 < size <= length + 1 else len(own))
        assert set(range(end - size, end)) == {t for start, each in own for t in range(start, start + each)}
        assert all(each == length + 1 for _, each in own[:-1])
    assert labels == expected


def test_rows_of_realistic_lengths_are_full_and_mixed_throughout() -> None:
    generator = np.random.default_rng(0)
    sizes = np.minimum(np.exp(generator.normal(6, 1.1, 100_000)).astype(np.int64) + 1, 100_000)
    _, pieces, rows = pack(np.cumsum(sizes) - sizes, sizes, 2048)
    assert pieces.sum() / (len(rows) * 2049) > 0.999
    tenth = len(rows) // 10  # the first rows, which a cap leaves, are of no other lengths than the last
    assert rows[-tenth:].mean() == pytest.approx(rows[:tenth].mean(), rel=0.1)


def test_documents_are_packed_some_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """In blocks of four, across the border of two files: the same as each four packed alone."""
    monkeypatch.setattr(packing, "AT_ONCE", 4)
    sizes = np.array(LENGTHS, dtype=np.int64)
    ends = np.cumsum(sizes)
    parts = [split(sizes[:5]), split(sizes[5:])]
    plan = open_plan("two files", parts, L, quiet)
    alone = [pack((ends - sizes)[at : at + 4], sizes[at : at + 4], L) for at in range(0, len(sizes), 4)]
    assert np.array_equal(plan.starts, np.concatenate([starts for starts, _, _ in alone]))
    assert np.array_equal(plan.lengths, np.concatenate([lengths for _, lengths, _ in alone]))
    assert np.array_equal(np.diff(plan.first), np.concatenate([rows for _, _, rows in alone]))
    assert (plan.documents, plan.cut, plan.tokens) == (13, 4, plan.lengths.sum())
    rows = sum(len(rows) for _, _, rows in alone)
    filled = plan.lengths.sum() / (rows * (L + 1))
    assert plan.describe(L) == f"packed best-fit: {filled:.1%} filled, 4 of 13 documents cut"


def split(sizes: Any, first: int = 0) -> TokenFile:
    tokens = np.arange(first, first + sum(sizes), dtype=np.uint16)
    return TokenFile(Path("part"), "numpy", tokens, np.cumsum(sizes).astype(np.uint64))


def test_a_plan_is_kept_and_made_anew_for_other_documents(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KENOTRON_CACHE", str(tmp_path))

    def plans() -> set[tuple[str, int]]:
        return {(file.parent.name, file.stat().st_mtime_ns) for file in tmp_path.rglob("meta.json")}

    first, made = open_plan("a", [split(LENGTHS)], L, quiet), plans()
    again = open_plan("b", [split(LENGTHS)], L, quiet)
    assert (plans(), len(made)) == (made, 1)
    assert np.array_equal(first.starts, again.starts)
    open_plan("c", [split(LENGTHS[::-1])], L, quiet)
    open_plan("d", [split(LENGTHS)], L + 1, quiet)
    assert len(plans()) == 3


def test_ends_out_of_order_are_one_line() -> None:
    wrong = TokenFile(Path("wrong"), "numpy", np.arange(9, dtype=np.uint16), np.array([3, 9, 5], dtype=np.uint64))
    with pytest.raises(InputError, match="wrong: its index of documents is not sorted: entry 2 is 5"):
        open_plan("twisted", [wrong], L, quiet)


# ---- in a run ----------------------------------------------------------------------------------------------


def config_of(dataset: Any, **changes: Any) -> Any:
    return run_config(dataset, sequence_length=L, arch__vocab_size=4096, **changes)


@pytest.fixture
def folder(tmp_path: Path) -> str:
    write_ds(tmp_path / "a" / "0.ds", counting(0, LENGTHS), loss=[token % 5 > 0 for token in range(sum(LENGTHS))])
    write_ds(tmp_path / "a" / "1.ds", counting(1000, LENGTHS[::-1]))
    return str(tmp_path / "a")


@pytest.mark.parametrize("key", ["tokens", "dataset_folder"])
def test_token_files_train_on_packed_rows_and_hold_out_what_windows_do(folder: str, key: str) -> None:
    dataset = {key: folder, "packing": "best_fit"}
    values = {"model__document_masking": True, "val_fraction": 0.25}
    with open_run(config_of({key: folder}, **values), 1, quiet) as data:
        held = [batch.labels.tolist() for batch, *_ in data.validation()]
        windows = data.fingerprints()[folder]
        count = len(data.stage_of(1).sources[0])
    with open_run(config_of(dataset, **values), 1, quiet) as data:
        (source,) = data.stage_of(1).sources
        assert "packed best-fit: " in source.describe()
        assert [batch.labels.tolist() for batch, *_ in data.validation()] == held
        assert data.fingerprints()[folder] != windows
        batches = [data.stage_of(1).read(np.arange(len(source)), np.arange(len(source)), True)]
    for batch in batches:
        real = batch.labels != NO_LOSS
        assert (batch.labels[real] == batch.tokens[real] + 1).all()  # never from one document to the next
    seen = {label for b in batches for label in b.labels[b.labels != NO_LOSS].tolist()}
    size = sum(LENGTHS)
    border = 1000 + (count - size // (L + 1)) * (L + 1)  # all windows of 0.ds, the others of 1.ds
    firsts = {0, 1000, *np.cumsum(LENGTHS[:-1]), *(1000 + np.cumsum(LENGTHS[:0:-1]))}
    every = {*(t for t in range(size) if t % 5), *range(1000, border)}  # the .loss of 0.ds
    assert seen == every - firsts


def test_what_packed_steps_read_is_reported(folder: str) -> None:
    dataset = {"tokens": folder, "packing": "best_fit"}
    with open_run(config_of(dataset, val_fraction=0.2, model__document_masking=True), 1, quiet) as data:
        for step in range(1, 13):
            rows = {int(s): row for b in data.batch(step) for s, row in zip(b.sample_ids, b.tokens)}
            for origin in step_origins(data, step):
                told: list[int] = []
                for piece in origin.pieces or ():
                    first = 1000 if piece.file.endswith("1.ds") else 0
                    told += range(first + piece.first_token, first + piece.end_token)
                assert rows[origin.sample].tolist() == (told + [2] * L)[:L]


def test_files_without_ends_of_documents_are_refused(tmp_path: Path) -> None:
    np.save(tmp_path / "b.npy", np.arange(2000, 2300, dtype=np.uint16))
    config = config_of({"tokens": str(tmp_path / "b.npy"), "packing": "best_fit"})
    with pytest.raises(InputError, match=r"best_fit needs the ends of documents, which .*b.npy does not have"):
        open_run(config, 1, quiet)
