"""Prompts and answers: rows of which only the answer is learnt.

    {"prompt": "2 + 2 =", "completion": " 4"}                     2 + 2 = 4 <end>
                                                                          ─────── learnt
    {"messages": [{"role": "user", "content": "2 + 2?"},          by the tokenizer's chat template; learnt is what
                  {"role": "assistant", "content": "4"}]}         the assistant says, with what ends it

An example is the tokens of its whole text, exactly as the tokenizer gives them; a token is learnt if it holds a
character of an answer (by the tokenizer's offsets, as `transformers`' assistant mask does). In a template the answers
are what stands in ``{% generation %}``, as in `transformers`; where it has none, what an assistant's message adds to
the text behind the generation prompt.

On its way to the tokenizer an example is one string, the JSON of `Example`: it is hashed, held out and sent to workers
as any document.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kenotron.config.errors import InputError, nearest

from .texts import Piece, RowHook, Span, Texts
from .tokenizer import Tokenizer, encoding_told

FORMAT = 1
GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")


class Example(NamedTuple):
    """A text in segments, each with whether it is learnt; `special`: the tokenizer adds its own tokens around it."""

    segments: list[tuple[str, bool]]
    special: bool

    def to_json(self) -> str:
        return json.dumps(self, ensure_ascii=False)

    @classmethod
    def from_json(cls, text: str) -> Example:
        segments, special = json.loads(text)
        return cls([(part, learnt) for part, learnt in segments], special)

    @property
    def text(self) -> str:
        return "".join(part for part, _ in self.segments)


@dataclass(frozen=True)
class Columns:
    """Names of the columns: `messages` where a row has it, else `prompt` and `completion`."""

    prompt: str = "prompt"
    completion: str = "completion"
    messages: str = "messages"


class _Enough(Exception):
    """So many rows were asked for, and no more."""


class ExampleTexts:
    """The examples of a dataset's rows (`texts.Texts`), each as JSON; at most of the first `most` rows.

    `rows` opens the dataset with a hook for its rows. Rows without an answer are left out and counted in `skipped`.

    Errors (InputError): a column is missing or holds something else; messages without a chat template; a template that
    does not tell answers apart.
    """

    def __init__(
        self, rows: Callable[[RowHook], Texts], columns: Columns, most: int | None, tokenizer: Tokenizer | None
    ) -> None:
        self.columns, self.most, self.tokenizer = columns, most, tokenizer
        self._texts = rows(self._example)
        self.name, self.skipped, self._rows = self._texts.name, 0, 0

    @property
    def size(self) -> int:
        return self._texts.size

    def signature(self) -> str | None:
        known = self._texts.signature()
        return None if known is None else self._with_rules(known)

    def content_hash(self) -> str:
        return self._with_rules(self._texts.content_hash())

    def documents(self) -> Iterator[Piece]:
        self._rows = self.skipped = 0
        try:
            yield from self._texts.documents()
        except _Enough:
            return

    def spans(self, size: int) -> Iterator[Span]:
        return self._texts.spans(size)

    def read(self, span: Span) -> Iterator[Piece]:
        return self._texts.read(span)

    def _with_rules(self, content: str) -> str:
        template = self.tokenizer.chat_template if self.tokenizer else None
        rules = f"examples {FORMAT} {content} {self.columns} {self.most} {template}"
        return hashlib.blake2b(rules.encode(), digest_size=16).hexdigest()

    def _example(self, row: dict[str, Any], where: str) -> list[str]:
        if self._rows == self.most:
            raise _Enough
        self._rows += 1
        found = self._of_row(row, f"{where}, row {self._rows}")
        if not any(part.strip() for part, learnt in found.segments if learnt):
            self.skipped += 1
            return []
        return [found.to_json()]

    def _of_row(self, row: dict[str, Any], where: str) -> Example:
        columns = self.columns
        if row.get(columns.messages) is not None:
            return Example(chat_segments(row[columns.messages], self.tokenizer, where), special=False)
        for column in (columns.prompt, columns.completion):
            if not isinstance(row.get(column), str):
                there = column in row
                found = type(row[column]).__name__ if there else f"{', '.join(sorted(row))}{nearest(column, row)}"
                raise InputError(
                    f"{where}: expected text in the columns '{columns.prompt}' and '{columns.completion}', or a list "
                    f"'{columns.messages}'; for '{column}' found {found}"
                )
        return Example([(row[columns.prompt], False), (row[columns.completion], True)], special=True)


# ---- chats -------------------------------------------------------------------------------------------------


def chat_segments(messages: Any, tokenizer: Tokenizer | None, where: str) -> list[tuple[str, bool]]:
    """The text of a conversation by the tokenizer's chat template, in segments, each with whether it is learnt."""
    if tokenizer is None or tokenizer.chat_template is None:
        name = tokenizer.name if tokenizer else "none"
        raise InputError(f"{where}: messages need a tokenizer with a chat template, which this one ({name}) has not")
    if not (isinstance(messages, list) and messages and all(isinstance(m, dict) and "role" in m for m in messages)):
        raise InputError(f"{where}: expected messages as a list of {{role, content}}, found {str(messages)[:60]}")
    messages = [{key: value for key, value in message.items() if value is not None} for message in messages]
    render = partial(_render, tokenizer.chat_template, tokenizer.special_tokens, where)
    if GENERATION.search(tokenizer.chat_template):
        text, answers = render(messages, mask=True)
    else:
        text, _ = render(messages)
        answers = [
            _answer(render, messages[: number + 1], text, tokenizer, where)
            for number, message in enumerate(messages)
            if message["role"] == "assistant"
        ]
    segments, done = [], 0
    for start, stop in answers:
        segments += [(text[done:start], False), (text[start:stop], True)]
        done = stop
    return [(part, learnt) for part, learnt in [*segments, (text[done:], False)] if part]


