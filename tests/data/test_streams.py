"""A stream is the cached mode's documents in another order, and stands still and goes on anywhere."""

import functools
import gzip
import json
import os
import random
import shutil
import tracemalloc
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kenotron.config import Config, InputError
from kenotron.data import RunData, TokenBatch, open_run
from kenotron.data.cache import open_tokens
from kenotron.data.sources import stream as stream_module
from kenotron.data.sources.reader_shards import ShardRules, StreamReader, epoch_order, from_bytes, to_bytes
from kenotron.data.sources.stream import DocumentEncoder, Stream
from kenotron.kernels.hashing import derive_key, hash64
from kenotron.text.byte_level_bpe import train_byte_level_bpe
from kenotron.text.documents import DocumentChunk
from kenotron.text.encode import EncodeRules
from kenotron.text.file_documents import FileDocuments, find_files
from kenotron.text.hash_split import is_held_out, threshold_of_fraction
from kenotron.text.hub_datasets import HubDocuments
from kenotron.text.tokenizer import TextTokenizer, load_tokenizer
from support.data_runs import quiet, run_config

LENGTH = 32
FRACTION = 0.2
LIMIT = threshold_of_fraction(FRACTION)


@pytest.fixture(autouse=True)
def _small_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KENOTRON_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("kenotron.data.sources.reader_shards.BLOCK_CHARACTERS", 2000)


