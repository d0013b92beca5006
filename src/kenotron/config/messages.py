"""Pydantic's errors as lines that say where, which key, what was expected and what was found.

my.yaml:12: tokens.train_steps: expected an integer, found 'abc'
my.yaml:30: unknown key 'tokens.trainsteps'; did you mean 'train_steps'?
my.yaml:54: model.init_method: 'std' belongs to the variant random, but 'path' makes this existing; …
"""

import re
from collections.abc import Iterator
from functools import cache
from typing import Any, cast

from pydantic import ValidationError

from kenotron.config.document import Document, Keys
from kenotron.config.errors import nearest
from kenotron.config.packaged import packaged
from kenotron.config.schema import is_tag, owner, paths_by_name, siblings
from kenotron.config.writing import inline

Location = tuple[str | int, ...]


@cache
def _known() -> dict[str, Any]:
    """What messages.yaml says."""
    return cast(dict[str, Any], packaged("kenotron.config", "messages.yaml"))


@cache
def _other_names() -> tuple[dict[str, str], dict[str, str]]:
    """Names that other libraries have for a key → our name, and names of what is done another way here → how."""
    keys = {theirs: ours for ours, names in _known()["keys"].items() for theirs in names.split()}
    return keys, {name: each["hint"] for each in _known()["otherwise"] for name in each["names"].split()}


def command_called(name: str) -> str:
    """The command that other programs call `name`; empty if there is none."""
    return next((ours for ours, names in _known()["commands"].items() if name in names.split()), "")


def hint_of(name: str, around: str = "") -> str:
    """What to write for the key `name`, of another library or elsewhere; empty if it is not known."""
    if hint := _other_names()[1].get(name):
        return f"; {hint}"
    return f"; did you mean '{paths[0]}'?" if (paths := paths_of(name, around)) else ""


def explain(error: ValidationError, document: Document) -> list[str]:
    """One line per error, in schema order."""
    errors: list[dict[str, Any]] = [dict(each) for each in error.errors(include_url=False)]
    extra: list[Location] = [each["loc"] for each in errors if each["type"] == "extra_forbidden"]
    lines: list[str] = []
    for each in errors:
        if each["type"] != "missing" or not _misspelt(each["loc"], extra):
            lines.extend(_lines(each, extra, document))
    return list(dict.fromkeys(lines))


def _misspelt(missing: Location, extra: list[Location]) -> bool:
    """Whether an unknown key's own line already suggests this missing one."""
    unknown = [str(each[-1]) for each in extra if each[:-1] == missing[:-1]]
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
        yield document.at(keys[:-1], f"missing key '{dotted(keys)}'")
    elif error["type"] == "extra_forbidden" and owner(location[:-1], str(location[-1])):
        yield _mixed_variants(location, extra, document)
    elif error["type"] == "extra_forbidden":
        yield document.at(keys, _unknown(location, error["input"]))
    else:
        if error["type"] == "variant" and isinstance(error["input"], dict) and "name" in error["input"]:
            keys, error = (*keys, "name"), error | {"input": error["input"]["name"]}
        name, asked = error["input"], dotted(keys)
        of_loss = asked == "model.loss" and name in context["keys"]
        if isinstance(name, str) and (of_loss or asked.endswith("optimizer_factory")):
            yield document.at(keys, f"{asked}: expected a map of keys, found {name!r}; set {asked}.name={name}")
            return
        words = _names(error["input"]) if isinstance(error["input"], dict | str) else []
        hint = next(filter(None, (_space_missing(word, location) for word in words)), "")
        said = _expected(error, context)
        if document.place(keys).startswith("override "):  # the shell takes quotes away
            said = said.replace("(write it in quotes)", f"(write '{asked}=\"{shown(name)}\"')")
        yield document.at(keys, f"{asked}: {said}{hint}")


def dotted(keys: Keys) -> str:
    """Keys as a dotted path; `config` for the root."""
    return ".".join(map(str, keys)) or "config"


def _without_tags(location: Location) -> Keys:
    return tuple(part for part in location if not is_tag(part))


def _parts(path: str) -> Keys:
    return tuple(int(part) if part.isdecimal() else part for part in path.split(".") if part)


def _expected(error: dict[str, Any], context: dict[str, Any]) -> str:
    kind, found = error["type"], error["input"]
    if kind == "expected":
        return f"expected {error['msg']}, found {shown(found)}"
    if kind not in _known()["expected"]:
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
    wanted = re.sub(r"\b(True|False)\b", lambda word: word[0].lower(), _known()["expected"][kind].format(**context))
    return f"expected {wanted}, found {shown(found)}{hint}"


def _names(found: dict[str, Any] | str) -> list[str]:
    return [found] if isinstance(found, str) else [str(name) for name in found]


def _unknown(location: Location, value: object) -> str:
    name = str(location[-1])
    keys = _without_tags(location)
    around = "".join("<i>." if isinstance(key, int) else f"{key}." for key in keys[:-1])  # as paths of keys begin
    message = f"unknown key '{dotted(keys)}'"
    elsewhere = paths_of(name, around)
    exact = any(name in names for names in _other_names()) or any(path.startswith(around) for path in elsewhere)
    near = _space_missing(name, location[:-1]) or nearest(name, siblings(location[:-1]))
    if near and not exact:
        return message + near
    if hint := hint_of(name, around):
        return message + hint
    known = {str(key): paths[0] for key in value if (paths := paths_of(str(key)))} if isinstance(value, dict) else {}
    return message + next((f"; its '{key}' is '{path}' here" for key, path in known.items()), "")


def paths_of(name: str, around: str = "") -> list[str]:
    """The paths of keys of this name, or of the one that other libraries call so.

    Those below `around` come first, and those of datasets for validation and test after those of the training data.
    """
    paths = paths_by_name().get(_other_names()[0].get(name, name), [])
    return sorted(paths, key=lambda path: (not path.startswith(around), "_datasets." in path))


def _space_missing(text: str, location: Location) -> str:
    """A hint for ``train_steps:100``, which YAML takes for one word; empty if that is not the problem."""
    key, colon, value = text.partition(":")
    known = bool(colon) and (key in siblings(location) or key in paths_by_name())
    return f"; write '{key}: {value}', with a space after the colon" if known else ""


def _mixed_variants(location: Location, extra: list[Location], document: Document) -> str:
    """One line for a map with keys of two variants, for example after an override."""
    around = location[:-1]
    other = owner(around, str(location[-1]))
    foreign = [str(each[-1]) for each in extra if each[:-1] == around and owner(around, str(each[-1])) == other]
    keys = _without_tags(around)
    own = {name: value for name, value in document.get(*keys).items() if name in siblings(around)}
    overriding = [name for name in foreign if document.place((*keys, name)).startswith("override ")]
    keep = {name: document.get(*keys, name) for name in overriding} or own
    theirs, ours = (", ".join(f"'{name}'" for name in names) for names in (foreign, own))
    message = (
        f"{dotted(keys)}: {theirs} {'belongs' if len(foreign) == 1 else 'belong'} to the variant "
        f"{str(other).strip('()')}, but {ours or 'the rest'} makes this {str(around[-1]).strip('()')}; "
        f"to switch, set the complete map: {dotted(keys)}={inline(keep)}"
    )
    return document.at((*keys, foreign[0]), message)


def shown(value: object) -> str:
    """A value as written in YAML, abbreviated."""
    if value is None or isinstance(value, bool):
        return "null" if value is None else str(value).lower()
    if isinstance(value, dict):
        return "a map with " + (", ".join(f"'{k}'" for k in list(value)[:4]) if value else "no keys")
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
