"""Merging and inspecting files of tokens: every document once, whole, with its loss; in the order asked for."""

import json
import os
from itertools import pairwise

import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from kenotron.cli.data import BAR
from kenotron.config.errors import InputError
from kenotron.data.formats import open_token_files
from kenotron.data.formats.datatrove import TokenWriter
from kenotron.prepare import shuffle as shuffle_module
from kenotron.prepare.merge import merge
from kenotron.prepare.shuffle import DocumentShuffle
from support.data_runs import quiet


def write(path, documents, losses=None, dtype="uint16", tokenizer="t"):
    ids = np.concatenate([np.asarray(document) for document in documents])
    loss = None if losses is None else np.concatenate(losses)
    with TokenWriter(path, np.dtype(dtype), tokenizer) as writer:
        writer.write(ids, np.array([len(document) for document in documents]), loss)


def read(path):
    """Documents and, where there are any, their loss masks."""
    found, losses = [], []
    for file in open_token_files(path, "test"):
        cuts = np.asarray(file.ends[:-1]).astype(int)
        found += [part.tolist() for part in np.split(file.tokens, cuts)]
        losses += [] if file.loss is None else [part.tolist() for part in np.split(file.loss, cuts)]
    return found, losses


def made_documents(count, first):
    """No two are equal."""
    return [[first + number] + [7] * (number % 5) for number in range(count)]


@pytest.fixture
def sources(tmp_path):
    (tmp_path / "b").mkdir()
    write(tmp_path / "a.ds", made_documents(30, 1000))
    write(tmp_path / "b" / "0.ds", made_documents(20, 2000))
    write(tmp_path / "b" / "1.ds", made_documents(10, 3000))
    return [str(tmp_path / "a.ds"), str(tmp_path / "b")]


ALL = made_documents(30, 1000) + made_documents(20, 2000) + made_documents(10, 3000)


def test_end_to_end_is_the_order_of_the_sources(sources, tmp_path, monkeypatch):
    """The file of tokens comes after what is beside it: whoever finds it finds all."""
    done, replace = [], os.replace

    def recorded(source, target):
        done.append(target)
        replace(source, target)

    monkeypatch.setattr(os, "replace", recorded)
    monkeypatch.setattr("kenotron.prepare.scratch.sync_folder", done.append)
    made = merge(sources, tmp_path / "all.ds", report=quiet)
    assert done[-2:] == [tmp_path / "all.ds", tmp_path]
    assert read(tmp_path / "all.ds")[0] == ALL
    assert (made["documents"], made["tokens"]) == (60, sum(map(len, ALL)))
    assert json.loads((tmp_path / "all.ds.manifest.json").read_text()) == made


@pytest.fixture
def corpus(tmp_path):
    write(tmp_path / "in" / "a.ds", [[1, 2, 3], [4, 5], [1, 2, 3], [9, 9, 9, 9, 9]], tokenizer="gpt2")
    return tmp_path / "in"


