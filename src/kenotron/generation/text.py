"""Decode tokens into text as they are generated, without incomplete characters.

A byte-level token may be a part of a character: "é" is two bytes, and after only the first, decoding gives the
replacement character "\N{REPLACEMENT CHARACTER}". Such a piece is held back until it is complete:

    tokens     "caf"   0xC3    0xA9    " au"
    pieces     "caf"   ""      "é"     " au"

Some tokenizers write a space only between words, so a token's text depends on the previous token. A piece is therefore
the text that decoding *with* the preceding tokens adds. The joined pieces are the complete text.

A text may also end at a stop string. Its possible beginning is held back until the following text decides:

    stop       "\n\n"
    pieces     "one"   "\n"   "two"      "\n"   "\nthree"
    shown      "one"   ""     "\ntwo"    ""     ""            the end
"""

from collections.abc import Sequence

from kenotron.text.tokenizer import TextTokenizer

UNFINISHED = "\N{REPLACEMENT CHARACTER}"


class TextStream:
    """Decodes the text after `prompt` piece by piece."""

    def __init__(self, tokenizer: TextTokenizer, prompt: Sequence[int]) -> None:
        self.tokenizer = tokenizer
        # tokens[before:shown] gave text that was returned already; they are the context for decoding the rest.
        self.tokens, self.before, self.shown = list(prompt), 0, len(prompt)

    def push(self, token: int) -> str:
        """Return the text that `token` completes, often a word, sometimes nothing."""
        self.tokens.append(token)
        text = self._new_text()
        if not text or text.endswith(UNFINISHED):
            return ""
        self.before, self.shown = self.shown, len(self.tokens)
        return text

    def finish(self) -> str:
        """Return the text that was held back and will not be completed, including replacement characters."""
        return self._new_text()

    def _new_text(self) -> str:
        known = self.tokenizer.decode(self.tokens[self.before : self.shown])
        both = self.tokenizer.decode(self.tokens[self.before :])
        # If a prompt of ids ends within a character, `known` ends in a replacement character that `both` lacks.
        same = next((i for i, (a, b) in enumerate(zip(known, both)) if a != b), min(len(known), len(both)))
        return both[same:]


class StopStrings:
    """Passes on a text piece by piece up to the first of `stops`; then `found` is true."""

    def __init__(self, stops: Sequence[str]) -> None:
        self.stops, self.held, self.found = stops, "", False

    def push(self, piece: str) -> str:
        """Return the text so far that can no longer be part of a stop string."""
        text = self.held + piece
        starts = [start for stop in self.stops if (start := text.find(stop)) >= 0]
        if starts:
            self.found, self.held = True, ""
            return text[: min(starts)]
        lengths = (length for stop in self.stops for length in range(1, len(stop)) if text.endswith(stop[:length]))
        border = len(text) - max(lengths, default=0)
        self.held = text[border:]
        return text[:border]

    def finish(self) -> str:
        """Return the text that was held back, at the end of the text."""
        held, self.held = self.held, ""
        return held
