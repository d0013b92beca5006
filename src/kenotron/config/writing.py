"""From `Config` back to YAML, and what differs between two configs.

>>> load(yaml_of(dump(config))) == config
True
>>> diff(a, b)
[('tokens.train_steps', 15, 30)]
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import yaml

from kenotron.config.config import Config
from kenotron.config.document import _Loader


class _Absent:
    """Stands in a difference for a key that one side does not have."""

    def __repr__(self) -> str:
        return "(absent)"


ABSENT = _Absent()


class _Dumper(yaml.SafeDumper):
    """Quotes every text that our reader, or PyYAML's own, would take for something else."""

    yaml_implicit_resolvers = {  # noqa: RUF012
        first: _Loader.yaml_implicit_resolvers.get(first, [])
        + yaml.SafeDumper.yaml_implicit_resolvers.get(first, [])
        for first in {*_Loader.yaml_implicit_resolvers, *yaml.SafeDumper.yaml_implicit_resolvers}
    }

    def ignore_aliases(self, data: Any) -> bool:
        return True


def to_dict(config: Config) -> dict[str, Any]:
    """Plain data with every key under its YAML name, defaults included."""
    return config.model_dump(by_alias=True)


def dump(config: Config) -> str:
    """YAML with every key, defaults included, which loads to an equal config."""
    return yaml.dump(to_dict(config), Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=110)


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