def _answer(
    render: Callable[..., tuple[str, Any]], messages: list[Any], text: str, tokenizer: Tokenizer, where: str
) -> tuple[int, int]:
    """Where the last of `messages` stands in `text`: without the blank space behind the token that ends it."""
    before, after = render(messages[:-1], prompt=True)[0], render(messages)[0]
    if not (after.startswith(before) and text.startswith(after)):
        raise InputError(
            f"{where}: the chat template of {tokenizer.name} does not write message {len(messages)} behind its "
            "generation prompt; mark the answers in it by {% generation %} … {% endgeneration %}"
        )
    bare = after.rstrip()
    is_ended = any(bare.endswith(token) for token in tokenizer.special_tokens.values())
    is_ended |= any(bare.endswith(added.content) for added in tokenizer.backend.get_added_tokens_decoder().values())
    return len(before), max(len(bare), len(before)) if is_ended else len(after)


def _render(
    template: str, special: dict[str, str], where: str, messages: list[Any], prompt: bool = False, mask: bool = False
) -> tuple[str, Any]:
    import jinja2
    from transformers.utils import chat_template_utils

    library: Any = chat_template_utils  # whose types know no tokens
    try:
        texts, answers = library.render_jinja_template(
            [messages],
            chat_template=template,
            return_assistant_tokens_mask=mask,
            add_generation_prompt=prompt,
            **special,
        )
    except (jinja2.TemplateError, TypeError, ValueError, KeyError) as error:
        raise InputError(f"{where}: the chat template refuses these messages: {error}") from None
    return texts[0], answers[0] if mask else None


# ---- tokens ------------------------------------------------------------------------------------------------


class LearntTokens(NamedTuple):
    """Ids of an example, whether each is learnt, and the UTF-8 bytes of its text."""

    ids: list[int]
    learnt: NDArray[np.bool_]
    bytes: int


def encode_examples(backend: Any, texts: list[str], eos: int | None, max_tokens: int | None) -> list[LearntTokens]:
    """The examples `texts`, ended by `eos` unless nothing but blank space follows one already.

    What is cut to `max_tokens` has no end that could be learnt.
    """
    examples = [Example.from_json(text) for text in texts]
    encodings: list[Any] = [None] * len(examples)
    for special in (True, False):
        chosen = [place for place, example in enumerate(examples) if example.special == special]
        with encoding_told():
            found = backend.encode_batch([examples[place].text for place in chosen], add_special_tokens=special)
        for place, encoding in zip(chosen, found):
            encodings[place] = encoding
    return [_learnt(*pair, eos, max_tokens) for pair in zip(examples, encodings)]


def _learnt(example: Example, encoding: Any, eos: int | None, max_tokens: int | None) -> LearntTokens:
    text = example.text
    of_characters = np.repeat([learnt for _, learnt in example.segments], [len(part) for part, _ in example.segments])
    before = np.concatenate([[0], np.cumsum(of_characters)])
    offsets = np.array(encoding.offsets, dtype=np.int64).reshape(-1, 2)
    starts, stops = offsets[:, 0], offsets[:, 1]
    # Blank tokens may come with their blanks trimmed away: they reach back to the token before them, at the beginning
    # of the text to the one after them.
    empty, reach = starts == stops, np.maximum.accumulate(stops)
    starts = np.where(empty, np.minimum(np.roll(reach, 1) * (np.arange(len(stops)) > 0), stops), starts)
    ahead = np.append(offsets[1:, 0], 0)[: len(stops)]
    learnt = before[np.where(empty & (stops == 0) & (reach == 0), ahead, stops)] > before[starts]
    ids = list(encoding.ids)
    if eos is not None:
        last = next(flag for part, flag in reversed(example.segments) if part.strip())
        at = len(ids) - 1 - ids[::-1].index(eos) if eos in ids else None
        if at is not None and at == len(ids) - 1 and empty[at]:
            learnt[at] = last  # the tokenizer's own, put behind the text
        elif at is None or text[stops[at] :].strip():
            ids, learnt = [*ids, eos], np.append(learnt, last)
    if max_tokens is not None and len(ids) > max_tokens:
        ids, learnt = ids[:max_tokens], learnt[:max_tokens]
    return LearntTokens(ids, learnt, len(text.encode()))
