"""Pieces of text: whole characters, and joined the same as decoding at once."""

import pytest
import tokenizers
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import decoders, models, pre_tokenizers

from kenotron.generation.text import UNFINISHED, StopStrings, TextStream
from kenotron.text.tokenizer import TextTokenizer


def byte_tokenizer():
    """One token a byte: every character beyond ASCII comes in parts."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = tokenizers.Tokenizer(models.BPE({c: i for i, c in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return TextTokenizer(backend, {})


def blank_before_word_tokenizer():
    """Words that carry their blank, as SentencePiece's do; a text's first blank is not written."""
    words = ["▁the", "▁cat", "▁sat", "s", "▁"]
    backend = tokenizers.Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="▁"))
    backend.decoder = decoders.Metaspace()
    return TextTokenizer(backend, {})


BYTES = byte_tokenizer()
texts = st.text(st.characters(exclude_categories=["Cs"], exclude_characters=UNFINISHED), max_size=20)


def pieces_of(tokenizer, prompt, tokens):
    stream = TextStream(tokenizer, prompt)
    return [*[stream.push(token) for token in tokens], stream.finish()]


@given(texts, texts)
@example("", "é中😀")
@example("中", "\n\n 中")
def test_pieces_joined_are_the_text_and_none_holds_half_a_character(prompt, text):
    pieces = pieces_of(BYTES, BYTES.encode(prompt), BYTES.encode(text))
    assert "".join(pieces) == text
    assert not any(UNFINISHED in piece for piece in pieces)


@given(st.lists(st.integers(0, 255), max_size=30))
def test_bytes_that_are_no_text_come_out_as_decoding_at_once_shows_them(tokens):
    assert "".join(pieces_of(BYTES, [], tokens)) == BYTES.decode(tokens)


def test_a_character_comes_when_its_last_byte_does():
    tokens = BYTES.encode("a中b")
    assert pieces_of(BYTES, [], tokens) == ["a", "", "", "中", "b", ""]


def test_a_prompt_of_ids_may_end_within_a_character():
    tokens = BYTES.encode("é")
    assert pieces_of(BYTES, tokens[:1], tokens[1:]) == ["é", ""]


@pytest.mark.parametrize("prompt", [[0], [0, 1]])
def test_blanks_between_words_survive_where_a_token_alone_would_lose_its_own(prompt):
    assert pieces_of(blank_before_word_tokenizer(), prompt, [1, 2, 3]) == [" cat", " sat", "s", ""]


@given(
    st.lists(st.text("ab\n", max_size=4), max_size=8),
    st.lists(st.text("ab\n", min_size=1, max_size=3), min_size=1, max_size=3),
)
@example(["a", "\n", "b", "\n\n", "a"], ["\n\n"])
def test_a_text_is_shown_up_to_the_first_stop_string_and_never_beyond(pieces, stops):
    stream, shown = StopStrings(stops), ""
    for number, piece in enumerate(pieces):
        read = "".join(pieces[: number + 1])
        shown += stream.push(piece)
        ends = [read.find(stop) for stop in stops if stop in read]
        assert stream.found == bool(ends)
        if ends:
            assert shown == read[: min(ends)]
            return
        assert read.startswith(shown)
    assert shown + stream.finish() == "".join(pieces)
