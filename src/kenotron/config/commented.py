"""A config as YAML in which every key is explained.

>>> print(dump_commented(config))
general:
  # Name of the project.
  project: debug
  …
"""

from __future__ import annotations

from collections.abc import Iterator
from textwrap import wrap
from typing import Any

from kenotron.config.config import Config
from kenotron.config.document import Keys, parse
from kenotron.config.section import Section
from kenotron.config.writing import dump


def dump_commented(config: Config) -> str:
    """YAML with every key, including defaults, and each key's description above it."""
    text = dump(config)
    above: dict[int, str] = {}  # line number → comment
    places = parse(text).places
    for keys, description in _descriptions(config, ()):
        above[int(places[keys].removeprefix("line "))] = description
    lines: list[str] = []
    for number, line in enumerate(text.rstrip("\n").split("\n"), 1):
        if number in above:
            indent = " " * (len(line) - len(line.lstrip(" ")))
            lines += [f"{indent}# {part}" for part in wrap(above[number], 100)]
        lines.append(line)
    return "\n".join(lines) + "\n"


def _descriptions(value: Any, keys: Keys) -> Iterator[tuple[Keys, str]]:
    """Every key below a section with its description."""
    if isinstance(value, list):
        for i, item in enumerate(value):
            yield from _descriptions(item, (*keys, i))
    if not isinstance(value, Section) or "overrides" in type(value).model_fields:
        return
    for name, field in type(value).model_fields.items():
        below: Keys = (*keys, field.alias or name)
        yield below, str(field.description)
        yield from _descriptions(getattr(value, name), below)
