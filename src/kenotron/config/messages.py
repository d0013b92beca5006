"""Convert pydantic's errors to lines with the place, the key, the expected value and the value found.

my.yaml:12: tokens.train_steps: expected an integer, found 'abc'
my.yaml:30: unknown key 'tokens.trainsteps'; did you mean 'train_steps'?
my.yaml:54: model.init_method: 'std' belongs to the variant random, but this is existing, by 'path'; …
"""

import re
from collections.abc import Iterator
from functools import cache
from typing import Any, cast

from pydantic import ValidationError

from kenotron.config.document import Document, Keys
from kenotron.config.errors import nearest
from kenotron.config.packaged import packaged_yaml
from kenotron.config.schema import is_tag, owner, paths_by_name, siblings
from kenotron.config.writing import inline

Location = tuple[str | int, ...]


@cache
def _texts() -> dict[str, Any]:
    """Return the content of messages.yaml."""
    return cast(dict[str, Any], packaged_yaml("kenotron.config", "messages.yaml"))


@cache
def _other_names() -> tuple[dict[str, str], dict[str, str]]:
    """Return two maps for names in other libraries: name → key, and name → hint if there is no such key."""
    keys = {other: key for key, others in _texts()["keys"].items() for other in others.split()}
    return keys, {name: entry["hint"] for entry in _texts()["otherwise"] for name in entry["names"].split()}


def command_for(name: str) -> str:
    """Return the command that other programs call `name`, or an empty string."""
    return next((command for command, names in _texts()["commands"].items() if name in names.split()), "")


def hint_of(name: str, around: str = "") -> str:
    """Return a hint for a key `name` of another library or section; empty if `name` is not known."""
    if hint := _other_names()[1].get(name):
        return f"; {hint}"
    paths = paths_of(name, around)
    return f"; did you mean '{paths[0]}'?" if paths else ""


def explain(error: ValidationError, document: Document) -> list[str]:
    """Return one line per problem, in schema order."""
    errors: list[dict[str, Any]] = [dict(details) for details in error.errors(include_url=False)]
    extra: list[Location] = [details["loc"] for details in errors if details["type"] == "extra_forbidden"]
    lines: list[str] = []
    for details in errors:
        if details["type"] != "missing" or not _misspelt(details["loc"], extra):
            lines.extend(_lines(details, extra, document))
    return list(dict.fromkeys(lines))


def _misspelt(missing: Location, extra: list[Location]) -> bool:
    """Return whether the message for an unknown key already suggests this missing one."""
    unknown = [str(location[-1]) for location in extra if location[:-1] == missing[:-1]]
    return any(f"'{missing[-1]}'" in nearest(name, siblings(missing[:-1])) for name in unknown)


def _lines(error: dict[str, Any], extra: list[Location], document: Document) -> Iterator[str]:
    location, context = error["loc"], error.get("ctx", {})
    keys = _without_tags(location)
    if error["type"] == "checks":
        for path, message in context["problems"]:
            yield document.at(_parts(path), f"{path}: {message}")
    elif error["type"] == "check":
        keys = keys + _parts(context["path"])
        yield document.at(keys, f"{dotted(keys)}: {context['message']}")
    elif error["type"] == "missing":
        if section := re.match(r"override ([^={]+)=\s*{", document.place(keys[:-1])):
            yield document.at(keys[:-1], f"a map replaces the whole section; {section[1]}.KEY=VALUE sets one key of it")
        yield document.at(keys[:-1], f"missing key '{dotted(keys)}'")
    elif error["type"] == "extra_forbidden" and owner(location[:-1], str(location[-1])):
        yield _mixed_variants(location, extra, document)
    elif error["type"] == "extra_forbidden":
        yield document.at(keys, _unknown(location, error["input"]))
    else:
        if error["type"] == "variant" and isinstance(error["input"], dict) and "name" in error["input"]:
            keys, error = (*keys, "name"), error | {"input": error["input"]["name"]}
        value, path = error["input"], dotted(keys)
        is_loss = path == "model.loss" and value in context["keys"]
        if isinstance(value, str) and (is_loss or path.endswith("optimizer_factory")):
            yield document.at(keys, f"{path}: expected a map of keys, found {value!r}; set {path}.name={value}")
            return
        words = _names(value) if isinstance(value, dict | str) else []
        hint = next(filter(None, (_space_missing(word, location) for word in words)), "")
        message = _expected(error, context)
        if document.place(keys).startswith("override "):  # the shell removes quotes
            message = message.replace("(write it in quotes)", f"(write '{path}=\"{shown(value)}\"')")
        yield document.at(keys, f"{path}: {message}{hint}")


def dotted(keys: Keys) -> str:
    """Return keys as a dotted path; `config` for the root."""
    return ".".join(map(str, keys)) or "config"


