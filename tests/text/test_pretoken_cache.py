"""Words kept by their ids give exactly the library's ids."""

from functools import cache
from itertools import chain

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import decoders, models, pre_tokenizers, trainers

from kenotron.text import pretoken_cache as words_module
from kenotron.text.byte_level_bpe import SPLIT_PATTERN, train_byte_level_bpe
from kenotron.text.file_documents import python_stdlib
from kenotron.text.pretoken_cache import CachedBPE

TEXTS = [chunk.text[:3000] for _, chunk in zip(range(60), python_stdlib().documents())]


def gpt2_like():
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=900, initial_alphabet=alphabet, show_progress=False)
    backend.train_from_iterator(TEXTS, trainer)
    return backend


def qwen2_like():
    backend = train_byte_level_bpe(TEXTS, 900).backend
    pattern = tokenizers.Regex(SPLIT_PATTERN.replace(r"\p{N}{1,3}", r"\p{N}"))
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Split(pattern, "isolated"), level])
    return backend


def llama3_like():
    return train_byte_level_bpe(TEXTS, 900).backend


KINDS = {"llama3": llama3_like, "qwen2": qwen2_like, "gpt2": gpt2_like}


@cache
def backend_of(name):
    return KINDS[name]()


@cache
def encoder_of(name):
    return CachedBPE.of(backend_of(name))


def by_library(backend, texts):
    return [backend.encode(text, add_special_tokens=False).ids for text in texts]


PARTS = st.sampled_from(
    [" ", "  ", "\n", "\r\n", "\t", "\x0b", "\x1c", "\x00", "\x7f", "'s", "'LL", "'", "a", "Word", "the", "_x", "1234"]
    + ["7", "...", "==", "é", "漢字", "\u00a0", "\u3000", "\x85", "\u2028", "’s", "🙂", "ſ", "\u212a", "e\u0301", "²"]
    + ["<|endoftext|>", "plain words that make most of it ASCII, as they must "]
)


@pytest.mark.parametrize("name", KINDS)
@given(texts=st.lists(st.one_of(st.lists(PARTS, max_size=25).map("".join), st.text(max_size=40)), max_size=4))
def test_ids_are_the_librarys(name, texts):
    assert encoder_of(name).encode(texts) == by_library(backend_of(name), texts)


@pytest.mark.parametrize("name", KINDS)
def test_ids_of_real_text_are_the_librarys_also_when_what_is_kept_overflows(name, monkeypatch):
    monkeypatch.setattr(words_module, "KEPT_WORDS", 100)
    expected = by_library(backend_of(name), TEXTS)
    for _ in range(2):
        parts = [encoder_of(name).encode(TEXTS[start : start + 7]) for start in range(0, 60, 7)]
        assert list(chain(*parts)) == expected


def test_tokenizers_of_another_kind_have_none():
    for part, value in (("normalizer", tokenizers.normalizers.NFC()), ("pre_tokenizer", pre_tokenizers.Whitespace())):
        backend = train_byte_level_bpe(TEXTS, 400).backend
        setattr(backend, part, value)
        assert CachedBPE.of(backend) is None
    backend = train_byte_level_bpe(TEXTS, 400).backend
    backend.model.dropout = 0.1
    assert CachedBPE.of(backend) is None