def words(generator: random.Random, count: int) -> str:
    letters = "abcdefgh é漢🙂\n"
    return " ".join("".join(generator.choice(letters) for _ in range(4)) for _ in range(count))


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> TextTokenizer:
    folder = tmp_path_factory.mktemp("tokenizer")
    train_byte_level_bpe([words(random.Random(0), 2000)], 300).save(folder)
    return load_tokenizer(folder)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Six files of every kind that is read, 100 documents."""
    import pyarrow as pa
    from pyarrow import parquet

    generator = random.Random(1)
    rows = [[words(generator, generator.randint(1, 60)) for _ in range(20)] for _ in range(5)]
    folder = tmp_path / "texts"
    folder.mkdir()
    lines = ["".join(json.dumps({"text": text}) + "\n" for text in texts).encode() for texts in rows]
    for name, content in {"a.jsonl": lines[0], "b.jsonl": lines[1], "c.jsonl.gz": gzip.compress(lines[2])}.items():
        (folder / name).write_bytes(content)
    parquet.write_table(pa.table({"text": rows[3]}), folder / "d.parquet", row_group_size=7)
    with pa.ipc.new_stream(folder / "e.arrow", pa.schema({"text": pa.string()})) as stream:
        stream.write_table(pa.table({"text": rows[4]}), max_chunksize=6)
    (folder / "f.txt").write_text(words(generator, 20_000).replace("\n", "\n\n"))  # several pieces
    return folder


def texts_of(folder: Path) -> FileDocuments:
    return FileDocuments(folder.name, find_files(folder, "test"))


def stream_of(
    texts: Any, tokenizer: Any, buffer: int = 10, shards: int = 1, max_tokens: int | None = None, vocab_size: int = 300
) -> Stream:
    encode = DocumentEncoder(texts.name, tokenizer, EncodeRules(0, max_tokens), vocab_size)
    rules = ShardRules(texts, encode, LENGTH, 5, buffer, shards, FRACTION, single_pieces=max_tokens is not None)
    return Stream(rules, encode, print)


def epoch_of(stream: Stream, epoch: int) -> list[tuple[int, ...]]:
    """The documents that are drawn in one epoch."""
    one = StreamReader(stream.rules)
    documents = []
    while True:
        text = one._draw()
        if one._epoch > epoch:
            return documents
        if one._epoch == epoch:
            documents.append(tuple(stream.encode([text])[0].tolist()))


SLOW = functools.partial(pytest.param, marks=pytest.mark.slow)

# ---- what is read ------------------------------------------------------------------------------------------


@pytest.mark.cases(2)
@pytest.mark.parametrize(("shards", "buffer"), [(1, 7), (3, 1), (3, 7), SLOW(1, 1), SLOW(1, 1000), SLOW(3, 1000)])
@pytest.mark.parametrize("max_tokens", [None, 20])
def test_an_epoch_is_the_documents_of_the_cached_mode(
    folder: Path, tokenizer: TextTokenizer, shards: int, buffer: int, max_tokens: int | None
) -> None:
    cached = open_tokens(texts_of(folder), tokenizer, EncodeRules(0, max_tokens), FRACTION, report=lambda line: None)
    parts = np.split(np.asarray(cached.train.tokens), cached.train.ends.astype(np.int64))[:-1]
    expected = Counter(tuple(part.tolist()) for part in parts)
    stream = stream_of(texts_of(folder), tokenizer, buffer, shards, max_tokens=max_tokens)
    for epoch in (0, 1):
        assert Counter(epoch_of(stream, epoch)) == expected


def test_a_buffer_of_one_is_the_files_in_their_order_token_for_token(folder: Path, tokenizer: TextTokenizer) -> None:
    cached = open_tokens(texts_of(folder), tokenizer, EncodeRules(0, None), FRACTION, report=lambda line: None)
    stream = stream_of(texts_of(folder), tokenizer, buffer=1)
    tokens = np.asarray(cached.train.tokens)
    count = (len(tokens) - 1) // LENGTH
    windows = stream.read(np.arange(count)).tokens
    assert np.array_equal(windows, np.stack([tokens[i * LENGTH : i * LENGTH + LENGTH + 1] for i in range(count)]))
    numbers = np.searchsorted(cached.train.ends, np.arange(count * LENGTH + 1, dtype=np.uint64), side="right")
    found = stream.read(np.arange(count)).document_ids
    for row in range(count):
        expected = numbers[row * LENGTH : row * LENGTH + LENGTH + 1]
        assert np.array_equal(found[row] - found[row][0], expected - expected[0])


class ListTexts:
    """Documents in lists."""

    def __init__(self, parts: list[list[str]]) -> None:
        self.lists, self.name = parts, "lists"

    @property
    def parts(self) -> int:
        return len(self.lists)

    def chunks_from(self, part: int, place: int) -> Iterator[DocumentChunk]:
        for number, text in enumerate(self.lists[part][place:], start=place + 1):
            yield DocumentChunk(text, number)

    def fingerprint(self, times: bool) -> str:
        return "lists"


def shard_rules(texts: Any, buffer: int, shards: int, length: int) -> ShardRules:
    """Every character of a document is its code as a token; 0 ends it."""

    def encode(documents: Any) -> Any:
        ids = [[*map(ord, "".join(document)), 0] for document in documents]
        return np.concatenate([np.array(each, np.uint32) for each in ids]), np.array([len(each) for each in ids])

    return ShardRules(texts, encode, length, 3, buffer, shards, FRACTION, False)


def naive_tokens(rules: ShardRules, epochs: int) -> list[int]:
    """The same by a plain loop over whole lists."""
    tokens: list[int] = []
    for epoch in range(epochs):
        order = epoch_order(rules, epoch)
        lists = rules.texts.lists  # type: ignore[attr-defined]
        of_shards = [
            [t for p in order[shard :: rules.shards] for t in lists[p] if not is_held_out(t, LIMIT)]
            for shard in range(rules.shards)
        ]
        waiting = [t for turn in zip_longest(*of_shards) for t in turn if t is not None]
        key, buffer, drawn = derive_key("shuffle buffer", rules.seed, 0, epoch), [], 0
        while waiting or buffer:
            while waiting and len(buffer) < rules.shuffle_buffer:
                buffer.append(waiting.pop(0))
            chosen = hash64(key, drawn) * len(buffer) // 2**64
            buffer[chosen], buffer[-1] = buffer[-1], buffer[chosen]
            tokens += [*map(ord, buffer.pop()), 0]
            drawn += 1
    return tokens


documents = st.lists(st.text("abcdefgh", min_size=0, max_size=9), max_size=30)


@given(st.lists(documents, min_size=1, max_size=6), st.integers(1, 12), st.integers(1, 9), st.data())
def test_a_reader_against_a_plain_loop_and_put_down_anywhere(parts: Any, buffer: int, length: int, data: Any) -> None:
    block = data.draw(st.sampled_from([1, 30, 1000]))
    rules = shard_rules(ListTexts(parts), buffer, data.draw(st.integers(1, len(parts))), length)
    expected = naive_tokens(rules, 3)
    if not expected:
        with pytest.raises(InputError, match="no document to train on"):
            StreamReader(rules).next()
        return
    windows = min((len(expected) - 1) // length, 40)
    shard, put_down = StreamReader(rules), data.draw(st.sets(st.integers(0, max(windows - 1, 0))))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("kenotron.data.sources.reader_shards.BLOCK_CHARACTERS", block)
        for window in range(windows):
            if window in put_down:
                shard = StreamReader(rules, from_bytes(to_bytes(shard.position, {"a": 1}), {"a": 1}, "here"))
            assert shard.next()[0].tolist() == expected[window * length : (window + 1) * length + 1]
            assert shard.position.emitted == window + 1


# ---- runs --------------------------------------------------------------------------------------------------


@pytest.fixture
def config_of(folder: Path, tokenizer: TextTokenizer) -> Callable[..., Config]:
    def made(buffer: int = 10, shards: int = 1, **changes: Any) -> Config:
        dataset = {"text_files": str(folder), "streaming": {"shuffle_buffer": buffer, "reader_shards": shards}}
        given = {"limit_val_batches": 1, "train_steps": 12, "tokenizer__tokenizer_name_or_path": str(tokenizer.folder)}
        return run_config(dataset, **given | changes)

    return made


def steps_of(data: RunData, steps: Any, rank: int = 0, size: int = 1) -> dict[int, list[TokenBatch]]:
    return {step: data.batch(step, rank, size) for step in steps}


def by_sample(batches: dict[int, list[TokenBatch]]) -> dict[int, tuple[list[int], list[int]]]:
    return {
        int(sample): (tokens.tolist(), labels.tolist())
        for step in batches.values()
        for batch in step
        for sample, tokens, labels in zip(batch.sample_ids, batch.tokens, batch.labels)
    }


def saved(data: RunData, step: int) -> dict[str, bytes]:
    return {name: make() for name, make in data.streams.states(step).items()}


def read_whole(config: Config, stop: int = 13) -> dict[int, Any]:
    with open_run(config, report=quiet) as data:
        return by_sample(steps_of(data, range(1, stop)))


def states_after(config: Config, step: int, ahead: int = 0) -> dict[str, bytes]:
    """What is saved at `step` of a run that has read some steps further."""
    with open_run(config, report=quiet) as data:
        steps_of(data, range(1, step + 1 + ahead))
        return saved(data, step)


def resumed(config: Config, step: int, states: dict[str, bytes], stop: int = 13, **place: int) -> dict[int, Any]:
    with open_run(config, step + 1, report=quiet) as data:
        data.streams.restore(step, states.get)
        return by_sample(steps_of(data, range(step + 1, stop), **place))


def test_what_a_stream_leaves_out_is_said_while_it_is_read(tmp_path: Path, tokenizer: TextTokenizer) -> None:
    lines = [f'{{"text": "{"word " * 4}{number}"}}' for number in range(30)]
    lines[3:3], lines[20:20] = ['{"text": null}'] * 9, ['{"text": 5}'] * 3
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    dataset = {"text_files": str(tmp_path / "a.jsonl"), "streaming": {"shuffle_buffer": 1}, "on_bad_document": "skip"}
    config = run_config(dataset, val_check_interval=-1, tokenizer__tokenizer_name_or_path=str(tokenizer.folder))
    said: list[str] = []
    with open_run(config, report=said.append) as data:
        steps_of(data, range(1, 13))
    left_out = [line for line in said if "left out as not readable" in line]
    assert [line.partition(" so far)")[0].rpartition("(")[2] for line in left_out][:4] == ["1", "2", "3", "10"]
    assert left_out[0].endswith("a.jsonl:4: column 'text' must hold text, found null")
    assert "must hold text, found int" in left_out[3]


@pytest.mark.parametrize(("shards", "masking"), [(1, True), SLOW(3, False), (4, True), SLOW(6, False)])
def test_samples_do_not_depend_on_ranks_and_resume_anywhere_on_another_layout(
    config_of: Callable[..., Config], shards: int, masking: bool
) -> None:
    config = config_of(shards=shards, model__document_masking=masking)
    whole = read_whole(config)
    assert len(whole) == 12 * 4
    for resume in (1, 8):
        states: dict[str, bytes] = {}
        for rank in range(2):
            with open_run(config, report=quiet) as data:
                found = by_sample(steps_of(data, range(1, resume + 3), rank, 2))  # made ahead of the save
                assert found.items() <= whole.items()
                for name, state in saved(data, resume).items():
                    assert states.setdefault(name, state) == state
        assert states.keys() == {"stream-0-shard-0.json.gz"}
        for ranks in (1, 2):
            again: dict[int, Any] = {}
            for rank in range(ranks):
                again |= resumed(config, resume, states, rank=rank, size=ranks)
            assert again == {sample: found for sample, found in whole.items() if sample >= 4 * resume}


def test_going_back_reads_again_what_was_read(config_of: Callable[..., Config]) -> None:
    with open_run(config_of(shards=3), report=quiet) as data:
        first = by_sample(steps_of(data, range(1, 13)))
        assert by_sample(steps_of(data, [12, 3, 4, 11, 1])).items() <= first.items()


def test_mixtures_and_stages_go_on_with_the_same_stream(folder: Path, tmp_path: Path, tokenizer: TextTokenizer) -> None:
    other = shutil.copytree(folder, tmp_path / "other")
    a = {"text_files": str(folder), "streaming": {"shuffle_buffer": 5, "reader_shards": 2}}
    b = {"text_files": str(other), "streaming": {"shuffle_buffer": 1}}
    mixture = {"mixture": [{"weight": 3} | a, {"weight": 1} | b]}
    named = {"tokenizer__tokenizer_name_or_path": str(tokenizer.folder)}
    config = run_config(mixture, a, train_steps=12, limit_val_batches=1, **named)
    whole = read_whole(config)
    with open_run(config, report=quiet) as data:
        windows = data.stage_of(7).sources[0].read(np.arange(18, 42)).tokens  # stage 0 took 3/4 of its 24 samples
        assert [whole[sample][0] for sample in range(24, 48)] == windows[:, :-1].tolist()
    for resume in (3, 6, 7):
        states = states_after(config, resume)
        assert len(states) == (2 if resume < 7 else 1)
        assert resumed(config, resume, states).items() <= whole.items()


def test_a_stream_goes_on_behind_a_stage_that_reads_others(folder: Path, tmp_path: Path, tokenizer: Any) -> None:
    """Its state is in the checkpoints of the stage between, though nothing reads it there; batches are made ahead."""
    other = {"text_files": str(shutil.copytree(folder, tmp_path / "other")), "streaming": {"shuffle_buffer": 1}}
    first = {"text_files": str(folder), "streaming": {"shuffle_buffer": 5, "reader_shards": 2}}
    named = {"tokenizer__tokenizer_name_or_path": str(tokenizer.folder)}
    config = run_config(first, other, {"dataset": first, "start": 13}, train_steps=16, limit_val_batches=1, **named)
    whole = read_whole(config, 17)
    for resume in (7, 12):
        states = states_after(config, resume, ahead=2)
        assert len(states) == 2
        with open_run(config, resume + 1, report=quiet) as data:  # and put down once more before it is read
            data.streams.restore(resume, states.get)
            assert by_sample(steps_of(data, range(resume + 1, 13))).items() <= whole.items()
            states = saved(data, 12)
        assert resumed(config, 12, states, 17).items() <= whole.items()


def test_validation_is_the_first_held_out_documents_and_knows_their_bytes(folder: Path, config_of: Any) -> None:
    with open_run(config_of(), report=quiet) as data:
        held = data.held_out()
        assert len(held) >= 4
        batches = list(data.validation())
        assert sum(len(batch.tokens) for batch, *_ in batches) == 4
        assert all(size > 0 for _, size, _ in batches)
        texts = texts_of(folder)
        first = next(p.text for part in range(6) for p in texts.chunks_from(part, 0) if is_held_out(p.text, LIMIT))
        assert data.tokenizer is not None
        assert first.startswith(data.tokenizer.decode(held.sources[0].read(np.array([0])).tokens[0][:5].tolist())[:3])
    with pytest.raises(InputError, match=r"^tokens\.val_samples: expected a number for the stream"):
        open_run(config_of(limit_val_batches=-1), report=quiet)
    with open_run(config_of(limit_val_batches=-1, val_samples=3), report=quiet) as data:
        assert len(data.held_out()) >= 3


def test_one_process_reads_the_start_for_validation_and_the_others_its_cache(
    folder: Path, config_of: Callable[..., Config], monkeypatch: pytest.MonkeyPatch
) -> None:
    reads = []
    first_held_out = stream_module.first_held_out

    def counted(*args: Any) -> Any:
        reads.append(args)
        return first_held_out(*args)

    def validation_tokens() -> list[list[int]]:
        with open_run(config_of(), report=quiet) as data:
            return [row.tolist() for batch, *_ in data.validation() for row in batch.tokens]

    monkeypatch.setattr(stream_module, "first_held_out", counted)
    young = validation_tokens()  # times of files that have just changed prove nothing, so nothing is kept
    assert (validation_tokens(), len(reads)) == (young, 2)
    for file in folder.iterdir():
        os.utime(file, (1e9, 1e9))
    assert (validation_tokens(), validation_tokens(), len(reads)) == (young, young, 3)
    (folder / "a.jsonl").write_text((folder / "b.jsonl").read_text())
    os.utime(folder / "a.jsonl", (2e9, 1.1e9))
    assert validation_tokens() != young
    assert len(reads) == 4
    for ends in (folder.parent / "cache/tokens").glob("*/ends.npy"):
        ends.write_bytes(b"")
    with pytest.raises(InputError, match="damaged token cache; delete it"):
        validation_tokens()


# ---- what is refused ---------------------------------------------------------------------------------------


def test_states_of_other_streams_are_refused(folder: Path, config_of: Callable[..., Config]) -> None:
    config = config_of(shards=2)
    states = states_after(config, 2)

    def refused(config: Config, match: str, states: dict[str, bytes] = states, step: int = 2) -> None:
        with pytest.raises(InputError, match=match):
            resumed(config, step, states)

    refused(config, r"^data/stream-0-shard-0\.json\.gz: missing in the checkpoint of step 2", {})
    refused(config, "expected a stream after 12 samples, found 8", step=3)
    refused(config_of(shards=2, buffer=11), "shuffle_buffer is 10 there and 11 in this run")
    refused(config_of(shards=3), "reader_shards is 2 there and 3 in this run")
    refused(config, "not the state of a stream", dict.fromkeys(states, b"rubbish"))
    with (folder / "a.jsonl").open("a") as file:
        file.write(json.dumps({"text": "one more"}) + "\n")
    refused(config, "the state of another stream: files is")


@pytest.mark.parametrize(
    ("damage", "line"),
    [
        ("cut", r"c\.jsonl\.gz: damaged gzip file, near byte \d+"),
        ("bytes", r"b\.jsonl:2: not UTF-8"),
        ("gone", r"a\.jsonl: cannot read: No such file"),
        ("grown", r"a\.jsonl: changed while the run was reading it"),
        ("vocabulary", r"token \d+ is not below model\.model_config\.vocab_size = 200"),
    ],
)
def test_what_cannot_be_read_is_one_line_with_its_place(folder: Path, tokenizer: Any, damage: str, line: str) -> None:
    if damage == "cut":
        os.truncate(folder / "c.jsonl.gz", (folder / "c.jsonl.gz").stat().st_size // 2)
    elif damage == "bytes":
        lines = (folder / "b.jsonl").read_bytes().split(b"\n")
        (folder / "b.jsonl").write_bytes(b"\n".join([lines[0], b'{"text": "\xff"}', *lines[1:]]))
    texts = texts_of(folder)
    if damage == "gone":
        (folder / "a.jsonl").unlink()
    elif damage == "grown":
        (folder / "a.jsonl").open("a").write("{}\n")
    stream = stream_of(texts, tokenizer, buffer=3, vocab_size=200 if damage == "vocabulary" else 300)
    with pytest.raises(InputError, match=line) as caught:
        stream.read(np.arange(3000))
    assert "\n" not in str(caught.value)


# ---- memory and long texts ---------------------------------------------------------------------------------


def test_a_text_that_is_too_long_to_be_encoded_at_once_is_named(tokenizer: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr("kenotron.data.sources.stream.LONGEST_TEXT", 1000)
    encode = DocumentEncoder("test", tokenizer, EncodeRules(0, None), 300)
    with pytest.raises(InputError, match=r"a document of 3,000 characters, 'xxxx.*is encoded at once"):
        encode([["x" * 3000]])


@pytest.mark.slow
def test_memory_is_bounded_on_a_long_stream(tmp_path: Path, tokenizer: TextTokenizer) -> None:
    generator = random.Random(2)
    some = [words(generator, 200) for _ in range(50)]
    folder = tmp_path / "long"
    folder.mkdir()
    for number in range(2):
        rows = (json.dumps({"text": f"{i} {some[i % 50]}"}) + "\n" for i in range(6000))
        (folder / f"{number}.jsonl").write_text("".join(rows))
    stream = stream_of(texts_of(folder), tokenizer, buffer=100)
    stream.read(np.arange(2))
    tracemalloc.start()
    first, peak = 2, []
    for step in range(1, 25):
        indices = np.arange(first, first + 400)
        stream.read(indices)
        stream.advance(step, first := first + 400)
        peak.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.reset_peak()
    tracemalloc.stop()
    assert max(peak[12:]) < 1.3 * max(peak[4:12])
    assert max(peak) < 40e6


def test_a_hugging_face_folder_is_streamed_by_its_files_and_goes_on_anywhere(tmp_path: Path, tokenizer: Any) -> None:
    import datasets

    generator = random.Random(7)
    rows = [words(generator, 20) for _ in range(60)]
    (tmp_path / "files").mkdir()
    for number in range(3):
        lines = "".join(json.dumps({"text": text}) + "\n" for text in rows[number::3])
        (tmp_path / "files" / f"{number}.jsonl").write_text(lines)
    datasets.Dataset.from_dict({"text": rows}).save_to_disk(tmp_path / "saved", num_shards=3)
    for name in ("files", "saved"):
        texts = HubDocuments(str(tmp_path / name), streaming=True)
        assert texts.parts == 3
        assert sorted(piece.text for part in range(3) for piece in texts.chunks_from(part, 0)) == sorted(rows)
        rest = [piece.text for piece in texts.chunks_from(1, 7)]
        assert rest == [piece.text for piece in texts.chunks_from(1, 0)][7:]
        assert stream_of(texts, tokenizer, shards=3).read(np.arange(9)).tokens.shape == (9, LENGTH + 1)
