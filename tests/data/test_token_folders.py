"""Training on tokenized files: windows, shares, masks, what is held out, what can be wrong; against plain loops."""

import json
import os
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kenotron.config import InputError
from kenotron.data import NO_LOSS, RunData
from kenotron.data.batch import PAD, make_batch
from kenotron.data.cache import SplitTokens
from kenotron.data.formats import TokenFile
from kenotron.data.sources.random_tokens import RandomTokens
from kenotron.data.sources.token_files import read_mix
from kenotron.data.sources.token_folder import TokenFolder
from kenotron.data.sources.windows import HeldOutWindows
from support.megatron_files import write_megatron
from support.written_tokens import LENGTHS, L, counting, epoch, opened, windows, write_ds


def held_out(data: RunData) -> list[list[int]]:
    return [row for row in windows(batch for batch, *_ in data.validation()) if row[-1] != NO_LOSS]


def cut(ids: list[int], step: int) -> list[list[int]]:
    """All whole windows of L + 1, the plain way."""
    return [ids[at : at + L + 1] for at in range(0, len(ids) - L, step)]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two files, the second in a folder below; tokens 0-179 and 1000-1179."""
    write_ds(tmp_path / "data" / "a.ds", counting(0, LENGTHS))
    write_ds(tmp_path / "data" / "b" / "a.ds", counting(1000, LENGTHS))
    return tmp_path / "data"


# ---- windows -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [2, 4])
def test_an_epoch_is_every_window_of_every_file_and_the_last_are_held_out(tmp_path: Path, size: int) -> None:
    write_ds(tmp_path / "a.ds", counting(0, LENGTHS), size)
    write_ds(tmp_path / "b" / "a.ds", counting(1000, LENGTHS), size)
    expected = cut(list(range(180)), L + 1) + cut(list(range(1000, 1180)), L + 1)
    assert len(expected) == 40
    with opened({"dataset_folder": str(tmp_path), "token_size_in_bytes": size}) as data:
        assert sorted(epoch(data)) == expected[:36]
        assert held_out(data) == expected[36:]
        assert epoch(data) != expected[:36]  # shuffled


@pytest.mark.parametrize("kind", ["npy", "big-endian npy", "raw", "megatron"])
def test_windows_of_other_formats_share_a_token_so_that_none_is_lost(tmp_path: Path, kind: str) -> None:
    ids = np.arange(180, dtype=np.uint16)
    more = {}
    if "npy" in kind:
        np.save(tmp_path / "a.npy", ids.astype(">u2") if kind == "big-endian npy" else ids)
    elif kind == "raw":
        ids.tofile(tmp_path / "a.bin")
        more = {"token_dtype": "uint16"}
    else:
        write_megatron(tmp_path / "a", np.split(ids, np.cumsum(LENGTHS)[:-1]), "uint16")
    with opened({"tokens": str(tmp_path), **more}, model__document_masking=kind == "megatron") as data:
        source = data.stage_of(1).sources[0]
        rows = [*source.read(np.arange(len(source))).tokens, *source.held_out.read(np.arange(2)).tokens]
        assert [row.tolist() for row in rows] == cut(list(range(180)), L)
        assert sorted(label for row in rows for label in row[1:].tolist()) == list(range(1, 177))
        if kind == "megatron":
            ends = set(np.cumsum(LENGTHS).tolist())
            for batch in data.batch(1):
                assert batch.tokens[batch.labels == NO_LOSS].tolist() == [t for t in batch.tokens.flat if t + 1 in ends]


written = st.lists(st.tuples(st.integers(0, 40), st.booleans()), min_size=1, max_size=6)


@given(written, st.integers(1, 9), st.randoms(use_true_random=False))
def test_a_sample_is_the_window_that_a_plain_loop_finds(files: Any, length: int, random: Any) -> None:
    made, expected, first = [], [], 0
    for number, (count, disjoint) in enumerate(files):
        ids = np.arange(first, first + count)
        borders = sorted({random.randint(0, count) for _ in range(3)} | {count})
        ends, loss = np.array(borders, dtype=np.uint64), ids % 3 > 0 if random.random() < 0.5 else None
        made.append(TokenFile(Path(str(number)), "datatrove" if disjoint else "numpy", ids, ends, loss, None))
        for at in range(0, count - length, length + disjoint):
            window = range(at, at + length + 1)
            of = [sum(border <= token for border in borders) for token in window]
            carries = [made[-1].loss is None or (first + token) % 3 > 0 for token in window]
            expected.append(([first + token for token in window], of, carries))
        first += count
    folder = TokenFolder("all", made, length, 1000)
    assert len(folder) == len(expected)
    folder._check_unchanged = lambda number: None  # type: ignore[method-assign]  # these are no files
    random.shuffle(order := list(range(len(expected))))
    if order:
        read = folder.read(np.array(order))
        assert read.tokens.tolist() == [expected[i][0] for i in order]
        assert read.document_ids.tolist() == [expected[i][1] for i in order]  # type: ignore[union-attr]
        assert (read.loss_mask is None) == all(file.loss is None for file in made)
        assert read.loss_mask is None or read.loss_mask.tolist() == [expected[i][2] for i in order]


@pytest.mark.parametrize("both", ["one stage", "two stages"])
def test_files_whose_held_out_end_another_path_trains_on_are_refused(folder: Path, both: str) -> None:
    whole, part = {"tokens": str(folder)}, {"tokens": str(folder / "b")}  # 10% of all is more than 10% of b
    message = r"data/b would train on tokens of .*b/a.ds from 144 on, which .*data holds out .* give the same path"

    def run(**changes: Any) -> RunData:
        if both == "two stages":
            return opened(whole, {"dataset": part, "start": 2}, start_step=2, **changes)
        return opened({"mixture": [{"weight": 1, **whole}, {"weight": 1, **part}]}, **changes)

    with pytest.raises(InputError, match=message):
        run()
    run(val_check_interval=-1).close()


def test_another_order_of_files_would_hold_others_out(folder: Path) -> None:
    for name in "cdefgh":
        write_ds(folder / f"{name}.ds", counting(2000, LENGTHS))
    dataset = {"dataset_folder": str(folder)}
    with pytest.raises(InputError, match=r"would train on tokens of .*h.ds from .*same shuffle_files"):
        opened(dataset, {"dataset": {**dataset, "shuffle_files": True}, "start": 2}, start_step=2)


# ---- windows of any stream, against the definition read token by token -------------------------------------


def made_split(lengths):
    tokens = np.arange(sum(lengths), dtype=np.uint16)
    return SplitTokens(Path("made"), "cache", tokens, np.cumsum(lengths).astype(np.uint64))


def document_of(lengths, token):
    return int(np.searchsorted(np.cumsum(lengths), token, side="right"))


streams = st.lists(st.integers(0, 12), min_size=1, max_size=30).filter(sum)


@given(streams, st.integers(1, 9))
def test_held_out_windows_hold_every_token_and_fill_up_the_last(lengths, size):
    source = HeldOutWindows("made", made_split(lengths), size)
    rows = source.read(np.arange(len(source))).tokens
    assert rows.shape == (len(source), size + 1)
    labels = rows[:, 1:].reshape(-1)
    assert labels[labels != PAD].tolist() == list(range(1, sum(lengths)))
    real = rows != PAD
    documents = source.read(np.arange(len(source))).document_ids
    assert documents[real].tolist() == [document_of(lengths, t) for t in rows[real].tolist()]


@given(streams, st.integers(1, 9))
def test_batches_with_documents_restart_positions_and_mask_borders(lengths, size):
    source = TokenFolder("made", [made_split(lengths)], size, 1 << 16)
    indices = np.arange(len(source))
    batch = make_batch(source.read(indices).tokens, indices, source.read(indices).document_ids)
    for r in range(len(source)):
        start = 0
        for t in range(size):
            here = document_of(lengths, batch.tokens[r, t])
            if t and here != document_of(lengths, batch.tokens[r, t - 1]):
                start = t
            assert batch.positions[r, t] == t - start
            following = batch.tokens[r, t] + 1
            same = document_of(lengths, following) == here
            assert batch.labels[r, t] == (following if same else NO_LOSS)
        assert batch.documents[r, 0] == 0
        assert (np.diff(batch.documents[r]) >= 0).all()


def test_random_tokens_answer_any_sample_of_an_endless_source():
    source = RandomTokens(1000, 16, seed=1)
    rows = source.read(np.array([0, 10**12, 2**47])).tokens
    assert rows.shape == (3, 17)
    assert source.read(np.array([10**12])).tokens.tolist() == rows[1:2].tolist()
    assert RandomTokens(1000, 16, seed=2).read(np.array([0])).tokens.tolist() != rows[:1].tolist()


# ---- shares ------------------------------------------------------------------------------------------------


def shares_hold(data: RunData, shares: list[float], n: int = 600) -> None:
    """Every prefix holds each share to within two samples."""
    order = data.stage_of(1).order
    source, _ = order.locate(np.arange(n))
    for s, share in enumerate(shares):
        counts = np.cumsum(source == s)
        assert np.abs(counts - share / sum(shares) * np.arange(1, n + 1)).max() <= 2


def test_weights_of_folders_are_kept_in_every_prefix(folder: Path) -> None:
    folders = [str(folder / "a.ds"), str(folder / "b")]
    with opened({"dataset_folder": folders, "dataset_weights": [5, 2.5]}) as data:
        assert [source.name for source in data.stage_of(1).sources] == folders
        shares_hold(data, [2, 1])
    with opened({"tokens": {folders[0]: 1, folders[1]: 4.0}}) as data:
        shares_hold(data, [1, 4])


@pytest.mark.parametrize("key", ["dataset_folder", "tokens"])
def test_folders_without_weights_share_by_their_samples(folder: Path, key: str) -> None:
    write_ds(folder / "c" / "c.ds", counting(2000, [400]))
    with opened({key: [str(folder / "b"), str(folder / "c")]}) as data:
        shares_hold(data, [20 - 2, 44 - 4])
        positions = np.arange(58)
        found = Counter(row[0] for row in windows([data.stage_of(1).read(positions, positions, False)]))
        assert max(found.values()) <= 2  # one epoch of both, but for a sample or two where they meet
        assert len(found) >= 56


def test_a_mix_file_names_paths_beside_itself(folder: Path) -> None:
    mix = folder / "mix.json"
    mix.write_text(json.dumps({"b": 3, str(folder / "a.ds"): 1}))
    with opened({"tokens": str(mix)}) as data:
        assert [source.name for source in data.stage_of(1).sources] == [str(folder / "b"), str(folder / "a.ds")]
        shares_hold(data, [3, 1])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[1]", r"mix\.json: expected a map path → weight above 0: Input should be an object, found \[1\]"),
        ("{}", "expected a map path → weight above 0: Dictionary should have at least 1 item"),
        ('{"a": 0}', r"mix\.json, 'a': .* greater than 0, found 0"),
        ('{"a": "3"}', "'a': .*valid number, found '3'"),
        ('{"a": 1, "b": 1, "a": 3}', r"mix\.json: 'a' is there twice"),
    ],
)
def test_a_bad_mix_file_is_named(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "mix.json").write_text(text)
    with pytest.raises(InputError, match=message):
        read_mix(tmp_path / "mix.json")
    with pytest.raises(InputError, match="cannot read"):
        read_mix(tmp_path / "other.json")


@pytest.mark.parametrize("masking", [False, True])
def test_a_batch_of_several_folders_is_what_each_gives_alone(tmp_path: Path, masking: bool) -> None:
    """Files of other widths and formats, with and without ends and loss masks, are read at once."""
    write_ds(tmp_path / "a" / "a.ds", counting(0, LENGTHS), loss=[token % 5 > 1 for token in range(180)])
    write_ds(tmp_path / "a" / "b.ds", counting(500, LENGTHS), 4)
    write_ds(tmp_path / "b" / "a.ds", counting(1000, LENGTHS))
    np.save(tmp_path / "c.npy", np.arange(2000, 2300, dtype=np.int32))
    paths = {str(tmp_path / "a"): 3.0, str(tmp_path / "b"): 1.0, str(tmp_path / "c.npy"): 2.0}
    with opened({"tokens": paths}, model__document_masking=masking) as data:
        stage, positions = data.stage_of(1), np.arange(300)
        at_once = stage.read(positions, positions, masking)
        source_of, index = stage.order.locate(positions)
        for number in positions:
            place = index[number : number + 1]
            read = stage.sources[source_of[number]].read(place)
            documents = read.document_ids if masking else None
            if masking and documents is None:
                documents = np.zeros((1, L + 1), dtype=np.int64)
            alone = make_batch(read.tokens, place, documents, read.loss_mask)
            for name in ("tokens", "labels", "positions", "documents"):
                found, expected = getattr(at_once, name), getattr(alone, name)
                assert (found is None) == (expected is None) == (name in ("positions", "documents") and not masking)
                assert expected is None or found[number].tolist() == expected[0].tolist()
    assert set(source_of) == {0, 1, 2}
    assert (at_once.labels == NO_LOSS).any()


# ---- masks -------------------------------------------------------------------------------------------------


def test_files_without_document_ends_are_reported_where_documents_are_masked(folder: Path) -> None:
    os.remove(folder / "b" / "a.ds.index")
    for masking in (False, True):
        said: list[str] = []
        with opened({"dataset_folder": str(folder)}, said=said, model__document_masking=masking) as data:
            data.batch(1)
        assert [("ends of documents" in line and "b/a.ds" in line) for line in said] == [True] * masking


# ---- nanotron's keys ---------------------------------------------------------------------------------------


def test_a_cap_takes_the_first_tokens_and_leaves_what_is_held_out(folder: Path) -> None:
    with opened({"dataset_folder": str(folder)}) as data:
        held = held_out(data)
    with opened({"dataset_folder": [str(folder)], "dataset_max_tokens": [100]}) as data:
        assert sorted(epoch(data)) == cut(list(range(180)), L + 1)[:11]  # 11 windows of 9 tokens
        assert held_out(data) == held
    with opened({"dataset_folder": [str(folder)], "dataset_max_tokens": [10**9]}) as data:
        assert len(epoch(data)) == 36


def test_local_copies_are_read_where_they_are(folder: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy" / "b" / "a.ds"
    copy.parent.mkdir(parents=True)
    np.arange(2000, 2180).astype("<u2").tofile(copy)  # other tokens, to be told from the original's
    dataset = {"dataset_folder": str(folder), "dataset_read_path": str(tmp_path / "copy")}
    with opened(dataset) as data:
        assert sorted(epoch(data) + held_out(data)) == cut(list(range(180)), 9) + cut(list(range(2000, 2180)), 9)
    with opened(dataset, model__document_masking=True) as data:
        ends = np.cumsum(LENGTHS)  # of the original, as the copy has no index
        for batch in data.batch(1):
            of, next_of = (np.searchsorted(ends, batch.tokens % 1000 + n, "right") for n in (0, 1))
            assert ((batch.labels == NO_LOSS) == (of != next_of)).all()
    copy.write_bytes(b"\0" * 20)
    with pytest.raises(InputError, match=r"dataset_read_path: .*copy/b/a\.ds has 20 bytes, but .*b/a\.ds has 360"):
        opened(dataset)


@pytest.mark.parametrize("name", ["skip_in_stream", "pad_samples_to_global_batch_size", "use_old_brrr_dataloader"])
def test_keys_that_change_nothing_change_nothing(folder: Path, name: str) -> None:
    found = []
    for value in (False, True):
        with opened({"dataset_folder": str(folder), name: value}) as data:
            found.append([windows(data.batch(step)) for step in range(1, 5)])
    assert found[0] == found[1]


# ---- content -----------------------------------------------------------------------------------------------


def test_fingerprints_tell_other_data(folder: Path, tmp_path: Path) -> None:
    def fingerprint(path: Path) -> str:
        with opened({"dataset_folder": str(path)}) as data:
            (found,) = data.fingerprints().values()
        return found

    first = fingerprint(folder)
    moved = Path(shutil.copytree(folder, tmp_path / "moved"))
    assert fingerprint(moved) == first
    changes = {
        "head": lambda: write_ds(moved / "a.ds", [[7, *range(1, 5)], *counting(5, LENGTHS[1:])]),
        "tail": lambda: write_ds(moved / "a.ds", [*counting(0, LENGTHS[:-1]), [*range(155, 179), 3]]),
        "more": lambda: write_ds(moved / "a.ds", [*counting(0, LENGTHS), [1]]),
        "documents": lambda: write_ds(moved / "a.ds", counting(0, LENGTHS[::-1])),
        "tokenizer": lambda: write_ds(moved / "a.ds", counting(0, LENGTHS), tokenizer="another"),
        "loss": lambda: write_ds(moved / "a.ds", counting(0, LENGTHS), loss=[True] * 180),
        "file": lambda: write_ds(moved / "c.ds", counting(0, LENGTHS)),
    }
    seen = {first}
    for change in changes.values():
        change()
        seen.add(fingerprint(moved))
        shutil.rmtree(moved)
        shutil.copytree(folder, moved)
    assert len(seen) == 1 + len(changes)


# ---- size --------------------------------------------------------------------------------------------------

HUGE = """
import sys, time
sys.path[:0] = {path!r}
from support.data_runs import run_config
from kenotron.data import open_run
config = run_config({{"dataset_folder": {folder!r}}}, sequence_length=4096, val_fraction=0.005)
started = time.process_time()  # what other processes do to the clock is not asked
with open_run(config, 1, print) as data:
    batch = data.batch(1)[0]
    seconds = time.process_time() - started
    assert batch.tokens.shape == (2, 4096)
    assert abs(len(data.stage_of(1).sources[0]) - 0.995 * 10**11 / 4097) < 2
    data.batch(12)
status = open("/proc/self/status").read()  # ru_maxrss would be the parent's, whose memory a fork begins with
print(seconds, int(status.split("VmHWM:")[1].split()[0]) / 1024, "torch" in sys.modules)
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="Linux tells a process's own peak")
def test_a_hundred_billion_tokens_open_at_once(tmp_path: Path) -> None:
    for name, size in (("a.ds", 2 * 10**11), ("a.ds.loss", 10**11)):
        with open(tmp_path / name, "wb") as stream:
            stream.truncate(size)  # sparse: no block is written
    np.array([10**11], dtype="<u8").tofile(tmp_path / "a.ds.index")
    script = HUGE.format(path=[str(Path(__file__).parents[1])], folder=str(tmp_path))
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    seconds, megabytes, torch = done.stdout.split()[-3:]
    assert (float(seconds) <= 1, float(megabytes) <= 200, torch) == (True, True, "False"), done.stdout
