"""Prompts and answers: the tokens are the tokenizer's own, and the loss covers those of the answers alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kenotron.config.errors import InputError
from kenotron.data import NO_LOSS, open_run
from kenotron.text.byte_level_bpe import train_byte_level_bpe
from kenotron.text.chat_template import chat_template
from kenotron.text.file_documents import FileDocuments
from kenotron.text.sft import Columns, Example, SftDocuments, chat_segments, encode_examples
from kenotron.text.tokenizer import TextTokenizer, load_tokenizer
from support.data_runs import quiet, run_config, write_texts

PAIRS = [{"prompt": f"{a} + {b} =", "completion": f" {a + b}"} for a in range(8) for b in range(8)]
CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "What is 2 + 2?"},
    {"role": "assistant", "content": "It is 4."},
    {"role": "user", "content": "And é漢?\n"},
    {"role": "assistant", "content": "No  number.\n\n    Indented 漢."},
]
CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}"
    "{% if m['role'] == 'assistant' %}[[{{ m['content'] + '<|im_end|>' }}]]{% else %}{{ m['content'] + '<|im_end|>' }}"
    "{% endif %}{{ '\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
PLAIN = CHATML.replace("[[", "").replace("]]", "")
TAGGED = CHATML.replace("[[", "{% generation %}").replace("]]", "{% endgeneration %}")
END = "<|im_end|>"


def write_tokenizer(folder: Path, template: str | None = PLAIN, trimmed: bool = True) -> Path:
    """A byte-level tokenizer of 300 entries and two of a chat, with the offsets that GPT-2's has (or whole ones)."""
    from tokenizers import processors

    made = train_byte_level_bpe([json.dumps(PAIRS), *(m["content"] for m in CHAT)] * 3, 300)
    made.backend.add_special_tokens(["<|im_start|>", END])
    if trimmed:
        made.backend.post_processor = processors.ByteLevel(trim_offsets=True)  # type: ignore[assignment]
    config = made.config | {"eos_token": END, "chat_template": template}
    TextTokenizer(made.backend, config).save(folder)
    return folder


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> TextTokenizer:
    return load_tokenizer(write_tokenizer(tmp_path_factory.mktemp("trimmed")))


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> TextTokenizer:
    return load_tokenizer(write_tokenizer(tmp_path_factory.mktemp("whole"), trimmed=False))


def encode(tokenizer: TextTokenizer, segments: list[tuple[str, bool]], special: bool, limit: int | None = None) -> Any:
    text = Example(segments, special).to_json()
    return encode_examples(tokenizer.backend, [text], tokenizer.eos_token_id, limit)[0]


TEXT = st.text(st.sampled_from("ab 1+=\n.é漢🙂") | st.characters(codec="utf-8"), min_size=1, max_size=12)


@given(prompt=TEXT, answer=TEXT.filter(str.strip))
def test_a_token_is_in_the_loss_if_it_holds_a_byte_of_the_answer(whole: Any, prompt: str, answer: str) -> None:
    found = encode(whole, [(prompt, False), (answer, True)], special=True)
    assert found.ids == [*whole.encode(prompt + answer), whole.eos_token_id]
    sizes = whole.token_bytes()
    assert sizes is not None
    ends = np.cumsum(sizes[found.ids[:-1]])
    assert found.loss_mask.tolist() == [*(ends > len(prompt.encode())), True]
    assert found.bytes == len((prompt + answer).encode())


def test_a_token_of_prompt_and_answer_is_in_the_loss(whole: TextTokenizer) -> None:
    word = max((token for token in whole.backend.get_vocab() if token.isascii() and token.isalpha()), key=len)
    found = encode(whole, [(word[:1], False), (word[1:], True)], special=True)
    assert found.ids == [whole.backend.token_to_id(word), whole.eos_token_id]
    assert found.loss_mask.tolist() == [True, True]


