"""A user's own data: by dotted path, an item or many samples at once; all that can be wrong with it."""

import pytest

from kenotron.config.errors import InputError
from kenotron.data import NO_LOSS
from support.data_runs import opened, rows, write_texts

SOURCE = """
import numpy as np
from kenotron.data import Samples, TokenSource

class Squares:
    def __init__(self, sequence_length, seed, scale=1):
        self.size, self.seed, self.scale = sequence_length + 1, seed, scale
    def __len__(self):
        return 50
    def __getitem__(self, i):
        return {"input_ids": [(i * self.scale + n) % 100 for n in range(self.size)]}

def lists(sequence_length, seed):
    return [np.full(sequence_length + 1, i) for i in range(40)]

class AtOnce:
    def __init__(self, sequence_length, seed):
        self.size = sequence_length + 1
    def __len__(self):
        return 1000
    def samples(self, indices):
        return (indices[:, None] + np.arange(self.size)).astype(np.uint16) % 500
    def documents(self, indices):
        return np.broadcast_to(np.arange(self.size) // 10, (len(indices), self.size))

def short(sequence_length, seed):
    return [[1, 2, 3]] * 10

def beyond(sequence_length, seed):
    return [[600] * (sequence_length + 1)] * 10

def wrong_key(sequence_length, seed):
    return [{"ids": [1]}] * 10

def nothing(sequence_length, seed):
    return []

def generator(sequence_length, seed):
    yield 1

class Broken(Squares):
    def __getitem__(self, i):
        raise RuntimeError("boom")

class BrokenAtOnce(AtOnce):
    def samples(self, indices):
        raise KeyError("boom")

def cannot_open(sequence_length, seed):
    raise FileNotFoundError("no such shard")

class OfKnownSize(TokenSource):
    # Says of itself how much there is, and what the console shows.
    name, bytes_per_token = "mine", 3.5
    def __init__(self, sequence_length, seed):
        self.size = sequence_length + 1
    def __len__(self):
        return 100
    def read(self, indices, document_ids=True):
        return Samples(np.zeros((len(indices), self.size), np.int64))
    def measure(self, unit):
        return {"tokens": 12345, "size": 678}[unit]
    def describe(self):
        return "mine: as many as I say"
"""


@pytest.fixture
def my_module(tmp_path, monkeypatch):
    (tmp_path / "my_sources.py").write_text(SOURCE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(__import__("sys").modules, "my_sources", raising=False)
    return "my_sources"


def test_a_source_of_ones_own_is_read_by_dotted_path(my_module):
    dataset = {"source": f"{my_module}.Squares", "kwargs": {"scale": 3}}
    with opened(dataset) as data:
        first = {row[0] for step in range(1, 11) for row in rows(data.batch(step)).values()}
        assert first == {3 * i % 100 for i in range(40)}  # 50 samples, the last 20% held out
        held = [row[0] for batch, *_ in data.validation() for row in batch.tokens.tolist()]
        assert sorted(held) == sorted(3 * i % 100 for i in range(40, 50))
    with opened({"source": f"{my_module}.lists"}) as data:
        assert all(len(set(row)) == 1 for row in rows(data.batch(1)).values())


def test_a_source_of_ones_own_may_answer_many_samples_at_once_with_documents(my_module):
    with opened({"source": f"{my_module}.AtOnce"}, model__document_masking=True) as data:
        for batch in data.batch(3):
            assert ((batch.tokens[:, 1:] - batch.tokens[:, :-1]) % 500 == 1).all()
            assert batch.documents.tolist() == [[t // 10 for t in range(32)]] * 2
            assert (batch.labels[:, 9] == NO_LOSS).all()


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("short", r"short\[\d+\]: expected 33 integer ids \(sequence_length \+ 1\), found int64 of shape \(3,\)"),
        ("beyond", r"beyond\[\d+\]: token 600 is not in \[0, vocab_size = 512\)"),
        ("Broken", r"dataset\.source: my_sources\.Broken\[\d+\] raised RuntimeError: boom"),
        ("BrokenAtOnce", r"dataset\.source: my_sources\.BrokenAtOnce\.samples\(\[.*\]\) raised KeyError: 'boom'"),
        ("Squares", r"unexpected keyword argument 'colour'"),
    ],
)
def test_a_bad_source_of_ones_own_is_named(my_module, name, message):
    kwargs = {"colour": 1} if name == "Squares" else {}

    def read():
        with opened({"source": f"{my_module}.{name}", "kwargs": kwargs}) as data:
            data.batch(1)

    with pytest.raises(InputError, match=message):
        read()


def test_bits_per_byte_are_unknown_where_a_source_of_the_mixture_is_no_text(my_module, tmp_path):
    texts = write_texts(tmp_path / "texts")
    parts = [{"weight": 1, "text_files": str(texts)}, {"weight": 1, "source": f"{my_module}.Squares"}]
    with opened({"mixture": parts}, tokenizer__train={"vocab_size": 300}) as data:
        batches = list(data.validation())
        assert len(batches) > 3
        assert {size for _, size, _ in batches} == {0.0}


def test_what_a_token_source_says_of_itself_is_what_counts(my_module):
    with opened({"source": f"{my_module}.OfKnownSize"}) as data:
        source = data.sources.source(data.stages[0], 0)
        assert (len(source), len(source.held_out)) == (80, 20)
        assert (source.measure("tokens"), source.measure("size")) == (12345, 678)
        assert source.describe() == "mine: as many as I say"
        assert source.held_out.bytes_per_token == 3.5
