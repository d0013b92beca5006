"""From `Config` back to YAML, and what differs between two configs.

    >>> print(dump(config, comments=True))
    general:
      # Name of the project.
      project: debug
      …
    >>> diff(a, b)
    [('tokens.train_steps', 15, 30)]

What is written loads again to an equal config.
"""

from __future__ import annotations

from collections.abc import Iterator
from textwrap import wrap
from typing import Any

import yaml

from kenotron.config.config import Config
from kenotron.config.document import Keys, Loader, parse
from kenotron.config.section import Section


class _Absent:
    """Stands in a difference for a key that one side does not have."""

    def __repr__(self) -> str:
        return "(absent)"


ABSENT = _Absent()


class _Dumper(yaml.SafeDumper):
    """Quotes every text that our reader, or PyYAML's own, would take for something else."""

    yaml_implicit_resolvers = {  # noqa: RUF012
        first: Loader.yaml_implicit_resolvers.get(first, []) + yaml.SafeDumper.yaml_implicit_resolvers.get(first, [])
        for first in {*Loader.yaml_implicit_resolvers, *yaml.SafeDumper.yaml_implicit_resolvers}
    }

    def ignore_aliases(self, data: Any) -> bool:
        return True

    def represent_str(self, data: str) -> yaml.ScalarNode:
        # PyYAML leaves rare line breaks unescaped outside double quotes, and reads them back as spaces.
        style = '"' if any(character in data for character in "\x85\u2028\u2029\ufeff") else None
        return self.represent_scalar("tag:yaml.org,2002:str", data, style=style)


_Dumper.add_representer(str, _Dumper.represent_str)


def to_dict(config: Config) -> dict[str, Any]:
    """Plain data with every key under its YAML name, defaults included."""
    return config.model_dump(by_alias=True)


def dump(config: Config, comments: bool = False) -> str:
    """YAML with every key, defaults included; with `comments` each key's sentence stands above it."""
    text = yaml.dump(to_dict(config), Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=110)
    return _commented(text, config) if comments else text


def inline(value: Any) -> str:
    """A value on one line of YAML, as an override takes it."""
    text = yaml.dump(value, Dumper=_Dumper, default_flow_style=True, sort_keys=False, width=10**6)
    return text.removesuffix("...\n").strip()


def _commented(text: str, config: Config) -> str:
    above: dict[int, str] = {}  # line number → comment
    places = parse(text).places
    for keys, sentence in _sentences(config, ()):
        above[int(places[keys].removeprefix("line "))] = sentence
    lines: list[str] = []
    for number, line in enumerate(text.rstrip("\n").split("\n"), 1):
        if number in above:
            indent = " " * (len(line) - len(line.lstrip(" ")))
            lines += [f"{indent}# {part}" for part in wrap(above[number], 100)]
        lines.append(line)
    return "\n".join(lines) + "\n"


def _sentences(value: Any, keys: Keys) -> Iterator[tuple[Keys, str]]:
    """Every key below a section with its sentence."""
    if isinstance(value, list):
        for i, item in enumerate(value):
            yield from _sentences(item, (*keys, i))
    if not isinstance(value, Section) or "overrides" in type(value).model_fields:
        return
    for name, field in type(value).model_fields.items():
        below: Keys = (*keys, field.alias or name)
        yield below, str(field.description)
        yield from _sentences(getattr(value, name), below)


def flatten(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """The leaves of nested maps and lists with their dotted paths; an empty map or list is a leaf."""
    pairs = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for name, inner in pairs:
        yield from flatten(inner, f"{path}.{name}" if path else str(name))
    if not isinstance(value, dict | list) or not value:
        yield path, value


def diff(a: Config, b: Config) -> list[tuple[str, Any, Any]]:
    """Every dotted path whose value differs, with both values (`ABSENT` where a side has no such key)."""
    left, right = dict(flatten(to_dict(a))), dict(flatten(to_dict(b)))
    return [
        (path, left.get(path, ABSENT), right.get(path, ABSENT))
        for path in dict.fromkeys([*left, *right])
        if left.get(path, ABSENT) != right.get(path, ABSENT)
    ]
