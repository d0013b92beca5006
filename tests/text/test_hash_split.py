"""Which documents are held out, and where they start and end."""

import json

import numpy as np
import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from kenotron.data import open_run
from kenotron.data.cache import EncodeRules, open_tokens
from kenotron.text.byte_level_bpe import train_byte_level_bpe
from kenotron.text.documents import DocumentChunk
from kenotron.text.file_documents import FileDocuments, find_files
from kenotron.text.hash_split import hash_threshold, is_held_out, text_hash, threshold_of_fraction
from kenotron.text.tokenizer import TextTokenizer
from support.data_runs import quiet, run_config, validation_texts, write_texts

RULES = EncodeRules(eos=0, max_tokens=None)


@pytest.fixture(scope="module")
def tokenizer():
    return train_byte_level_bpe(["chapter abc " * 20], 300)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("KENOTRON_CACHE", str(tmp_path / "cache"))
    return write_texts(tmp_path / "texts")


@given(st.lists(st.text(), min_size=1), st.floats(1e-9, 0.5))
def test_something_is_held_out_and_something_left_of_any_two_texts(texts, fraction):
    limit = hash_threshold((DocumentChunk(text, 0) for text in texts), fraction)
    held = [is_held_out(text, limit) for text in texts]
    below = [text_hash(text) < fraction * 2**64 for text in texts]
    texts_of_words = {text for text in texts if text.strip()}
    if len(texts_of_words) < 2 or any(text_hash(text) < fraction * 2**64 for text in texts_of_words):
        assert held == below
    else:
        held_out = {text for text, side in zip(texts, held) if side} & texts_of_words
        assert held_out == {min(texts_of_words, key=text_hash)}


def test_where_no_hash_falls_below_the_fraction_the_smallest_is_held_out(folder, tokenizer):
    texts = FileDocuments("texts", find_files(folder, "text_files"))
    hashes = {text: text_hash(text) for text, *_ in texts.documents()}
    opened = open_tokens(texts, tokenizer, RULES, 1e-12, report=quiet)
    assert opened.smallest_hash
    assert opened.validation.tokens.tolist() == [*tokenizer.encode(min(hashes, key=hashes.get)), 0]
    assert len(opened.train.ends) == len(hashes) - 1
    assert not open_tokens(texts, tokenizer, RULES, 0.3, report=quiet).smallest_hash


def test_a_long_text_ends_once_and_where_its_next_piece_is_held_out(folder, tokenizer):
    chunks = [f"chapter {number} " + "abc " * 30 + "\n\n" for number in range(30)]
    (folder / "long.txt").write_text("".join(chunks))
    texts = FileDocuments("long", [folder / "long.txt"], chunk=100)
    assert [(text, last) for text, _, last, *_ in texts.documents()] == [(p, p is chunks[-1]) for p in chunks]
    opened = open_tokens(texts, tokenizer, RULES, 0.3, report=quiet)
    held = [is_held_out(text, threshold_of_fraction(0.3)) for text in chunks]
    assert 3 < sum(held) < 20
    for split, side in ((opened.train, False), (opened.validation, True)):
        expected, ends = [], []
        for number, text in enumerate(chunks):
            if held[number] == side:
                expected += tokenizer.encode(text)
                if number == 29 or held[number + 1] != side:
                    expected.append(0)
                    ends.append(len(expected))
        assert split.tokens.tolist() == expected
        assert split.ends.tolist() == ends
    assert len(opened.train.ends) < 30 - sum(held)
    cut = open_tokens(texts, tokenizer, EncodeRules(0, 5), 0.3, report=quiet)
    assert len(cut.train.ends) == 30 - sum(held)  # of chunks cut to a number of tokens, each is a document


def test_a_piece_inside_a_document_gets_no_start_token_of_the_tokenizer(folder, tokenizer):
    spec, end = json.loads(tokenizer.to_json()), "<|endoftext|>"
    special, whole = {"SpecialToken": {"id": end, "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}
    spec["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [special, whole, special],
        "pair": [whole, {"Sequence": {"id": "B", "type_id": 0}}],
        "special_tokens": {end: {"id": end, "ids": [0], "tokens": [end]}},
    }
    framing = TextTokenizer(tokenizers.Tokenizer.from_str(json.dumps(spec)), {})
    assert [framing.encode("abc")[place] for place in (0, -1)] == [0, 0]
    (folder / "long.txt").write_text("abc abc\n\n" * 100)
    texts = FileDocuments("long", [folder / "long.txt"], chunk=900)
    texts.chunk = 50
    tokens = open_tokens(texts, framing, RULES, 1e-12, report=quiet)
    stream = [*tokens.train.tokens.tolist()]
    assert len(list(texts.documents())) > 5
    assert [place for place, token in enumerate(stream) if token == 0] == [0, len(stream) - 1]


@pytest.mark.parametrize("streaming", [None, {"shuffle_buffer": 1}])
@pytest.mark.parametrize("later", [False, True])
def test_what_a_small_set_holds_out_no_other_text_of_the_run_trains_on(tmp_path, monkeypatch, streaming, later):
    """Of `small` the second document has the smallest hash, of `other`, which holds it too, the first."""
    monkeypatch.setenv("KENOTRON_CACHE", str(tmp_path / "cache"))
    words = sorted((f"document {number} of nothing much" for number in range(40)), key=text_hash)
    held, texts = words[1], {"small": words[1:20], "other": words[:2] + words[20:]}
    for name, documents in texts.items():
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in documents))
    small, other = ({"text_files": str(tmp_path / f"{name}.jsonl")} for name in texts)
    other = other | {"streaming": streaming}
    stages = [small, other] if later else [{"mixture": [{"weight": 1} | small, {"weight": 1} | other]}]
    with open_run(run_config(*stages, val_fraction=1e-12, val_samples=4), report=quiet) as data:
        opened = data.stage_of(12).sources[-1]
        read = opened.read(np.arange(30)).tokens[:, :-1].ravel() if streaming else opened.cache.train.tokens
        text = data.tokenizer.decode(read)
        assert held not in text
        assert sum(other in text for other in words[20:]) == 20  # all the others are trained on
        validated = data.stage_of(1).sources[0].cache.validation.tokens
        assert data.tokenizer.decode(validated, skip_special_tokens=True) == held
        if streaming is None:  # what is held out for another's sake is validated on where that is done
            side = opened.cache.validation
            assert len(side.ends) == 2
            assert len(list(validation_texts(data))) == (1 if later else 3)
