"""Supervised fine-tuning data: prompts and answers, with a loss only on answers.

    {"prompt": "2 + 2 =", "completion": " 4"}                     2 + 2 = 4 <end>
                                                                          ─────── in the loss
    {"messages": [{"role": "user", "content": "2 + 2?"},          through the tokenizer's chat template; in the loss
                  {"role": "assistant", "content": "4"}]}         are the assistant's messages and their end tokens

An example is tokenized as one text. A token is in the loss if it covers a character of an answer (according to the
tokenizer's offsets, as in `transformers`' assistant mask). In a chat template, answers are inside ``{% generation %}``,
as in `transformers`; without it, an answer is the text that an assistant's message adds after the generation prompt.

Before tokenization, an example is one string, the JSON of `Example`, so that it is hashed, held out and sent to workers
like any document.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kenotron.config.errors import InputError, nearest
from kenotron.text.chat_template import chat_template, render_chat, special_tokens, template_variables
from kenotron.text.documents import DocumentChunk, DocumentSource, RowHook
from kenotron.text.tokenizer import TextTokenizer, encoding_errors

if TYPE_CHECKING:
    import tokenizers

FORMAT = 2
GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")


class Example(NamedTuple):
    """A text in segments, each with whether it is in the loss. `special`: the tokenizer adds its special tokens."""

    segments: list[tuple[str, bool]]
    special: bool

    def to_json(self) -> str:
        """Return the example as one string."""
        return json.dumps(self, ensure_ascii=False)

    @classmethod
    def from_json(cls, text: str) -> Example:
        """Return the example that `to_json` wrote."""
        segments, special = json.loads(text)
        return cls([(part, in_loss) for part, in_loss in segments], special)

    @property
    def text(self) -> str:
        """The text of all segments."""
        return "".join(part for part, _ in self.segments)


OF_MESSAGES = ("system", "tools", "documents", "chat_template_kwargs")
OF_PROMPTS = ("input", "context", "history")
"""Columns that extend the prompt in many datasets, which are not read in addition to a prompt."""
OTHER_MEDIA = ("image", "images", "video", "videos", "audio", "audios")
"""Columns of multimodal datasets that an answer may need besides the text."""


@dataclass(frozen=True)
class Columns:
    """Names of the columns: `messages` if a row has it, else `prompt` and `completion`."""

    prompt: str = "prompt"
    completion: str = "completion"
    messages: str = "messages"


class _Enough(Exception):
    """The maximum number of rows was reached."""


class SftDocuments:
    """The examples of a dataset's first `most` rows (a `documents.DocumentSource`), each as JSON.

    `rows` opens the dataset with a hook for its rows. Rows without an answer are left out and counted in `skipped`.

    Raises InputError if a column is missing or has another type, for messages without a chat template, and for a
    template that does not mark the answers.
    """

    def __init__(
        self,
        rows: Callable[[RowHook], DocumentSource],
        columns: Columns,
        most: int | None,
        tokenizer: TextTokenizer | None,
    ) -> None:
        self.columns, self.most, self.tokenizer = columns, most, tokenizer
        self._texts = rows(self._example)
        self.name, self.skipped, self._rows = self._texts.name, 0, 0
        self.skip_bad, self.first_skipped = False, list[str]()

    @property
    def size(self) -> int:
        """Return the size of the rows."""
        return self._texts.size

    def signature(self) -> str | None:
        """Return a key of the rows, the columns and the chat template."""
        known = self._texts.signature()
        return None if known is None else self._with_rules(known)

    def content_hash(self) -> str:
        """Return a key of the rows, the columns and the chat template."""
        return self._with_rules(self._texts.content_hash())

    def documents(self) -> Iterator[DocumentChunk]:
        """Yield every example as JSON."""
        self._rows = self.skipped = 0
        try:
            yield from self._texts.documents()
        except _Enough:
            return

    def _with_rules(self, content: str) -> str:
        template = chat_template(self.tokenizer) if self.tokenizer else None
        special = sorted(special_tokens(self.tokenizer).items()) if self.tokenizer and template else None
        rules = f"examples {FORMAT} {content} {self.columns} {self.most} {template} {special}"
        return hashlib.blake2b(rules.encode(), digest_size=16).hexdigest()

    def _example(self, row: dict[str, Any], where: str) -> list[str]:
        if self._rows == self.most:
            raise _Enough
        self._rows += 1
        found = self._of_row(row, f"{where}, row {self._rows}")
        if not any(part.strip() for part, in_loss in found.segments if in_loss):
            self.skipped += 1
            return []
        return [found.to_json()]

    def _of_row(self, row: dict[str, Any], where: str) -> Example:
        columns = self.columns
        _refuse_preferences(row, columns, where)
        if other := [name for name in OTHER_MEDIA if row.get(name)]:
            raise InputError(f"{where}: '{other[0]}' is not read, only text is: drop such rows, or the column")
        if row.get("weight", 1) not in (1, None):
            raise InputError(f"{where}: weight = {row['weight']!r} is not supported: every row counts the same")
        if row.get(columns.messages) is not None:
            variables = template_inputs(row, columns, self.tokenizer, where)
            return Example(chat_segments(row[columns.messages], self.tokenizer, where, variables), special=False)
        answered = row.get(columns.completion, "") is not None  # null, as in tables, is no answer, like ""
        for column in (columns.prompt, columns.completion)[: 1 + answered]:
            if not isinstance(row.get(column), str):
                names = f"no such column, but {', '.join(sorted(row))}{nearest(column, row)}"
                found = type(row[column]).__name__ if column in row else names
                raise InputError(
                    f"{where}: expected text in the columns '{columns.prompt}' and '{columns.completion}', or a list "
                    f"'{columns.messages}'; for '{column}' found {found}"
                )
        for name in sorted({*OF_MESSAGES, *OF_PROMPTS} - {columns.prompt, columns.completion}):
            if row.get(name):
                how = "write the row as messages" if name in OF_MESSAGES else "join it into the prompt, or drop it"
                raise InputError(f"{where}: '{name}' is not read beside '{columns.prompt}': {how}")
        return Example([(row[columns.prompt], False), (row[columns.completion] or "", True)], special=True)


def _refuse_preferences(row: dict[str, Any], columns: Columns, where: str) -> None:
    """Raise InputError for a row that compares or judges answers (DPO, KTO), unless the config names its columns."""
    if {"chosen", "rejected"} & {columns.prompt, columns.completion, columns.messages}:
        return
    if "rejected" in row:
        raise InputError(
            f"{where}: 'chosen' and 'rejected' are preferences, from which nothing here learns; to train on the better "
            "answers, name the column: completion_column_name (texts) or messages_column_name (conversations): chosen"
        )
    if isinstance(row.get("label"), bool):
        raise InputError(f"{where}: 'label' judges the answer; keep the rows where it is true, and drop the column")


# ---- chats -------------------------------------------------------------------------------------------------


AS_MESSAGE = "write it as the first of the messages, with the role system"


def template_inputs(
    row: dict[str, Any], columns: Columns, tokenizer: TextTokenizer | None, where: str
) -> dict[str, Any]:
    """Return a row's variables for its chat template: `tools`, `documents`, and all keys of `chat_template_kwargs`.

    Each may also be a string of JSON. Raises InputError if one has another type, or the template would read another
    column.
    """
    variables = {name: _from_json(row[name]) for name in ("tools", "documents") if row.get(name) is not None}
    for name, value in variables.items():
        items = [_from_json(item) for item in value] if isinstance(value, list) else [None]
        if not all(isinstance(item, dict) for item in items):
            raise InputError(f"{where}: expected {name} as a list of objects, found {str(row[name])[:60]}")
        variables[name] = items
    options = _from_json(row.get("chat_template_kwargs"))
    if options is not None and not isinstance(options, dict):
        raise InputError(f"{where}: expected chat_template_kwargs as an object, found {str(options)[:60]}")
    variables |= {name: value for name, value in (options or {}).items() if value is not None}
    if fixed := variables.keys() & {"messages", "add_generation_prompt", "continue_final_message", "chat_template"}:
        raise InputError(f"{where}: chat_template_kwargs: {min(fixed)} is set by the training, not by a row")
    read = template_variables(template) if tokenizer and (template := chat_template(tokenizer)) else frozenset()
    known = {columns.messages, columns.prompt, columns.completion, "messages", "tools", "documents"}
    for name in sorted(row.keys() - known - variables.keys()):
        if row[name] and name in ("system", "chat_template", "functions"):
            how = {"system": AS_MESSAGE, "functions": "name it tools"}.get(name, "the tokenizer's is used")
            raise InputError(f"{where}: '{name}' is not read beside '{columns.messages}': {how}")
        if row[name] is not None and name in read:
            raise InputError(
                f"{where}: the chat template reads '{name}', which is a column of the row: put it into "
                "chat_template_kwargs to pass it on, or rename it"
            )
    return variables


def _from_json(value: object) -> Any:
    """Return the value; a string is parsed as JSON if possible."""
    try:
        return json.loads(value) if isinstance(value, str) else value
    except ValueError:
        return value


def _checked_message(message: dict[str, Any], where: str) -> dict[str, Any]:
    """Return a message without nulls, with its content as one text.

    Raises InputError without content and tool calls, for content other than text, and for a weight other than 1, which
    would be ignored.
    """
    kept = {key: value for key, value in message.items() if value is not None}
    if not isinstance(kept.get("role"), str):
        raise InputError(f"{where}: expected a role such as user or assistant, found {kept.get('role')!r:.60}")
    content = kept.get("content")
    if isinstance(content, list):
        if not all(isinstance(p, dict) and p.get("type") == "text" and isinstance(p.get("text"), str) for p in content):
            raise InputError(
                f"{where}: expected content as text or parts {{type: text, text}}, found {str(content)[:80]}"
            )
        kept["content"] = "".join(part["text"] for part in content)
    elif content is not None and not isinstance(content, str):
        raise InputError(f"{where}: expected content as text, found {type(content).__name__} {str(content)[:60]}")
    elif content is None and not (kept.get("tool_calls") or kept.get("function_call")):
        raise InputError(f"{where}: a message with neither content nor tool_calls")
    for key in ("weight", "train", "trainable", "loss", "loss_mask", "loss_weight"):
        if kept.get(key, 1) != 1:
            raise InputError(f"{where}: {key} = {kept[key]!r} is not supported: every answer is in the loss")
    return kept


def chat_segments(
    messages: object, tokenizer: TextTokenizer | None, where: str, variables: dict[str, Any] | None = None
) -> list[tuple[str, bool]]:
    """Return the text of a conversation by the tokenizer's chat template, in segments with whether each is in the loss.

    `variables` are more variables of the template (`template_inputs`).
    """
    template = chat_template(tokenizer) if tokenizer else None
    if tokenizer is None or template is None:
        name = tokenizer.name if tokenizer else "none"
        raise InputError(f"{where}: messages need a tokenizer with a chat template, and this one ({name}) has none")
    if not (isinstance(messages, list) and messages and all(isinstance(m, dict) and "role" in m for m in messages)):
        raise InputError(f"{where}: expected messages as a list of {{role, content}}, found {str(messages)[:60]}")
    messages = [_checked_message(message, f"{where}, message {n}") for n, message in enumerate(messages, start=1)]
    render = partial(render_chat, template, special_tokens(tokenizer) | (variables or {}), where)
    if GENERATION.search(template):
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
    return [(part, in_loss) for part, in_loss in [*segments, (text[done:], False)] if part]


def _answer(
    render: Callable[..., tuple[str, Any]], messages: list[Any], text: str, tokenizer: TextTokenizer, where: str
) -> tuple[int, int]:
    """Return the range of the last of `messages` in `text`, without whitespace after its end token."""
    before, after = render(messages[:-1], prompt=True)[0], render(messages)[0]
    if not (after.startswith(before) and text.startswith(after)):
        raise InputError(
            f"{where}: the chat template of {tokenizer.name} does not write message {len(messages)} after its "
            "generation prompt; mark the answers in it with {% generation %} … {% endgeneration %}"
        )
    bare = after.rstrip()
    is_ended = any(bare.endswith(token) for token in special_tokens(tokenizer).values())
    is_ended |= any(bare.endswith(added.content) for added in tokenizer.backend.get_added_tokens_decoder().values())
    return len(before), max(len(bare), len(before)) if is_ended else len(after)


# ---- tokens ------------------------------------------------------------------------------------------------


class EncodedExample(NamedTuple):
    """Ids of an example, whether each is in the loss, and the number of UTF-8 bytes of its text."""

    ids: list[int]
    loss_mask: NDArray[np.bool_]
    bytes: int


def encode_examples(
    backend: tokenizers.Tokenizer, texts: list[str], eos: int | None, max_tokens: int | None
) -> list[EncodedExample]:
    """Encode the examples `texts`; `eos` is appended unless the text already ends with it (and whitespace).

    An example truncated to `max_tokens` has no end token.
    """
    examples = [Example.from_json(text) for text in texts]
    encodings: list[Any] = [None] * len(examples)
    for special in (True, False):
        chosen = [place for place, example in enumerate(examples) if example.special == special]
        with encoding_errors():
            found = backend.encode_batch([examples[place].text for place in chosen], add_special_tokens=special)
        for place, encoding in zip(chosen, found):
            encodings[place] = encoding
    return [_encoded(*pair, eos, max_tokens) for pair in zip(examples, encodings)]


def _encoded(example: Example, encoding: Any, eos: int | None, max_tokens: int | None) -> EncodedExample:
    text = example.text
    of_characters = np.repeat([flag for _, flag in example.segments], [len(part) for part, _ in example.segments])
    before = np.concatenate([[0], np.cumsum(of_characters)])
    offsets = np.array(encoding.offsets, dtype=np.int64).reshape(-1, 2)
    starts, stops = offsets[:, 0], offsets[:, 1]
    # Offsets of whitespace tokens may be trimmed to nothing: such a token starts at the end of the previous one, at the
    # beginning of the text at the start of the next one.
    empty, reach = starts == stops, np.maximum.accumulate(stops)
    starts = np.where(empty, np.minimum(np.roll(reach, 1) * (np.arange(len(stops)) > 0), stops), starts)
    ahead = np.append(offsets[1:, 0], 0)[: len(stops)]
    mask = before[np.where(empty & (stops == 0) & (reach == 0), ahead, stops)] > before[starts]
    ids = list(encoding.ids)
    if eos is not None:
        last = next(flag for part, flag in reversed(example.segments) if part.strip())
        at = len(ids) - 1 - ids[::-1].index(eos) if eos in ids else None
        if at is not None and at == len(ids) - 1 and empty[at]:
            mask[at] = last  # appended by the tokenizer itself
        elif at is None or text[stops[at] :].strip():
            ids, mask = [*ids, eos], np.append(mask, last)
    if max_tokens is not None and len(ids) > max_tokens:
        ids, mask = ids[:max_tokens], mask[:max_tokens]
    return EncodedExample(ids, mask, len(text.encode()))