def test_blanks_of_an_answer_are_in_the_loss_where_offsets_leave_them_out(tokenizer: TextTokenizer) -> None:
    for prompt, answer in (("a:", "    x = 1"), ("a: ", "b   c"), ("a\n", "   "), ("one", " two  "), ("  x  ", "y")):
        found = encode(tokenizer, [(prompt, False), (answer + ".", True)], special=True)
        own = encode(tokenizer, [(answer + ".", True)], special=True)
        assert found.ids == [*tokenizer.encode(prompt + answer + "."), tokenizer.eos_token_id]
        parts = [*tokenizer.encode(prompt), *own.ids]
        if found.ids == parts:  # no token holds bytes of both
            assert found.loss_mask.tolist() == [False] * (len(parts) - len(own.ids)) + [True] * len(own.ids)
        assert not found.loss_mask[: len(tokenizer.encode(prompt)) - 1].any()
        assert own.loss_mask.all()


def test_what_is_cut_has_no_end(tokenizer: TextTokenizer) -> None:
    full = encode(tokenizer, [("2 + 2 =", False), (" 4 and more", True)], special=True)
    cut = encode(tokenizer, [("2 + 2 =", False), (" 4 and more", True)], special=True, limit=8)
    assert cut.ids == full.ids[:8]
    assert cut.loss_mask.tolist() == full.loss_mask[:8].tolist()


