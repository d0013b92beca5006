"""The sampling options of `kn.generate`, `kenotron generate` and chat, with their defaults and checks.

    SamplingOptions(max_new_tokens=16)                      # greedy
    SamplingOptions(temperature=0.8, top_p=0.95, seed=4, stop=["\\n\\n"])
    SamplingOptions(top_k=50)                               # InputError: changes nothing at temperature 0

A new option needs a field here, a keyword of `kn.generate`, and an option of both commands.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from math import inf
from numbers import Integral, Real

from kenotron.config.errors import InputError

_KINDS: dict[type, tuple[type, str]] = {
    bool: (bool, "True or False"),
    int: (Integral, "an integer"),
    float: (Real, "a number"),
    tuple: (tuple, "a list of texts"),
}  # type of the default → accepted types, and their name in messages


@dataclass(frozen=True, kw_only=True)
class SamplingOptions:
    """Options. `temperature` 0 is greedy; `top_k` 0, `top_p` 1.0, `min_p` 0.0, `repetition_penalty` 1.0 are off.

    A text ends before the first of the strings `stop` (or a single string), with `stop_at_eos` also at the end-of-text
    token, and at the latest after `max_new_tokens`. `logprobs` adds the tokens' log-probabilities to completions.
    Raises InputError if a value is out of range or has no effect.
    """

    max_new_tokens: int = 64
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    seed: int = 0
    stop: Sequence[str] = ()
    stop_at_eos: bool = True
    logprobs: bool = False

    def __post_init__(self) -> None:
        if isinstance(self.stop, str | list):
            object.__setattr__(self, "stop", (self.stop,) if isinstance(self.stop, str) else tuple(self.stop))
        for option in fields(self):
            found, (kind, expected) = getattr(self, option.name), _KINDS[type(option.default)]
            if not isinstance(found, kind) or (isinstance(found, bool) and kind is not bool):
                raise InputError(f"{option.name}: expected {expected}, found {found!r:.60}")
        ranges = {
            "max_new_tokens": (self.max_new_tokens >= 1, "1 or more"),
            "temperature": (0 <= self.temperature < inf, "0 (greedy) or more"),
            "top_k": (self.top_k >= 0, "0 (no cut) or more"),
            "top_p": (0 < self.top_p <= 1, "more than 0 and at most 1 (no cut)"),
            "min_p": (0 <= self.min_p <= 1, "0 (no cut) to 1"),
            "repetition_penalty": (0 < self.repetition_penalty < inf, "1 (none) or another number > 0"),
        }
        for name, (inside, expected) in ranges.items():
            if not inside:
                raise InputError(f"{name}: expected {expected}, found {getattr(self, name)}")
        cuts = {"top_k": self.top_k > 0, "top_p": self.top_p < 1, "min_p": self.min_p > 0}
        if self.temperature == 0 and any(cuts.values()):
            name = next(name for name, is_set in cuts.items() if is_set)
            raise InputError(
                f"{name}: changes nothing at temperature 0, which is greedy; set a temperature, such as 1.0"
            )
        if not all(isinstance(text, str) for text in self.stop):
            raise InputError(f"stop: expected a list of texts, found {list(self.stop)!r:.60}")
        if "" in self.stop:
            raise InputError("stop: expected texts, found an empty one")