def test_inspect_counts(corpus, shell):
    code, out, _ = shell("data", "inspect", corpus, "--json")
    assert code == 0
    report = json.loads(out)
    expected = {"tokens": 13, "documents": 4, "dtype": "uint16", "format": "datatrove", "files": 1, "tokenizer": "gpt2"}
    assert {key: report[key] for key in expected} == expected
    assert report["largest_id"] == 9
    lengths = report["document_lengths"]
    assert (lengths["shortest"], lengths["mean"], lengths["longest"]) == (2, 13 / 4, 5)
    assert [(b["from"], b["below"], b["documents"]) for b in lengths["histogram"]] == [(2, 4, 3), (4, 8, 1)]
    code, out, _ = shell("data", "inspect", corpus)
    assert code == 0
    *head, _, _ = lines = out.splitlines()
    assert head == [
        f"{corpus}: datatrove, 1 file, 26 bytes of uint16",
        "tokens: 13   documents: 4   largest id: 9",
        "tokenizer: gpt2   tokens without loss: 0",
        "document lengths: 2 to 5 tokens, mean 3.2",
    ]
    assert [line.split()[-1] for line in lines[-2:]] == ["3", "1"]
    assert [line.count("█") for line in lines[-2:]] == [BAR, -(-BAR // 3)]


def test_inspect_reports_an_id_beyond_the_vocabulary(corpus, shell):
    code, _, err = shell("data", "inspect", corpus, "--vocab-size", 9)
    assert code == 2
    assert "a.ds: token 8 is 9, beyond the vocabulary of 9 (5 such tokens)" in err
    assert shell("data", "inspect", corpus, "--vocab-size", 10)[0] == 0


@pytest.mark.parametrize("case", ["all .ds", "all .index", "all .metadata", "all.ds .ds"])
def test_inspect_holds_files_to_their_manifest(sources, tmp_path, shell, case):
    output, kind = case.split()
    merge(sources, tmp_path / output, max_tokens=25 if output == "all" else None, report=quiet)
    code, out, _ = shell("data", "inspect", tmp_path / output, "--json")
    files = (tmp_path / "all").glob("*.ds*") if output == "all" else tmp_path.glob("all.ds*")
    made = [file for file in sorted(files) if file.suffix != ".json"]
    assert (code, json.loads(out)["checksums"]) == (0, {"files": len(made), "different": []})
    file = next(file for file in made if file.suffix == kind)
    before = file.read_bytes()
    damaged = bytearray(before)
    damaged[8 if kind == ".index" else -1] ^= 1  # a sorted index stays so
    file.write_bytes(damaged)
    code, out, err = shell("data", "inspect", tmp_path / output, "--json")
    expected, found = (xxhash.xxh3_128_hexdigest(bytes(each)) for each in (before, damaged))
    assert code == 2
    assert json.loads(out)["checksums"]["different"] == [{"file": str(file), "expected": expected, "found": found}]
    assert f"{file}: XXH3 of {expected} in its manifest, found {found}" in err


def test_files_hold_at_most_what_is_asked_for_and_documents_stay_whole(sources, tmp_path):
    made = merge(sources, tmp_path / "all", max_tokens=25, report=quiet)
    assert read(tmp_path / "all")[0] == ALL
    assert all(file["tokens"] <= 25 for file in made["files"])
    assert len(made["files"]) > 5
    merge(sources, tmp_path / "each", max_tokens=1, report=quiet)  # a document longer than that has its own file
    assert read(tmp_path / "each")[0] == ALL


@pytest.mark.parametrize("bucket", [1 << 24, 10])
def test_a_shuffle_is_a_permutation_of_documents_that_the_seed_decides(sources, tmp_path, monkeypatch, bucket):
    monkeypatch.setattr(shuffle_module, "BUCKET_TOKENS", bucket)
    monkeypatch.setattr(shuffle_module, "TOKENS_AT_ONCE", 20)
    orders = {}
    for name, seed in (("x", 1), ("y", 1), ("z", 2)):
        merge(sources, tmp_path / name, shuffle=True, seed=seed, report=quiet)
        orders[name] = read(tmp_path / name)[0]
    assert orders["x"] == orders["y"] != orders["z"]
    assert sorted(orders["x"]) == sorted(orders["z"]) == sorted(ALL)
    assert orders["x"] != ALL


def test_every_order_is_about_equally_likely(tmp_path, monkeypatch):
    monkeypatch.setattr(shuffle_module, "BUCKET_TOKENS", 2)
    counts: dict[tuple[int, ...], int] = {}

    for seed in range(600):
        with DocumentShuffle(tmp_path / str(seed), np.dtype("<u2"), 3, [seed]) as mixed:
            mixed.write(np.arange(3), np.ones(3, np.int64))
            order = tuple(token for ids, *_ in mixed.documents() for token in ids.tolist())
        counts[order] = counts.get(order, 0) + 1
    assert len(counts) == 6
    assert sum((count - 100) ** 2 / 100 for count in counts.values()) < 25  # chi², 5 degrees: 1 in 7,000


sizes_of_documents = st.lists(st.integers(1, 9), min_size=1, max_size=30)


@given(lengths=sizes_of_documents, cuts=st.lists(st.integers(0, 200), max_size=8), seed=st.integers(0, 2**31))
def test_documents_that_come_in_pieces_leave_whole(tmp_path_factory, lengths, cuts, seed):
    ends = np.cumsum(lengths)
    ids = np.arange(ends[-1])
    places = sorted({0, int(ends[-1]), *(cut for cut in cuts if cut < ends[-1])})
    got = []
    with (
        pytest.MonkeyPatch.context() as patch,
        DocumentShuffle(tmp_path_factory.mktemp("s") / "x", np.dtype("<u2"), len(ids), [seed]) as mixed,
    ):
        patch.setattr(shuffle_module, "TOKENS_AT_ONCE", 5)
        for start, stop in pairwise(places):
            mixed.append(ids[start:stop], ends[(ends > start) & (ends <= stop)] - start)
        for some, sizes, _ in mixed.documents():
            got.extend(tuple(part.tolist()) for part in np.split(some, np.cumsum(sizes)[:-1]))
    assert sorted(got) == [tuple(part.tolist()) for part in np.split(ids, ends[:-1])]


@pytest.mark.parametrize("shuffle", [False, True])
def test_a_loss_mask_goes_with_its_document(tmp_path, shuffle):
    masked = [[number, number, number] for number in range(1, 20)]
    losses = [np.array([True, False, number % 2 == 0]) for number in range(1, 20)]
    write(tmp_path / "a.ds", masked, losses)
    write(tmp_path / "b.ds", made_documents(5, 1000))
    merge([str(tmp_path / "a.ds"), str(tmp_path / "b.ds")], tmp_path / "m.ds", shuffle=shuffle, report=quiet)
    documents, found = read(tmp_path / "m.ds")
    assert len(documents) == len(found) == 24
    for document, loss in zip(documents, found):
        number = document[0]
        assert loss == ([True] * len(document) if number >= 1000 else [True, False, number % 2 == 0])


def test_what_cannot_be_merged_is_named(sources, tmp_path):
    merge(sources, tmp_path / "all.ds", report=quiet)
    with pytest.raises(InputError, match=r"--output: .*all\.ds already exists"):
        merge(sources, tmp_path / "all.ds", report=quiet)
    write(tmp_path / "other.ds", made_documents(3, 1), tokenizer="another")
    with pytest.raises(InputError, match=r"other\.ds: tokenizer is 'another', but 't' in .*a\.ds"):
        merge([*sources, str(tmp_path / "other.ds")], tmp_path / "x.ds", report=quiet)
    np.arange(10, dtype="<u2").tofile(tmp_path / "bare.ds")
    with pytest.raises(InputError, match=r"bare\.ds: where its documents end is not known"):
        merge([str(tmp_path / "bare.ds")], tmp_path / "x.ds", report=quiet)
    assert not (tmp_path / "x.ds").exists()
    assert not list(tmp_path.glob(".*unfinished"))


def test_a_loss_mask_of_an_earlier_file_is_not_taken_for_the_new_ones(sources, tmp_path):
    (tmp_path / "all.ds.loss").write_bytes(b"")
    with pytest.raises(
        InputError, match=r"--output: .*all\.ds\.loss already exists, left by an earlier all\.ds; remove it"
    ):
        merge(sources, tmp_path / "all.ds", report=quiet)


def test_one_tokenizer_by_two_paths_is_one(tmp_path):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        write(tmp_path / name / "0.ds", made_documents(3, 1), tokenizer=f"/data/{name}/tok")
        made = {"tokenizer": f"/data/{name}/tok", "tokenizer_hash": "1f", "files": [{"xxh3": {"0.ds": "0"}}]}
        (tmp_path / name / "manifest.json").write_text(json.dumps(made))
    sources = [str(tmp_path / name) for name in ("a", "b")]
    assert merge(sources, tmp_path / "all", report=quiet)["tokenizer"] == "/data/a/tok"
    (tmp_path / "b" / "manifest.json").unlink()
    with pytest.raises(InputError, match=r"b/0\.ds: tokenizer is '/data/b/tok', but '/data/a/tok' in"):
        merge(sources, tmp_path / "x", report=quiet)


def test_a_manifest_speaks_of_its_own_files_only(tmp_path):
    write(tmp_path / "a.ds", made_documents(3, 1), tokenizer="a")
    write(tmp_path / "b.ds", made_documents(3, 1), tokenizer="b")
    (tmp_path / "a.ds.manifest.json").write_text(json.dumps({"tokenizer": "a", "tokenizer_hash": "1f"}))
    both = [str(tmp_path / "a.ds"), str(tmp_path / "b.ds")]
    for sources in ([str(tmp_path)], both):
        with pytest.raises(InputError, match=r"b\.ds: tokenizer is 'b', but 'a' in"):
            merge(sources, tmp_path / "all", report=quiet)


@pytest.mark.parametrize("given", [["in/a", "in/b"], ["in/a/0.ds", "in/b/0.ds"], ["in"]])
def test_tokenizers_of_one_name_are_told_apart_by_the_manifests_beside_the_files(tmp_path, given):
    for name in ("a", "b"):
        (tmp_path / "in" / name).mkdir(parents=True)
        write(tmp_path / "in" / name / "0.ds", made_documents(3, 1))
        (tmp_path / "in" / name / "manifest.json").write_text(json.dumps({"tokenizer_hash": f"hash of {name}"}))
    message = r"b/manifest\.json: tokenizer_hash is 'hash of b', but 'hash of a' in .*a/man"
    with pytest.raises(InputError, match=message):
        merge([str(tmp_path / each) for each in given], tmp_path / "all.ds", report=quiet)
    assert not (tmp_path / "all.ds").exists()


def test_two_widths_become_the_wider(tmp_path):
    write(tmp_path / "a.ds", [[1, 2]])
    write(tmp_path / "b.ds", [[70_000, 3]], dtype="uint32")
    assert merge([str(tmp_path / "a.ds"), str(tmp_path / "b.ds")], tmp_path / "m", report=quiet)["dtype"] == "uint32"
    assert read(tmp_path / "m")[0] == [[1, 2], [70_000, 3]]


@pytest.mark.parametrize("shuffle", [False, True])
def test_what_is_in_memory_at_a_time_decides_nothing(tmp_path, monkeypatch, shuffle):
    """Documents longer than a chunk, empty ones, more documents than a block: the same documents and losses."""
    lengths = [3, 0, 40, 1, 0, 0, 7, 25, 2, 90, 1, 1]
    documents = [[100 * number + n for n in range(length)] for number, length in enumerate(lengths, start=1)]
    write(tmp_path / "a.ds", documents, [np.array(ids, int) % 3 > 0 for ids in documents])
    for module in ("data.formats.datatrove", "prepare.shuffle"):
        monkeypatch.setattr(f"kenotron.{module}.TOKENS_AT_ONCE", 8)
    monkeypatch.setattr("kenotron.prepare.merge.DOCUMENTS_AT_ONCE", 5)
    monkeypatch.setattr("kenotron.prepare.shuffle.BUCKET_TOKENS", 50)
    merge([str(tmp_path / "a.ds")], tmp_path / "m.ds", shuffle=shuffle, seed=4, report=quiet)
    found, losses = read(tmp_path / "m.ds")
    assert found != documents if shuffle else found == documents
    assert sorted(found) == sorted(documents)
    assert losses == [[token % 3 > 0 for token in ids] for ids in found]


def test_an_index_that_is_not_sorted_far_from_its_start_is_named(tmp_path, monkeypatch):
    write(tmp_path / "a.ds", made_documents(30, 1))
    ends = np.fromfile(tmp_path / "a.ds.index", "<u8")
    ends[20] = ends[18]
    ends.tofile(tmp_path / "a.ds.index")
    monkeypatch.setattr("kenotron.data.formats.token_file.CHECKED_AT_OPEN", 4)
    monkeypatch.setattr("kenotron.prepare.merge.DOCUMENTS_AT_ONCE", 7)
    with pytest.raises(InputError, match=rf"a\.ds: its index of documents is not sorted: entry 20 is {ends[20]}"):
        merge([str(tmp_path / "a.ds")], tmp_path / "m.ds", report=quiet)
