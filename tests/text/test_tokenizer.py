"""Tokenizers: equal to `transformers`, saved and loaded, trained, and what is wrong with them."""

import json

import pytest

from kenotron.config.errors import InputError
from kenotron.data import TextTokenizer, load_tokenizer, open_run
from kenotron.text.byte_level_bpe import END_OF_TEXT, train_byte_level_bpe
from support.data_runs import run_config, validation_texts, write_texts

TEXTS = ["def main(x):\n    return x + 1\n\n\n", "été — 漢字 🙂\t\x00\x7f", "", "   ", "12345 x_y_z"]
TEXTS.append(f"a{END_OF_TEXT}b")


@pytest.fixture(scope="module")
def trained():
    return train_byte_level_bpe(["def main(x):\n    return x\n" * 20, "été 漢字 and words words words"] * 3, 320)


def test_encoding_equals_that_of_transformers(trained, tmp_path):
    import transformers

    trained.save(tmp_path)
    reference = transformers.AutoTokenizer.from_pretrained(str(tmp_path))
    assert trained.encode_batch(TEXTS) == [reference(text).input_ids for text in TEXTS]
    assert trained.eos_token_id == reference.eos_token_id
    assert trained.vocab_size == len(reference)
    for ids in trained.encode_batch(TEXTS):
        for skip in (False, True):
            assert trained.decode(ids, skip_special_tokens=skip) == reference.decode(ids, skip_special_tokens=skip)


def test_bytes_of_tokens_sum_to_the_bytes_of_the_text(trained):
    table = trained.token_bytes()
    assert table.shape == (trained.vocab_size,)
    for text in TEXTS:
        assert sum(table[token] for token in trained.encode(text)) == len(text.encode())


def test_a_special_token_that_is_in_the_text_has_bytes():
    made = train_byte_level_bpe(TEXTS, 300)
    made.backend.add_special_tokens(["<|user|>"])
    tokenizer = TextTokenizer(made.backend, made.config)
    text = f"<|user|>hé{END_OF_TEXT}"
    ids, table = tokenizer.encode(text), tokenizer.token_bytes()
    assert tokenizer.backend.token_to_id("<|user|>") in ids
    assert sum(table[token] for token in ids) == len(text.encode())


def test_saving_and_loading_gives_the_same_tokenizer_and_copies_the_files(trained, tmp_path):
    trained.save(tmp_path / "one")
    once = load_tokenizer(tmp_path / "one")
    (tmp_path / "one" / "chat_template.jinja").write_text("{{ messages }}")
    once.save(tmp_path / "two")
    twice = load_tokenizer(tmp_path / "two" / "tokenizer.json")
    assert trained.hash == once.hash == twice.hash
    assert trained.eos_token_id == once.eos_token_id == twice.eos_token_id == 0
    assert (tmp_path / "two" / "chat_template.jinja").read_text() == "{{ messages }}"


def test_special_tokens_are_found_in_either_file_and_either_form(trained, tmp_path):
    trained.save(tmp_path)
    last = trained.vocab_size - 1
    word = trained.backend.id_to_token(last)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"bos_token": {"content": word}, "eos_token": None}))
    (tmp_path / "special_tokens_map.json").write_text(json.dumps({"pad_token": END_OF_TEXT, "bos_token": END_OF_TEXT}))
    loaded = load_tokenizer(tmp_path)
    assert (loaded.bos_token_id, loaded.eos_token_id, loaded.pad_token_id) == (last, None, 0)


def test_a_revision_in_the_cache_is_the_one_asked_for(trained, tmp_path, monkeypatch):
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    repository = tmp_path / "models--someone--words"
    (repository / "refs").mkdir(parents=True)
    made = {"main": trained, "v2": train_byte_level_bpe(TEXTS, 290)}
    for commit, (name, tokenizer) in zip("ab", made.items()):
        (repository / "refs" / name).write_text(commit * 40)
        tokenizer.save(repository / "snapshots" / (commit * 40))
    for revision, name in ((None, "main"), ("main", "main"), ("v2", "v2"), ("b" * 40, "v2")):
        assert load_tokenizer("someone/words", revision).hash == made[name].hash


