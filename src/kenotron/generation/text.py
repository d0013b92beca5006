"""Tokens into text as they come, never half a character.

A byte-level token may be a part of a character: "é" is two bytes, and while only the first has come, decoding
shows the replacement mark "\N{REPLACEMENT CHARACTER}". Such a piece is held back until it is complete:

    tokens     "caf"   0xC3    0xA9    " au"
    pieces     "caf"   ""      "é"     " au"

Some tokenizers write a blank only between words, so a token's text depends on the one before it. A piece is
therefore what decoding *with* the tokens before it adds. The pieces joined are the text, whole.

A text may also end at a stop string. Its beginning is held back until it is known whether the rest follows:

    stop       "\n\n"
    pieces     "one"   "\n"   "two"      "\n"   "\nthree"
    shown      "one"   ""     "\ntwo"    ""     ""            the end
"""

from collections.abc import Sequence

from kenotron.text.tokenizer import TextTokenizer

UNFINISHED = "\N{REPLACEMENT CHARACTER}"


class TextStream:
    """The text that follows `prompt`, piece by piece."""

    def __init__(self, tokenizer: TextTokenizer, prompt: Sequence[int]) -> None:
        self.tokenizer = tokenizer
        # tokens[before:shown] gave text that is out; they are the context in which the rest is decoded.
        self.tokens, self.before, self.shown = list(prompt), 0, len(prompt)

    def push(self, token: int) -> str:
        """The text that `token` completes, often a word, sometimes nothing."""
        self.tokens.append(token)
        text = self._new_text()
        if not text or text.endswith(UNFINISHED):
            return ""
        self.before, self.shown = self.shown, len(self.tokens)
        return text

    def finish(self) -> str:
        """What was held back and will no longer be completed, replacement marks included."""
        return self._new_text()

    def _new_text(self) -> str:
        known = self.tokenizer.decode(self.tokens[self.before : self.shown])
        both = self.tokenizer.decode(self.tokens[self.before :])
        # Where a prompt of ids ends within a character, `known` ends in a mark that `both` no longer has.
        same = next((i for i, (a, b) in enumerate(zip(known, both)) if a != b), min(len(known), len(both)))
        return both[same:]


class StopStrings:
    """Passes a text on, piece by piece, up to the first of `stops`; `found` is then true."""

    def __init__(self, stops: Sequence[str]) -> None:
        self.stops, self.held, self.found = stops, "", False

    def push(self, piece: str) -> str:
        """What of the text so far can no longer be part of a stop string."""
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
        """What was held back: the text ends here."""
        held, self.held = self.held, ""
        return held
