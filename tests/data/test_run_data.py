"""The data of a run: which sample goes where, stages, prefetching, validation, errors."""

import itertools
import json
import shutil
import threading
import time

import numpy as np
import pytest

from kenotron.config.errors import InputError
from kenotron.data import NO_LOSS, open_run
from kenotron.data.loader import Prefetcher
from kenotron.text.byte_level_bpe import train_byte_level_bpe
from kenotron.text.hash_split import is_held_out, text_hash, threshold_of_fraction
from kenotron.text.tokenizer import TextTokenizer
from support.data_runs import opened, quiet, rows, run_config, validation_texts, write_texts


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    return write_texts(tmp_path_factory.mktemp("run") / "texts", count=60, words=90)


@pytest.fixture(scope="module")
def other_texts(tmp_path_factory):
    return write_texts(tmp_path_factory.mktemp("run") / "others", count=30, words=40, seed=9)


def mixture(texts, weight, other_texts, other_weight):
    parts = ((texts, weight), (other_texts, other_weight))
    return {"mixture": [{"weight": share, "text_files": str(folder)} for folder, share in parts]}


# ---- which sample goes where -------------------------------------------------------------------------------


def test_labels_are_the_tokens_one_place_on_and_come_from_the_files(texts):
    with opened({"text_files": str(texts)}) as data:
        stream = data.stage_of(1).sources[0].cache.train.tokens.tolist()
        for batch in data.batch(1):
            assert batch.tokens.dtype == batch.labels.dtype == np.int64
            assert batch.tokens.shape == batch.labels.shape == (2, 32)
            assert batch.tokens[:, 1:].tolist() == batch.labels[:, :-1].tolist()
            for tokens, labels in zip(batch.tokens.tolist(), batch.labels.tolist()):
                window = tokens + labels[-1:]
                starts = [at for at in range(0, len(stream) - 32, 32) if stream[at : at + 33] == window]
                assert starts


@pytest.mark.parametrize("streaming", [{}, {"streaming": {}}], ids=["cached", "stream"])
def test_bytes_are_counted_by_their_mean_where_those_of_a_token_are_unknown(streaming, texts, monkeypatch):
    def held_out_bytes():
        with opened({"text_files": str(texts)} | streaming, val_samples=1000) as data:
            return sum(size for _, size, _ in data.validation())

    exact = held_out_bytes()
    monkeypatch.setattr(TextTokenizer, "token_bytes", lambda self: None)
    assert held_out_bytes() == pytest.approx(exact, rel=0.01)


def test_the_samples_of_a_step_are_the_same_on_every_layout(texts, other_texts):
    dataset, reference = mixture(texts, 3, other_texts, 1), None
    for micro, accumulation, dp in [(8, 1, 1), (1, 8, 1), (2, 2, 2), (1, 2, 4), (4, 1, 2)]:
        changes = {"micro_batch_size": micro, "batch_accumulation_per_replica": accumulation * dp}
        with opened(dataset, **changes) as data:
            steps = []
            for step in (1, 2, 7):
                samples = {}
                for rank in range(dp):
                    batches = data.batch(step, rank, dp)
                    assert len(batches) == accumulation
                    mine = rows(batches)
                    assert len(mine) == micro * accumulation
                    assert not samples.keys() & mine.keys()
                    samples |= mine
                assert sorted(samples) == list(range(8 * (step - 1), 8 * step))
                steps.append(samples)
        reference = reference or steps
        assert steps == reference


def test_samples_go_to_micro_batches_and_ranks_as_documented():
    with opened(None, micro_batch_size=3, batch_accumulation_per_replica=4) as data:
        for rank in range(2):
            for m, batch in enumerate(data.batch(5, rank, 2)):
                first = 4 * 12 + (m * 2 + rank) * 3
                assert batch.sample_ids.tolist() == [first, first + 1, first + 2]


def test_a_batch_that_does_not_divide_is_an_error():
    with opened(None) as data, pytest.raises(InputError, match="global batch of 4 samples does not divide"):
        data.batch(1, 0, 3)


def test_the_order_does_not_depend_on_where_the_files_lie(texts, tmp_path):
    moved = tmp_path / "elsewhere"
    shutil.copytree(texts, moved)
    with opened({"text_files": str(texts)}) as here, opened({"text_files": str(moved)}) as there:
        assert rows(here.batch(3)) == rows(there.batch(3))


# ---- stages ------------------------------------------------------------------------------------------------


