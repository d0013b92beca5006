"""A user's own data: by dotted path, an item or many samples at once; all that can be wrong with it."""

import numpy as np
import pytest

from kenotron.config.errors import InputError
from kenotron.data import Samples, TokenSource
from support.data_runs import opened, rows, write_texts


class Squares:
    def __init__(self, sequence_length, seed, scale=1):
        self.size, self.scale = sequence_length + 1, scale

    def __len__(self):
        return 50

    def __getitem__(self, i):
        return {"input_ids": [(i * self.scale + n) % 100 for n in range(self.size)]}


class Broken(Squares):
    def __getitem__(self, i):
        raise RuntimeError("boom")


class BrokenAtOnce(Squares):
    def samples(self, indices):
        raise KeyError("boom")


class OneTooFew(Squares):
    def samples(self, indices):
        return np.zeros((len(indices) - 1, self.size), np.int64)


class OfKnownSize(TokenSource):
    """Says of itself how much there is, and what the console shows."""

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


def lists(sequence_length, seed):
    return [np.full(sequence_length + 1, i) for i in range(40)]


def short(sequence_length, seed):
    return [[1, 2, 3]] * 10


def beyond(sequence_length, seed):
    return [[600] * (sequence_length + 1)] * 10


def test_a_source_of_ones_own_is_read_by_dotted_path():
    dataset = {"source": f"{__name__}.Squares", "kwargs": {"scale": 3}}
    with opened(dataset) as data:
        first = {row[0] for step in range(1, 11) for row in rows(data.batch(step)).values()}
        assert first == {3 * i % 100 for i in range(40)}  # 50 samples, the last 20% held out
        held = [row[0] for batch, *_ in data.validation() for row in batch.tokens.tolist()]
        assert sorted(held) == sorted(3 * i % 100 for i in range(40, 50))
    with opened({"source": f"{__name__}.lists"}) as data:
        assert all(len(set(row)) == 1 for row in rows(data.batch(1)).values())


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("short", r"short\[\d+\]: expected 33 integer ids \(sequence_length \+ 1\), found int64 of shape \(3,\)"),
        ("beyond", r"beyond\[\d+\]: token 600 is not in \[0, vocab_size = 512\)"),
        ("Broken", r"dataset\.source: test_user_sources\.Broken\[\d+\] raised RuntimeError: boom"),
        (
            "BrokenAtOnce",
            r"dataset\.source: test_user_sources\.BrokenAtOnce\.samples\(\[.*\]\) raised KeyError: 'boom'",
        ),
        (
            "OneTooFew",
            r"OneTooFew\[\d+\]: expected 33 integer ids \(sequence_length \+ 1\), found int64 of shape \(3, 33\)",
        ),
        ("Squares", r"unexpected keyword argument 'colour'"),
    ],
)
def test_a_bad_source_of_ones_own_is_named(name, message):
    dataset = {"source": f"{__name__}.{name}", "kwargs": {"colour": 1} if name == "Squares" else {}}
    with pytest.raises(InputError, match=message), opened(dataset) as data:
        data.batch(1)


def test_bits_per_byte_are_unknown_where_a_source_of_the_mixture_is_no_text(tmp_path):
    texts = write_texts(tmp_path / "texts")
    parts = [{"weight": 1, "text_files": str(texts)}, {"weight": 1, "source": f"{__name__}.Squares"}]
    with opened({"mixture": parts}, tokenizer__train={"vocab_size": 300}) as data:
        batches = list(data.validation())
        assert len(batches) > 3
        assert {size for _, size, _ in batches} == {0.0}


def test_what_a_token_source_says_of_itself_is_what_counts():
    with opened({"source": f"{__name__}.OfKnownSize"}) as data:
        source = data.sources.source(data.stages[0], 0)
        assert (len(source), len(source.held_out)) == (80, 20)
        assert (source.measure("tokens"), source.measure("size")) == (12345, 678)
        assert source.describe() == "mine: as many as I say"
        assert source.held_out.bytes_per_token == 3.5