@pytest.mark.parametrize("template", [PLAIN, TAGGED], ids=["plain", "generation tags"])
def test_conversations_are_those_of_transformers(template: str, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    ours = load_tokenizer(write_tokenizer(tmp_path / "ours", template))
    theirs = AutoTokenizer.from_pretrained(write_tokenizer(tmp_path / "theirs", TAGGED))
    expected = theirs.apply_chat_template(CHAT, tokenize=True, return_dict=True, return_assistant_tokens_mask=True)
    found = encode(ours, chat_segments(CHAT, ours, "here"), special=False)
    assert found.ids == list(expected["input_ids"])  # whose last message ends with the end of text already
    assert found.loss_mask.tolist() == [bool(mask) for mask in expected["assistant_masks"]]
    answer = ours.decode([token for token, in_loss in zip(found.ids, found.loss_mask) if in_loss])
    assert answer == "".join(m["content"] + END for m in CHAT if m["role"] == "assistant")


def test_of_several_templates_the_default_is_taken(tmp_path: Path) -> None:
    """As in transformers, which takes it unless another one is asked for by its name."""
    tokenizer = load_tokenizer(write_tokenizer(tmp_path, PLAIN))
    named = [{"name": name, "template": name} for name in ("tool_use", "default", "rag")]
    assert chat_template(TextTokenizer(tokenizer.backend, {"chat_template": named})) == "default"
    assert chat_template(TextTokenizer(tokenizer.backend, {"chat_template": named[:1]})) is None


def test_a_template_file_is_read_and_an_end_is_added_where_none_is(tmp_path: Path) -> None:
    folder = write_tokenizer(tmp_path / "t", None)
    template = "{% for m in messages %}{{ m.role + ': ' + m.content + '\n' }}{% endfor %}"
    (folder / "chat_template.jinja").write_text(template)
    tokenizer = load_tokenizer(folder)
    segments = chat_segments([{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}], tokenizer, "x")
    assert segments == [("user: a\n", False), ("assistant: b\n", True)]
    found = encode(tokenizer, segments, special=False)
    assert found.ids[-1] == tokenizer.eos_token_id
    assert found.loss_mask[-1]


@pytest.mark.parametrize(
    ("template", "messages", "message"),
    [
        (None, CHAT, r"here: messages need a tokenizer with a chat template, and this one \(.*\) has none"),
        ("{{ raise_exception('no') }}", CHAT, r"here: the chat template refuses these messages: no"),
        ("{{ messages | length }}", CHAT, r"does not write message 3 after its generation prompt; mark the answers"),
    ],
)
def test_conversations_that_cannot_be_written_are_one_line(
    template: str | None, messages: Any, message: str, tmp_path: Path
) -> None:
    tokenizer = load_tokenizer(write_tokenizer(tmp_path, template))
    with pytest.raises(InputError, match=message):
        chat_segments(messages, tokenizer, "here")


# ---- in a run ----------------------------------------------------------------------------------------------


def write_rows(file: Path, rows: list[dict[str, Any]]) -> str:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(file)


def sft_texts(file: Path, tokenizer: TextTokenizer | None = None, columns: Columns | None = None) -> SftDocuments:
    return SftDocuments(lambda hook: FileDocuments("t", [file], hook=hook), columns or Columns(), None, tokenizer)


def config_of(folder: Path, dataset: dict[str, Any], **changes: Any) -> Any:
    name = str(folder / "words" if (folder / "words").is_dir() else write_tokenizer(folder / "words"))
    return run_config(dataset, tokenizer__tokenizer_name_or_path=name, **({"sequence_length": 24} | changes))


def trained_answers(data: Any) -> list[str]:
    """The text of every answer of all training rows: what its labels say, the end of text at its end."""
    (source,) = data.stage_of(1).sources
    read = source.read(np.arange(len(source)))
    return sorted(data.tokenizer.decode(read.tokens[read.loss_mask].tolist()).split(END)[:-1])


@pytest.mark.parametrize("form", ["jsonl", "hub"])
def test_every_answer_is_in_the_loss_and_no_prompt(form: str, tmp_path: Path) -> None:
    import datasets

    if form == "jsonl":
        dataset = {"text_files": write_rows(tmp_path / "rows.jsonl", PAIRS), "sft_dataloader": True}
    else:
        datasets.disable_progress_bars()
        datasets.Dataset.from_list(PAIRS).save_to_disk(tmp_path / "rows")
        dataset = {"hf_dataset_or_datasets": str(tmp_path / "rows"), "sft_dataloader": True}
    with open_run(config_of(tmp_path, dataset), 1, quiet) as data:
        (source,) = data.stage_of(1).sources
        held = len(source.cache.validation.ends)  # type: ignore[union-attr]
        found = trained_answers(data)
        assert len(found) == len(PAIRS) - held
        assert held > 3
        assert set(found) <= {pair["completion"] for pair in PAIRS}
        assert "0 of" in source.describe()
        assert "with a loss), " in source.describe()
        for batch in [*data.batch(1), *(batch for batch, *_ in data.validation())]:
            assert batch.documents is not None  # masked from each other, though model.document_masking is off
            assert (batch.labels != NO_LOSS).any()
        size = sum(size for _, size, *_ in data.validation())
    of_answers = sum(len(pair["completion"].encode()) for pair in PAIRS)
    assert 0 < size < of_answers  # bytes of the answers that are held out, not of their prompts


def test_a_stage_without_answers_is_masked_as_the_model_says(tmp_path: Path) -> None:
    """Whatever comes after it, so that a stage of answers may be added to a run that has begun."""
    text = {"text_files": str(write_texts(tmp_path / "texts"))}
    answers = {"text_files": write_rows(tmp_path / "rows.jsonl", PAIRS), "sft_dataloader": True}
    config = config_of(tmp_path, text)
    both = config.model_copy(update={"data_stages": run_config(text, answers).data_stages})
    with open_run(config, 1, quiet) as alone, open_run(both, 1, quiet) as data:
        for one, other in ((alone.batch(1), data.batch(1)), *zip(alone.validation(), data.validation())):
            assert one[0].documents is None
            assert other[0].documents is None
            assert np.array_equal(one[0].labels, other[0].labels)
        assert data.batch(7)[0].documents is not None


def test_a_null_is_no_answer_and_a_missing_column_is_named(tmp_path: Path) -> None:
    rows = [{"prompt": "a", "completion": "b"}, {"prompt": "c", "completion": None}]
    file = Path(write_rows(tmp_path / "rows.jsonl", rows))
    texts = sft_texts(file)
    assert (len(list(texts.documents())), texts.skipped) == (1, 1)
    write_rows(file, [{"prompt": "a"}])
    with pytest.raises(InputError, match=r"for 'completion' found no such column, but prompt$"):
        list(sft_texts(file).documents())


def test_another_special_token_of_the_chat_template_is_another_content(tmp_path: Path) -> None:
    file = Path(write_rows(tmp_path / "chat.jsonl", [{"messages": CHAT}]))
    folder, hashes = write_tokenizer(tmp_path / "tokenizer"), []
    for begin in ("<s>", "<bos>", "<s>"):
        config = json.loads((folder / "tokenizer_config.json").read_text()) | {"bos_token": begin}
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
        hashes.append(sft_texts(file, load_tokenizer(folder)).content_hash())
    assert hashes[0] == hashes[2] != hashes[1]


def test_debug_max_samples_and_columns(tmp_path: Path) -> None:
    file = write_rows(tmp_path / "rows.jsonl", [{"q": p["prompt"], "a": p["completion"], "text": "."} for p in PAIRS])
    named = {"text_files": file, "prompt_column_name": "q", "completion_column_name": "a", "debug_max_samples": 5}
    off = {"val_fraction": 0.01}
    with open_run(config_of(tmp_path, named, **off), 1, quiet) as data:
        (source,) = data.stage_of(1).sources
        split, held = source.cache.train, source.cache.validation
        assert len(split.ends) + len(held.ends) == 5
        few = trained_answers(data)
    with open_run(config_of(tmp_path, named | {"debug_max_samples": None}, **off), 1, quiet) as data:
        assert len(trained_answers(data)) > len(few)
    write_rows(tmp_path / "chats.jsonl", [{"said": CHAT, "prompt": "a", "completion": "b"}, PAIRS[0], PAIRS[1]])
    chats = {"text_files": str(tmp_path / "chats.jsonl"), "messages_column_name": "said"}
    with open_run(config_of(tmp_path, chats | {"sft_dataloader": True}, sequence_length=200), 1, quiet) as data:
        cache = data.stage_of(1).sources[0].cache
        texts = [data.tokenizer.decode(side.tokens) for side in (cache.train, cache.validation)]  # type: ignore
        assert sum(text.count("<|im_start|>assistant") for text in texts) == 2
    with pytest.raises(InputError, match=r"rows.jsonl, row 1: expected text in the columns 'prompt' and 'completion'"):
        open_run(config_of(tmp_path, {"text_files": file, "sft_dataloader": True}), 1, quiet)
    write_rows(tmp_path / "questions.jsonl", [{"prompt": "a", "completion": ""}] * 3)
    asked = {"text_files": str(tmp_path / "questions.jsonl"), "sft_dataloader": True}
    with pytest.raises(InputError, match=r"questions.jsonl: no text in it \(no row has an answer\)"):
        open_run(config_of(tmp_path, asked), 1, quiet)


def test_workers_make_the_same_tokens(tmp_path: Path) -> None:
    import datasets

    datasets.disable_progress_bars()
    datasets.Dataset.from_list([{"messages": CHAT[:3]}, {"messages": CHAT}] * 20).save_to_disk(tmp_path / "rows")
    dataset = {"hf_dataset_or_datasets": str(tmp_path / "rows"), "sft_dataloader": True, "packing": "windows"}
    sides = []
    for workers in (1, 2):
        more = {"dataset_processing_num_proc_per_process": workers, "dataset_overwrite_cache": workers == 2}
        with open_run(config_of(tmp_path, dataset | more), 1, quiet) as data:
            (source,) = data.stage_of(1).sources
            split = source.cache.train  # type: ignore[union-attr]
            sides.append((split.tokens.tolist(), split.ends.tolist(), split.loss.tolist()))  # type: ignore[union-attr]
            windows: Any = source.read(np.arange(len(source))).loss_mask
            assert windows[:, 1:].ravel().tolist() == sides[-1][2][1 : 1 + windows[:, 1:].size]
    assert sides[0] == sides[1]


# ---- what a row has besides its messages -------------------------------------------------------------------

TOOL = {"type": "function", "function": {"name": "get_weather", "parameters": {}}}
WITH_TOOLS = (
    "{% if tools %}<tools>{% for f in tools %}{{ f.function.name }}{% endfor %}</tools>{% endif %}"
    "{% for d in documents or [] %}<doc>{{ d.title }}</doc>{% endfor %}{% if thinking %}<think>{% endif %}" + PLAIN
)
TURNS = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}]