def _without_tags(location: Location) -> Keys:
    return tuple(part for part in location if not is_tag(part))


def _parts(path: str) -> Keys:
    return tuple(int(part) if part.isdecimal() else part for part in path.split(".") if part)


def _expected(error: dict[str, Any], context: dict[str, Any]) -> str:
    kind, found = error["type"], error["input"]
    if kind == "expected":
        return f"expected {error['msg']}, found {shown(found)}"
    if kind not in _texts()["expected"]:
        return str(error["msg"])
    if kind == "too_short" and isinstance(found, dict):
        return f"expected a map of at least {context['min_length']}, found {shown(found)}"
    hint = ""
    if kind == "literal_error" and isinstance(found, str):
        hint = nearest(found, re.findall(r"'([^']*)'", context["expected"]))
    elif kind == "variant" and isinstance(found, dict | str):
        hint = next(filter(None, (nearest(str(name), context["keys"]) for name in _names(found))), "")
    elif kind == "string_type" and isinstance(found, int | float):
        hint = " (write it in quotes)"
    elif kind == "float_type" and isinstance(found, str) and re.fullmatch(r"[-+]?\d+e[-+]?\d+", found, re.IGNORECASE):
        hint = " (text, as PyYAML reads numbers without a dot: give the file's name, or float(…))"
    expected = re.sub(r"\b(True|False)\b", lambda word: word[0].lower(), _texts()["expected"][kind].format(**context))
    return f"expected {expected}, found {shown(found)}{hint}"


def _names(found: dict[str, Any] | str) -> list[str]:
    return [found] if isinstance(found, str) else [str(name) for name in found]


def _unknown(location: Location, value: object) -> str:
    name = str(location[-1])
    keys = _without_tags(location)
    around = "".join("<i>." if isinstance(key, int) else f"{key}." for key in keys[:-1])  # as in schema paths
    message = f"unknown key '{dotted(keys)}'"
    elsewhere = paths_of(name, around)
    exact = any(name in names for names in _other_names()) or any(path.startswith(around) for path in elsewhere)
    variants = [other for other, paths in paths_by_name().items() if around + other in paths]
    near = _space_missing(name, location[:-1]) or nearest(name, siblings(location[:-1])) or nearest(name, variants)
    if near and not exact:
        return message + near
    if hint := hint_of(name, around):
        return message + hint
    known = {str(key): paths[0] for key in value if (paths := paths_of(str(key)))} if isinstance(value, dict) else {}
    return message + next((f"; its '{key}' is '{path}' here" for key, path in known.items()), "")


def paths_of(name: str, around: str = "") -> list[str]:
    """Return the paths of the keys called `name`, here or in other libraries.

    Paths below `around` come first, and datasets for validation and test after the training data.
    """
    paths = paths_by_name().get(_other_names()[0].get(name, name), [])
    return sorted(paths, key=lambda path: (not path.startswith(around), "_datasets." in path))


def _space_missing(text: str, location: Location) -> str:
    """Return a hint for ``train_steps:100``, which YAML reads as one word; empty if that is not the problem."""
    key, colon, value = text.partition(":")
    known = bool(colon) and (key in siblings(location) or key in paths_by_name())
    return f"; write '{key}: {value}', with a space after the colon" if known else ""


def _mixed_variants(location: Location, extra: list[Location], document: Document) -> str:
    """Return one line for a map with keys of two variants, for example after an override."""
    around = location[:-1]
    other = owner(around, str(location[-1]))
    unknown = [str(extra_key[-1]) for extra_key in extra if extra_key[:-1] == around]
    foreign = [name for name in unknown if owner(around, name) == other]
    keys = _without_tags(around)
    valid = {name: value for name, value in document.get(*keys).items() if name in siblings(around)}
    overriding = [name for name in foreign if document.place((*keys, name)).startswith("override ")]
    keep = {name: document.get(*keys, name) for name in overriding} or valid
    deciding = [name for name in valid if name not in siblings((*around[:-1], str(other)))] or valid
    foreign_names, valid_names = (", ".join(f"'{name}'" for name in names) for names in (foreign, deciding))
    message = (
        f"{dotted(keys)}: {foreign_names} {'belongs' if len(foreign) == 1 else 'belong'} to the variant "
        f"{str(other).strip('()')}, but this is {str(around[-1]).strip('()')}, by {valid_names or 'its other keys'}; "
        f"to switch, set the complete map: {dotted(keys)}={inline(keep)}"
    )
    return document.at((*keys, foreign[0]), message)


def shown(value: object) -> str:
    """Return a value as written in YAML, abbreviated."""
    if value is None or isinstance(value, bool):
        return "null" if value is None else str(value).lower()
    if isinstance(value, dict):
        return "a map with " + (", ".join(f"'{k}'" for k in list(value)[:4]) if value else "no keys")
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