def test_truncation_and_padding_kept_in_a_file_are_off(trained, tmp_path):
    trained.save(tmp_path)
    spec = json.loads((tmp_path / "tokenizer.json").read_text())
    spec["truncation"] = {"direction": "Right", "max_length": 3, "strategy": "LongestFirst", "stride": 0}
    (tmp_path / "tokenizer.json").write_text(json.dumps(spec))
    text = "words and words and words"
    assert load_tokenizer(tmp_path).encode(text) == trained.encode(text)
    assert len(trained.encode(text)) > 3


def test_a_sentencepiece_like_tokenizer_is_not_byte_level():
    import tokenizers
    from tokenizers import decoders, models

    backend = tokenizers.Tokenizer(models.BPE({"a": 0, "b": 1}, []))
    backend.decoder = decoders.Metaspace()
    assert not TextTokenizer(backend, {}).is_byte_level
    assert TextTokenizer(backend, {}).token_bytes() is None


def test_a_trained_tokenizer_has_the_asked_size_and_never_meets_the_unknown():
    texts = (f"word{n} other{n * 7} thing" for n in range(500))
    tokenizer = train_byte_level_bpe(texts, 600)
    assert tokenizer.vocab_size == 600
    assert tokenizer.is_byte_level
    every_byte = "".join(map(chr, range(256))) + "𝄞"
    assert tokenizer.decode(tokenizer.encode(every_byte)) == every_byte


def test_a_run_trains_its_tokenizer_once_on_the_documents_that_are_not_held_out(tmp_path, monkeypatch):
    monkeypatch.setenv("KENOTRON_CACHE", str(tmp_path / "cache"))
    folder = write_texts(tmp_path / "texts")
    lines = []
    config = run_config({"text_files": str(folder)}, val_fraction=0.5)
    with open_run(config, report=lines.append) as data:
        held = list(validation_texts(data))
        kept = [text for file in sorted(folder.iterdir()) if (text := file.read_text()) not in held]
        assert 5 < len(held) < 35
        assert data.tokenizer.hash == train_byte_level_bpe(kept, 300).hash
    assert sum("training a tokenizer of 300 entries" in line for line in lines) == 1
    with open_run(config, report=lines.append):
        assert sum("training a tokenizer" in line for line in lines) == 1


def test_a_run_warns_of_tokens_that_its_model_does_not_have(trained, tmp_path):
    trained.save(tmp_path / "own")
    config = run_config(None, tokenizer__tokenizer_name_or_path=str(tmp_path / "own"), arch__vocab_size=290)
    found = f"vocab_size is 290, the tokenizer has {trained.vocab_size}: text with the others fails; set that"
    with open_run(config) as data:
        assert f"warning: model.model_config.{found}" in data.describe()


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("tokenizer.json", "{not json", r"tokenizer\.json is not a tokenizer\.json that `tokenizers` reads"),
        ("tokenizer_config.json", "{not json", r"tokenizer_config\.json is not JSON"),
    ],
)
def test_a_broken_file_is_named(trained, tmp_path, name, content, message):
    trained.save(tmp_path)
    (tmp_path / name).write_text(content)
    with pytest.raises(InputError, match=message):
        load_tokenizer(tmp_path)


def test_a_folder_without_a_tokenizer_and_a_vocabulary_below_the_bytes_are_named(tmp_path):
    with pytest.raises(InputError, match=r"tokenizer_name_or_path: the folder .* has no tokenizer"):
        load_tokenizer(tmp_path)
    with pytest.raises(InputError, match="at least 257"):
        train_byte_level_bpe(["text"], 100)
