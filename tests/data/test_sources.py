"""Windows of a token stream, against the definition read token by token."""

from pathlib import Path

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from kenotron.data import NO_LOSS
from kenotron.data.batch import PAD, make_batch
from kenotron.data.cache import SplitTokens
from kenotron.data.sources.random_tokens import RandomTokens
from kenotron.data.sources.token_folder import TokenFolder
from kenotron.data.sources.windows import HeldOutWindows


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