def rows_of(folder: Path, rows: list[dict[str, Any]], tokenizer: Any, columns: Columns | None = None) -> list[str]:
    texts = sft_texts(Path(write_rows(folder / "rows.jsonl", rows)), tokenizer, columns)
    return [Example.from_json(chunk.text).text for chunk in texts.documents()]


@pytest.mark.parametrize(
    "given",
    [
        {"tools": [TOOL]},
        {"tools": json.dumps([TOOL])},
        {"tools": None},
        {"documents": [{"title": "a", "text": "b"}]},
        {"chat_template_kwargs": {"thinking": True}},
        {"tools": [TOOL], "chat_template_kwargs": json.dumps({"thinking": True}), "source": "x", "system": ""},
    ],
)
def test_columns_that_a_template_reads_reach_it_as_in_transformers(tmp_path: Path, given: dict[str, Any]) -> None:
    from transformers import AutoTokenizer

    folder = write_tokenizer(tmp_path / "t", WITH_TOOLS)
    options = given.get("chat_template_kwargs") or {}
    options = json.loads(options) if isinstance(options, str) else options
    tools = [TOOL] if given.get("tools") else None
    expected = AutoTokenizer.from_pretrained(folder).apply_chat_template(
        TURNS, tools=tools, documents=given.get("documents"), tokenize=False, **options
    )
    assert rows_of(tmp_path, [{"messages": TURNS} | given], load_tokenizer(folder)) == [expected]
    assert any(mark in expected for mark in ("<tools>", "<doc>", "<think>")) == any(given.values())


