r"""A cache of words that makes byte-level BPE three times as fast, since most words of a text repeat.

Such a tokenizer splits a text into words by a pattern and encodes each word independently. So ids can be cached by
word, and only new words are passed to the library:

    "the cat, the dog"  ──pattern──▶  the | cat | , | the | dog  ──cache──▶  [1820] [8415] [11] [279] [5679]

ASCII text is split here, because for it ``\p{L}``, ``\p{N}`` and ``\s`` are a few characters, and `re` finds the same
words as the library. Around any other character, a stretch is passed to the library, which begins and ends where a word
must begin (at a space after a printable character):

    "in ASCII, a café, in ASCII"           stretches   "in ASCII, a" | " café," | " in ASCII"

`CachedBPE.of` returns one only for tokenizers with a known pattern that pass a test on sample texts.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any

from kenotron.text.byte_level_bpe import SPLIT_PATTERN
from kenotron.text.tokenizer import library_ids

if TYPE_CHECKING:
    import tokenizers

KEPT_WORDS = 1 << 18
LONGEST_KEPT = 40
"""The length in characters up to which words are cached."""

BLANK, LETTER, DIGIT = r"\t-\r ", "A-Za-z", "0-9"
CONTRACTIONS = "'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD]"
REST = rf"[{BLANK}]+(?![^{BLANK}])|[{BLANK}]+"
MARKS = rf" ?[^{BLANK}{LETTER}{DIGIT}]+"


def _in_threes(most_digits: int) -> str:
    digits = f"[{DIGIT}]{{1,{most_digits}}}"
    word = rf"[^\r\n{LETTER}{DIGIT}]?[{LETTER}]+"
    return rf"{CONTRACTIONS}|{word}|{digits}|{MARKS}[\r\n]*|[{BLANK}]*[\r\n]+|{REST}"


GPT2_PATTERN = "ByteLevel"
ASCII_PATTERNS = {
    SPLIT_PATTERN: _in_threes(3),  # Llama 3's
    SPLIT_PATTERN.replace(r"\p{N}{1,3}", r"\p{N}"): _in_threes(1),  # Qwen 2's
    GPT2_PATTERN: rf"'s|'t|'re|'ve|'m|'ll|'d| ?[{LETTER}]+| ?[{DIGIT}]+|{MARKS}|{REST}",
}
"""A library's pattern → the equal pattern for ASCII."""

NOT_ASCII = re.compile(r"[^\x00-\x7f]")
BORDER = re.compile(r"(?<=[!-~])(?= )")
"""Matches where a word begins in any context."""


class CachedBPE:
    """Its `encode` returns the same as the library's ``encode_batch_fast(texts, add_special_tokens=False)``."""

    def __init__(self, backend: tokenizers.Tokenizer, pattern: str, special: Sequence[str]) -> None:
        self.backend = backend
        self.words = re.compile(pattern).findall
        self.has_special = re.compile("|".join(map(re.escape, special)) or r"(?!)").search
        self.kept: dict[str, list[int]] = {}

    @classmethod
    def of(cls, backend: tokenizers.Tokenizer) -> CachedBPE | None:
        """Return a cache for the tokenizer, or None if it is of another kind."""
        spec = json.loads(backend.to_str())
        pattern = ASCII_PATTERNS.get(_pattern_of(spec.get("pre_tokenizer") or {}) or "")
        model = spec["model"]
        if pattern is None or spec["normalizer"] is not None or model["type"] != "BPE" or model.get("dropout"):
            return None
        made = cls(backend, pattern, [token["content"] for token in spec["added_tokens"]])
        trial = _trial_texts()
        return made if made.encode(trial) == made._by_library(trial) else None

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the ids of every text."""
        cut = [self._cut(text) for text in texts]
        met = self.kept
        new = list({word for words in cut for word in words if word not in met})
        ids_of_new = dict(zip(new, self._by_library(new)))
        if len(met) + len(new) > KEPT_WORDS:
            ids_of_new = {word: met[word] for words in cut for word in words if word in met} | ids_of_new
            met.clear()
        get = met.get
        ids = [
            list(chain.from_iterable(found if (found := get(word)) is not None else ids_of_new[word] for word in words))
            for words in cut
        ]
        met.update((word, ids) for word, ids in ids_of_new.items() if len(word) <= LONGEST_KEPT)
        return ids

    def _by_library(self, texts: list[str]) -> list[list[int]]:
        return library_ids(self.backend, texts, special=False)

    def _cut(self, text: str) -> list[str]:
        """Return words and stretches whose concatenated ids are those of `text`."""
        if self.has_special(text):
            return [text]
        if text.isascii():
            return self.words(text)
        if len(text.encode("ascii", "ignore")) < 0.9 * len(text):
            return [text]
        return [
            part for stretch in _stretches(text) for part in (self.words(stretch) if stretch.isascii() else [stretch])
        ]


def _stretches(text: str) -> Iterator[str]:
    """Yield `text` cut at borders, so that stretches with non-ASCII characters are as short as possible."""
    start = 0
    while found := NOT_ASCII.search(text, start):
        left = start
        for border in BORDER.finditer(text, start, found.start() + 1):
            left = border.start()
        right = BORDER.search(text, found.end())
        stop = right.start() if right else len(text)
        if left > start:
            yield text[start:left]
        yield text[left:stop]
        start = stop
    if start < len(text):
        yield text[start:]


def _pattern_of(spec: dict[str, Any]) -> str | None:
    """Return the pattern of a pre-tokenizer that only splits words by a pattern."""
    if spec.get("type") == "ByteLevel" and spec.get("use_regex", True) and not spec["add_prefix_space"]:
        return GPT2_PATTERN
    if spec.get("type") != "Sequence" or len(spec["pretokenizers"]) != 2:
        return None
    split, level = spec["pretokenizers"]
    plain = level["type"] == "ByteLevel" and not level["add_prefix_space"] and not level.get("use_regex", True)
    if split["type"] != "Split" or split["behavior"].lower() != "isolated" or split["invert"] or not plain:
        return None
    return split["pattern"].get("Regex")


def _trial_texts() -> list[str]:
    """Return texts with every ASCII character beside many others, and some non-ASCII characters."""
    source = random.Random(0)
    characters = [chr(code) for code in range(128)]
    often = [*" \t\n\r  'aZ09.,_", "'s", "'LL", "  ", "\n\n", *characters]
    texts = ["".join(source.choices(often, k=200)) for _ in range(50)]
    return texts + [text[:150] + source.choice("é漢\u00a0🙂ſ") + text[150:] for text in texts]
