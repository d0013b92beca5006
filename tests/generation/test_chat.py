"""Conversations: the template's text, the model's continuation of it, the same as transformers makes of both."""

import io
import sys

import pytest

from kenotron.config.errors import InputError
from kenotron.generation import SamplingOptions
from kenotron.generation.chat import Chat
from kenotron.generation.load import load_for_generation
from kenotron.interop import to_hf
from support.tiny_llamas import load_hf, our_model, save_ours, small_tokenizer

TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'system' and not loop.first %}{{ raise_exception('system comes first') }}"
    "{% endif %}[{{ m.role }}]{{ m.content }}at\n{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
)
WIDE = {"max_position_embeddings": 512}


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    """A checkpoint whose tokenizer has a template; it ends each turn by "at", which the model writes now and then."""
    folder = tmp_path_factory.mktemp("chat")
    tokenizer = small_tokenizer()
    tokenizer.config["chat_template"] = TEMPLATE
    return save_ours(our_model(folder, **WIDE), folder / "checkpoints", tokenizer, **WIDE)


def test_answers_are_those_of_transformers_turn_by_turn(path, tmp_path):
    from transformers import AutoTokenizer

    to_hf(path, tmp_path / "hf")
    theirs, tokenizer = load_hf(tmp_path / "hf"), AutoTokenizer.from_pretrained(tmp_path / "hf")
    loaded = load_for_generation(path)
    chat = Chat(loaded.model, loaded.tokenizer, system="Be brief.")
    assert chat.end_of_turn == ["at"]
    turns = [{"role": "system", "content": "Be brief."}]
    for question in ("the cat", "return the mat", "é 中"):
        pieces = []
        answer = chat.reply(question, SamplingOptions(max_new_tokens=30), stream=pieces.append)
        turns.append({"role": "user", "content": question})
        text = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
        prompt = tokenizer(text, add_special_tokens=False, return_tensors="pt")["input_ids"]
        found = theirs.generate(
            prompt, max_new_tokens=30, do_sample=False, pad_token_id=0, stop_strings=["at"], tokenizer=tokenizer
        )
        new = found[0, prompt.shape[1] :].tolist()
        assert answer.tokens == new
        assert answer.text == "".join(pieces) == tokenizer.decode(new, skip_special_tokens=True).partition("at")[0]
        turns.append({"role": "assistant", "content": answer.text})
    assert chat.messages == turns


def test_the_model_reads_what_the_template_writes_and_no_more(path):
    """Of a tokenizer that begins texts by itself, as Llama's does: its template begins them already."""
    from tokenizers.processors import TemplateProcessing

    loaded = load_for_generation(path)
    end = loaded.tokenizer.config["eos_token"]
    loaded.tokenizer.backend.post_processor = TemplateProcessing(f"{end} $A", special_tokens=[(end, 0)])
    assert loaded.tokenizer.encode("the cat")[0] == 0
    answer = Chat(loaded.model, loaded.tokenizer).reply("the cat", SamplingOptions(max_new_tokens=2))
    assert answer.prompt == "[user]the catat\n[assistant]"


def test_a_turn_that_does_not_fit_leaves_the_conversation_as_it_was(path):
    loaded = load_for_generation(path)
    chat = Chat(loaded.model, loaded.tokenizer)
    chat.reply("cat", SamplingOptions(max_new_tokens=2))
    before = list(chat.messages)
    with pytest.raises(InputError, match=r"tokens leave no room for a new one; the model reads at most 512"):
        chat.reply("cat " * 600)
    assert chat.messages == before


def test_the_command_reads_turns_from_a_pipe_and_prints_answers(path, shell, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO("the cat\n\nreturn the mat\n"))
    options = ("--max-new-tokens", 12, "--temperature", 0.8, "--top-p", 0.9, "--seed", 4)
    code, out, err = shell("chat", path, "--system", "Be brief.", *options)
    assert (code, err) == (0, "")
    loaded = load_for_generation(path)
    chat = Chat(loaded.model, loaded.tokenizer, system="Be brief.")
    drawn = SamplingOptions(max_new_tokens=12, temperature=0.8, top_p=0.9, seed=4)
    assert out == "".join(chat.reply(text, drawn).text + "\n" for text in ("the cat", "return the mat"))


@pytest.mark.parametrize(
    ("tokenizer", "message"),
    [
        (None, "chat: the model has no tokenizer; `kenotron generate --prompt-tokens` continues token ids"),
        (small_tokenizer(), "has no chat_template, which models for conversations have; `kenotron generate --prompt`"),
    ],
    ids=["no tokenizer", "no template"],
)
def test_without_a_template_there_is_one_clear_line(tokenizer, message, tmp_path, shell):
    path = save_ours(our_model(tmp_path), tmp_path / "c", tokenizer)
    code, out, err = shell("chat", path)
    assert (code, out) == (2, "")
    assert message in err
    assert len(err.splitlines()) == 1