PAIR, CHATS = {"prompt": "a", "completion": "b"}, {"messages": TURNS}
PREFERENCE = {"prompt": "a", "chosen": "b", "rejected": "c"}


def answered(**answer: Any) -> dict[str, Any]:
    return {"messages": [TURNS[0], {"role": "assistant"} | answer]}


@pytest.mark.parametrize(
    ("row", "line"),
    [
        (CHATS | {"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs: messages is set by the training"),
        (CHATS | {"thinking": True}, "the chat template reads 'thinking', which is a column of the row"),
        (CHATS | {"system": "x"}, "'system' is not read beside 'messages': write it as the first of the messages"),
        (CHATS | {"chat_template": "x"}, "'chat_template' is not read beside 'messages': the tokenizer's is used"),
        (PAIR | {"input": "2 and 3"}, "'input' is not read beside 'prompt': join it into the prompt"),
        (PAIR | {"tools": [TOOL]}, "'tools' is not read beside 'prompt': write the row as messages"),
        (PAIR | {"weight": 0}, "weight = 0 is not supported: every row counts the same"),
        (PAIR | {"label": False}, "row 1: 'label' judges the answer"),
        (PREFERENCE, "row 1: 'chosen' and 'rejected' are preferences"),
        (CHATS | {"chosen": TURNS, "rejected": TURNS}, "row 1: 'chosen' and 'rejected' are preferences"),
        (answered(content="yo", loss=False), "message 2: loss = False is not supported"),
        (answered(content="yo", loss_weight=False), "message 2: loss_weight = False is not supported"),
        (answered(content="yo", weight=0), "weight = 0 is not supported"),
        (answered(content=[{"type": "image", "url": "x"}]), "message 2: expected content as text or parts"),
        (answered(), "message 2: a message with neither content nor tool_calls"),
        ({"messages": [TURNS[0] | {"role": None}]}, "message 1: expected a role such as user or assistant, found None"),
    ],
)
def test_a_row_whose_meaning_would_be_ignored_is_refused(tmp_path: Path, row: dict[str, Any], line: str) -> None:
    tokenizer = load_tokenizer(write_tokenizer(tmp_path / "t", WITH_TOOLS))
    with pytest.raises(InputError) as caught:
        rows_of(tmp_path, [row], tokenizer)
    assert line in str(caught.value)


def test_a_column_of_nulls_is_none_and_a_side_of_preferences_may_be_asked_for(tmp_path: Path, whole: Any) -> None:
    assert rows_of(tmp_path, [PAIR | dict.fromkeys(("input", "tools", "weight", "label"))], whole) == ["ab"]
    assert rows_of(tmp_path, [PREFERENCE], whole, Columns(completion="chosen")) == ["ab"]


def test_content_in_parts_of_text_is_their_text(tokenizer: TextTokenizer) -> None:
    parts = [{"type": "text", "text": "y"}, {"type": "text", "text": "o"}]
    found = chat_segments([TURNS[0], {"role": "assistant", "content": parts}], tokenizer, "here")
    assert found == chat_segments(TURNS, tokenizer, "here")
