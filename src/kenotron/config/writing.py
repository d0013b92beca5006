"""Write a `Config` as YAML, and compare two configs.

    >>> print(dump(config))
    general:
      project: debug
      …
    >>> diff(a, b)
    [('tokens.train_steps', 15, 30)]

The YAML loads to an equal config.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import yaml

from kenotron.config.config import Config
from kenotron.config.scalars import Loader


class _Missing:
    """The value in a difference of a key that one side does not have."""

    def __init__(self, text: str) -> None:
        self.text = text

    def __repr__(self) -> str:
        return self.text


ABSENT, OTHER = _Missing("(absent)"), _Missing("something else")


SafeDumper = getattr(yaml, "CSafeDumper", yaml.SafeDumper)  # libyaml's is ten times as fast, if PyYAML has it


class _Dumper(SafeDumper):  # type: ignore[misc, valid-type]
    """Quotes every text that this package's loader or PyYAML's would not read as text."""

    yaml_implicit_resolvers = {  # noqa: RUF012
        first: Loader.yaml_implicit_resolvers.get(first, []) + SafeDumper.yaml_implicit_resolvers.get(first, [])
        for first in {*Loader.yaml_implicit_resolvers, *SafeDumper.yaml_implicit_resolvers}
    }

    def ignore_aliases(self, data: Any) -> bool:
        return True

    def represent_str(self, data: str) -> yaml.ScalarNode:
        # PyYAML leaves rare line breaks unescaped outside double quotes, and reads them back as spaces.
        style = '"' if any(character in data for character in "\x85\u2028\u2029\ufeff") else None
        return self.represent_scalar("tag:yaml.org,2002:str", data, style=style)


_Dumper.add_representer(str, _Dumper.represent_str)


def to_dict(config: Config) -> dict[str, Any]:
    """Return plain data with every key under its YAML name, including defaults."""
    return config.model_dump(by_alias=True)


def dump(config: Config | dict[str, Any]) -> str:
    """Return YAML with every key of a config, including defaults, or with the keys of plain data."""
    data = to_dict(config) if isinstance(config, Config) else config
    return yaml.dump(data, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=110)


def inline(value: object) -> str:
    """Return a value as one line of YAML, in the form of an override."""
    text = yaml.dump(value, Dumper=_Dumper, default_flow_style=True, sort_keys=False, width=10**6)
    return text.removesuffix("...\n").strip()


def flatten(value: object, path: str = "") -> Iterator[tuple[str, object]]:
    """Yield (dotted path, value) for the leaves of nested maps and lists. An empty map or list is a leaf."""
    for name, inner in items(value):
        yield from flatten(inner, f"{path}.{name}" if path else str(name))
    if not isinstance(value, dict | list) or not value:
        yield path, value


def items(value: object) -> Iterable[tuple[str | int, Any]]:
    """Return (key or index, item) of a map or list, and nothing for other values."""
    if isinstance(value, dict):
        return value.items()
    return enumerate(value) if isinstance(value, list) else ()


def diff(a: Config, b: Config) -> list[tuple[str, object, object]]:
    """Return every dotted path whose value differs, with both values (`ABSENT` if a side does not have the key)."""
    return differences(dict(flatten(to_dict(a))), dict(flatten(to_dict(b))))


def differences(left: Mapping[str, object], right: Mapping[str, object]) -> list[tuple[str, object, object]]:
    """Return the differences as `diff` does, for maps of path → value; `OTHER` stands for a map or list of one side."""
    paths = dict.fromkeys([*left, *right])
    inner = {path[:end] for path in paths for end, character in enumerate(path) if character == "."}
    found = []
    for path in paths:
        missing = OTHER if path in inner else ABSENT
        old, new = left.get(path, missing), right.get(path, missing)
        if old != new:
            found.append((path, old, new))
    return found