def test_a_stage_reads_on_where_an_earlier_one_stopped_in_the_same_data(texts):
    dataset = {"text_files": str(texts)}
    with opened(dataset, train_steps=12) as one, opened(dataset, dataset, train_steps=12) as two:
        assert [rows(batches) for batches in one.loader()] == [rows(batches) for batches in two.loader()]


def test_what_is_wrong_with_the_next_stage_is_reported_long_before_it(texts, tmp_path):
    def start_and_wait_in_step_1():
        with opened({"text_files": str(texts)}, {"text_files": str(tmp_path / "missing")}) as data:
            for _ in range(1200):  # a minute, on a machine that is busy
                data.batch(1)
                time.sleep(0.05)

    with pytest.raises(InputError, match="no such file or folder"):
        start_and_wait_in_step_1()


def test_closing_stops_a_tokenization_in_the_background(texts, tmp_path, monkeypatch):
    from kenotron.text.file_documents import FileDocuments

    many = write_texts(tmp_path / "many", count=500, words=5)
    original, read, began = FileDocuments.documents, [], threading.Event()

    def slow(self):
        for pair in original(self):
            if len(self.files) == 500:
                read.append(pair)
                began.set()
                time.sleep(0.05)
            yield pair

    monkeypatch.setattr(FileDocuments, "documents", slow)
    data = opened({"text_files": str(texts)}, {"text_files": str(many)})
    assert began.wait(60)
    data.close()
    assert len(read) < 500


