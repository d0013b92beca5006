"""Pydantic's errors as lines that name the place, the key, what was expected and what was found.

my.yaml:12: tokens.train_steps: expected an integer, found 'abc'
my.yaml:30: unknown key 'tokens.trainsteps'; did you mean 'train_steps'?
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from pydantic import ValidationError

from kenotron.config.document import Document, Keys
from kenotron.config.errors import nearest
from kenotron.config.schema import is_tag, owner, paths_by_name, siblings

_EXPECTED = {
    "int_type": "an integer",
    "int_from_float": "an integer",
    "float_type": "a number",
    "finite_number": "a finite number",
    "string_type": "text",
    "bool_type": "true or false",
    "list_type": "a list",
    "dict_type": "a map of keys",
    "model_type": "a map of keys",
    "greater_than": "a number above {gt}",
    "greater_than_equal": "a number of at least {ge}",
    "less_than": "a number below {lt}",
    "less_than_equal": "a number of at most {le}",
    "literal_error": "{expected}",
    "variant": "{expected}",
    "too_short": "a list of at least {min_length}",
    "string_too_short": "text that is not empty",
}


def explain(error: ValidationError, document: Document) -> list[str]:
    """One line per error, in the order of the schema, without repetitions."""
    lines = [line for each in error.errors(include_url=False) for line in _lines(dict(each), document)]
    return list(dict.fromkeys(lines))


def _lines(error: dict[str, Any], document: Document) -> Iterator[str]:
    location, context = error["loc"], error.get("ctx", {})
    keys: Keys = tuple(part for part in location if not is_tag(part))
    if error["type"] == "checks":
        for path, message in context["problems"]:
            found = _split(path, document)
            yield _at(document, found, f"{path}: {message}")
    elif error["type"] == "check":
        keys = keys + tuple(int(p) if p.isdecimal() else p for p in context["path"].split(".") if p)
        yield _at(document, keys, f"{dotted(keys)}: {context['message']}")
    elif error["type"] == "missing":
        yield _at(document, keys[:-1], f"missing key '{dotted(keys)}'{_misspelt(location, document)}")
    elif error["type"] == "extra_forbidden":
        yield _at(document, keys, _unknown(location, keys))
    else:
        yield _at(document, keys, f"{dotted(keys)}: {_expected(error, context)}")


def _split(path: str, document: Document) -> Keys:
    return tuple(int(part) if part.isdecimal() else part for part in path.split("."))


def dotted(keys: Keys) -> str:
    return ".".join(map(str, keys)) or "config"


def _at(document: Document, keys: Keys, message: str) -> str:
    place = document.place(keys)
    return f"{place}: {message}" if place else message


def _expected(error: dict[str, Any], context: dict[str, Any]) -> str:
    found = error["input"]
    if error["type"] == "expected":
        return f"expected {error['msg']}, found {shown(found)}"
    if error["type"] not in _EXPECTED:
        return str(error["msg"])
    hint = ""
    if error["type"] == "literal_error" and isinstance(found, str):
        hint = nearest(found, re.findall(r"'([^']*)'", context["expected"]))
    elif error["type"] == "variant" and isinstance(found, dict):
        hint = next(filter(None, (nearest(str(name), context["keys"]) for name in found)), "")
    elif error["type"] == "string_type" and isinstance(found, int | float):
        hint = " (write it in quotes)"
    return f"expected {_EXPECTED[error['type']].format(**context)}, found {shown(found)}{hint}"


def _unknown(location: tuple[str | int, ...], keys: Keys) -> str:
    name, around = str(keys[-1]), location[:-1]
    message = f"unknown key '{dotted(keys)}'"
    if other := owner(around, name):
        variant, parent = str(around[-1]).strip("()"), dotted(keys[:-1])
        return (
            f"{message}: it belongs to the variant '{other.strip('()')}', but the other keys make this "
            f"'{variant}'; give the whole to switch: {parent}={{{name}: …}}"
        )
    if near := nearest(name, siblings(around)):
        return message + near
    elsewhere = paths_by_name().get(name, [])
    return f"{message}; did you mean '{elsewhere[0]}'?" if elsewhere else message


def _misspelt(location: tuple[str | int, ...], document: Document) -> str:
    """Where a key is missing, a key of a similar name beside it is the likely cause; it has its own line."""
    return ""


def shown(value: Any) -> str:
    """A value as a reader of YAML knows it, cut short."""
    if value is None or isinstance(value, bool):
        return str(value).lower().replace("none", "null")
    if isinstance(value, dict):
        return "a map with " + (", ".join(f"'{k}'" for k in list(value)[:4]) if value else "no keys")
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