# ---- the loader --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [0, 1, 3])
def test_the_loader_yields_every_step_in_order_and_ends(workers):
    with opened(None, data__num_loading_workers=workers) as data, data.loader(3, 9) as loader:
        assert [batches[0].sample_ids[0] // 4 + 1 for batches in loader] == [3, 4, 5, 6, 7, 8]
        with pytest.raises(StopIteration):
            next(loader)


def test_batches_are_made_ahead_so_that_the_step_does_not_wait():
    made = [threading.Event() for _ in range(10)]

    def make(step):
        made[step].set()
        return step

    with Prefetcher(make, 0, 10, 2) as loader:
        for step in range(10):
            assert made[step].wait(60)  # before it is asked for
            assert next(loader) == step


@pytest.mark.parametrize("workers", [0, 2])
def test_what_a_loading_thread_raises_comes_out_of_next(workers):
    def make(step):
        if step == 3:
            raise InputError("sample 3 is bad")
        return step

    with Prefetcher(make, 0, 10, workers) as loader:
        assert list(itertools.islice(loader, 3)) == [0, 1, 2]
        with pytest.raises(InputError, match="sample 3 is bad"):
            next(loader)


def test_closing_a_loader_leaves_no_thread():
    before = threading.active_count()
    loader = Prefetcher(lambda step: step, 0, 10**9, 3)
    next(loader)
    assert threading.active_count() > before
    loader.close()
    assert threading.active_count() == before


# ---- documents ---------------------------------------------------------------------------------------------


def test_document_masking_gives_documents_positions_and_masked_borders(texts):
    plain = opened({"text_files": str(texts)}, sequence_length=100)
    masked = opened({"text_files": str(texts)}, sequence_length=100, model__document_masking=True)
    with plain, masked:
        eos, borders = masked.tokenizer.eos_token_id, 0
        with_and_without = zip(plain.loader(), masked.loader(), strict=True)
        for without, batch in itertools.chain(*(zip(*steps, strict=True) for steps in with_and_without)):
            assert (without.documents, without.positions) == (None, None)
            assert batch.tokens.tolist() == without.tokens.tolist()
            for r, row in enumerate(batch.tokens.tolist()):
                document = position = 0
                for t, token in enumerate(row):
                    assert (batch.documents[r, t], batch.positions[r, t]) == (document, position)
                    ends = token == eos
                    assert batch.labels[r, t] == (NO_LOSS if ends else without.labels[r, t])
                    borders += ends
                    document, position = (document + 1, 0) if ends else (document, position + 1)
        assert borders > 2


# ---- validation --------------------------------------------------------------------------------------------


def test_bytes_of_validation_are_exactly_those_of_the_held_out_text(texts):
    with opened({"text_files": str(texts)}) as data:
        documents = list(validation_texts(data))
        total = sum(len(text.encode()) for text in documents)
        tokens = [token for text in documents for token in [*data.tokenizer.encode(text), 0]]
        first = len(data.tokenizer.decode(tokens[:1]).encode())
        batches = list(data.validation())
        assert sum(size for _, size, _ in batches) == total - first
        labels = np.concatenate([batch.labels.reshape(-1) for batch, *_ in batches])
        assert labels[labels != NO_LOSS].tolist() == tokens[1:]
        inputs = np.concatenate([batch.tokens.reshape(-1) for batch, *_ in batches])
        assert inputs[labels != NO_LOSS].tolist() == tokens[:-1]
        assert len(documents) >= 5


def test_validation_is_the_same_on_every_layout_and_every_rank_gets_as_many_batches(texts, other_texts):
    def read(micro, dp):
        changes = {"micro_batch_size": micro, "batch_accumulation_per_replica": dp}
        with opened(mixture(texts, 1, other_texts, 5), **changes) as data:
            ranks = [list(data.validation(rank, dp)) for rank in range(dp)]
        assert len({len(batches) for batches in ranks}) == 1
        assert {batch.tokens.shape for batches in ranks for batch, *_ in batches} == {(micro, 32)}
        found = {}
        for batch, *_ in itertools.chain(*ranks):
            for i, tokens, labels in zip(batch.sample_ids.tolist(), batch.tokens, batch.labels):
                if i >= 0:
                    assert i not in found
                    found[i] = (tokens.tolist(), labels.tolist())
                else:
                    assert (labels == NO_LOSS).all()
        return found, sum(size for batches in ranks for _, size, _ in batches)

    assert read(4, 1) == read(1, 1) == read(3, 2) == read(2, 3)


def test_training_never_sees_a_held_out_document_whether_the_run_validates_or_not(texts):
    held = [t for f in sorted(texts.iterdir()) if is_held_out(t := f.read_text(), threshold_of_fraction(0.2))]
    assert held
    for interval in (5, -1):
        with opened({"text_files": str(texts)}, val_check_interval=interval) as data:
            seen = data.tokenizer.decode(data.stage_of(1).sources[0].cache.train.tokens)
        assert not [text for text in held if text in seen]


def test_a_cap_spreads_its_samples_over_the_whole_set(texts):
    with opened({"text_files": str(texts)}, val_samples=5) as data:
        whole = len(data.held_out())
        ids = [i for batch, *_ in data.validation() for i in batch.sample_ids.tolist() if i >= 0]
        assert ids == [n * whole // 5 for n in range(5)]
    with opened({"text_files": str(texts)}, limit_val_batches=2) as data:
        assert sum((batch.sample_ids >= 0).sum() for batch, *_ in data.validation()) == 8


def test_the_token_that_ends_documents_has_bytes_where_a_text_has_it_within(tmp_path):
    """Of length 32, so that some are a window's last label and some its first."""
    lines = [json.dumps({"text": f"story {number} <|endoftext|>" * (1 + number % 5) + " end"}) for number in range(60)]
    (tmp_path / "stories.jsonl").write_text("\n".join(lines))
    with opened({"text_files": str(tmp_path / "stories.jsonl")}, val_fraction=0.3) as data:
        split = data.stage_of(1).sources[0].cache.validation
        ends = split.ends.astype(int)
        assert (np.asarray(split.tokens)[ends - 1] == data.settings.eos).all()
        assert (np.asarray(split.tokens) == data.settings.eos).sum() > 2 * len(ends)
        first = len(data.tokenizer.decode(split.tokens[:1]).encode())
        assert sum(size for _, size, _ in data.validation()) == split.bytes - first
        assert split.bytes == sum(len(text.encode()) for text in validation_texts(data))


def test_a_blank_row_is_not_what_a_small_set_validates_on(tmp_path):
    texts = ["", "\n", *(f"document {number} of a small corpus\n" * 9 for number in range(4))]
    (tmp_path / "rows.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in texts))
    with opened({"text_files": str(tmp_path / "rows.jsonl")}, val_fraction=1e-12) as data:
        assert min(texts[2:], key=text_hash) in list(validation_texts(data))
        assert sum(size for _, size, _ in data.validation()) > 100


def test_no_held_out_document_is_an_error_that_says_what_to_do(tmp_path):
    folder = write_texts(tmp_path / "one", count=1, words=400)
    with pytest.raises(InputError, match=r"no document is left for validation .* tokens\.val_fraction"):
        opened({"text_files": str(folder)}, val_fraction=1e-9)
    with opened({"text_files": str(folder)}, val_fraction=1e-9, val_check_interval=-1) as data:
        assert len(data.batch(1)) == 2


def three_of_five(folder):
    """Two small texts of which none is below the fraction, one with the document that the other would hold out."""
    texts = sorted((f"document {number} of a small corpus\n" * 30 for number in range(5)), key=text_hash)
    for name, part in {"all": texts, "three": texts[:3], "others": texts[1:4]}.items():
        (folder / name).mkdir()
        for number, text in enumerate(part):
            (folder / name / f"{number}.txt").write_text(text)
    return [{"text_files": str(folder / name)} for name in ("all", "three", "others")]


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("in_stages", [False, True])
def test_what_no_text_is_trained_on_depends_on_neither_validation_nor_where_a_run_resumes(in_stages, streams, tmp_path):
    everything, three, others = three_of_five(tmp_path)
    first = others | ({"streaming": {}} if streams else {})
    mixture = {"mixture": [everything | {"weight": 1}, first | {"weight": 1}]}
    stages = [first, everything] if in_stages else [mixture]
    no_validation = {"val_check_interval": -1, "limit_val_batches": 0}
    other = {"val_datasets": [three], "val_samples": 4}
    found = []
    for changes in (other, no_validation) if in_stages and streams else ({"val_samples": 4}, other, no_validation):
        config = run_config(*stages, val_fraction=1e-12, **changes)
        with open_run(config, report=quiet) as data:
            reserved, rows = data.sources.reserved, [each.tokens.tolist() for each in data.batch(1)]
            saved = [data.held_out_hashes(), [data.batch(step) for step in range(2, 9)] and data.held_out_hashes()]
        for held_out in saved:
            with open_run(config, 8, report=quiet, held_out=held_out) as data:
                assert data.sources.reserved == reserved
        found.append((reserved, rows))
    assert found == found[:1] * len(found)
    assert len(found[0][0]) == 2 - in_stages - streams  # of each text of the first stage that is no stream


# ---- a run that continues ----------------------------------------------------------------------------------


def test_fingerprints_tell_that_a_file_or_the_tokenizer_changed(tmp_path):
    folder = write_texts(tmp_path / "texts")
    dataset = {"text_files": str(folder)}
    with opened(dataset) as data:
        first = data.fingerprints()
        assert set(first) == {"tokenizer", str(folder)}
        assert first["tokenizer"] == data.tokenizer.hash
    with opened(dataset, val_fraction=0.3) as data:
        assert data.fingerprints()[str(folder)] == first[str(folder)]
    (folder / "000.txt").write_text("something else\n")
    with opened(dataset) as data:
        assert data.fingerprints()[str(folder)] != first[str(folder)]


# ---- other sources -----------------------------------------------------------------------------------------


def test_random_tokens_are_uniform_and_need_no_tokenizer():
    with opened(None, sequence_length=512, arch__vocab_size=100) as data:
        assert data.tokenizer is None
        assert data.vocab_size == 100
        batches = data.batch(1) + data.batch(2)
    ids = np.concatenate([batch.tokens for batch in batches])
    assert ids.min() >= 0
    assert ids.max() < 100
    counts = np.bincount(ids.reshape(-1), minlength=100)
    assert ((counts - ids.size / 100) ** 2 / (ids.size / 100)).sum() < 149  # 99.9% quantile, 99 degrees


def test_shares_of_paths_are_kept_in_every_prefix(texts, other_texts):
    with opened({"text_files": {str(texts): 3.0, str(other_texts): 1.0}}) as data:
        stage = data.stage_of(1)
        assert [source.name for source in stage.sources] == [str(texts), str(other_texts)]
        source, _ = stage.order.locate(np.arange(160))
    assert np.abs(np.cumsum(source == 0) - 0.75 * np.arange(1, 161)).max() <= 2


# ---- what can be wrong -------------------------------------------------------------------------------------


def test_a_dataset_smaller_than_one_sample_is_named(tmp_path):
    (tmp_path / "a.txt").write_text("short")
    with pytest.raises(InputError, match=r"a\.txt: expected at least 33 tokens to train on .*, found \d+ in"):
        opened({"text_files": str(tmp_path / "a.txt")}, val_fraction=1e-9)


def test_a_token_beyond_the_models_vocabulary_is_named(texts, tmp_path):
    train_byte_level_bpe(["aa bb"], 300).save(tmp_path)
    message = r"token 2\d\d is not below model\.model_config\.vocab_size = 100; the tokenizer .* needs 2\d\d"
    with pytest.raises(InputError, match=message):
        opened({"text_files": str(texts)}, arch__vocab_size=100, tokenizer__tokenizer_name_or_path=str(tmp_path))
