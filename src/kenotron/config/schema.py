"""The schema as data: every key with its type, default and description, taken from the models.

    >>> [row.path for row in rows() if row.path.endswith("lr_warmup_steps")]
    ['optimizer.learning_rate_scheduler.lr_warmup_steps']

Error messages use it for valid names, the config reference for its tables, tests for their lists of keys.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin

from pydantic import Tag
from pydantic.fields import FieldInfo

from kenotron.config.architecture import (
    Architecture,
    HFArchitecture,
    architecture_variants,
    built_in_sections,
    yaml_keys,
)
from kenotron.config.config import Config
from kenotron.config.section import Section


@dataclass(frozen=True)
class Row:
    """A key. `path` is dotted, with `<i>` for an index of a list and `<name>` for a key of a map."""

    path: str
    name: str
    section: type[Section]
    field: FieldInfo


def is_tag(part: str | int) -> bool:
    """Return whether a part of an error's location is the tag of a variant."""
    return isinstance(part, str) and part.startswith("(") and part.endswith(")")


def kinds(annotation: Any, tag: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (tag, type) for the alternatives of a type; the tag is "" if it has none."""
    origin = get_origin(annotation)
    if origin is Annotated:
        inner, *metadata = get_args(annotation)
        tags = [m.tag for m in metadata if isinstance(m, Tag)]
        yield from kinds(inner, tags[0] if tags else tag)
    elif origin in (Union, UnionType):
        for alternative in get_args(annotation):
            yield from kinds(alternative, tag)
    elif annotation is Architecture:
        yield from kinds(architecture_variants(), tag)
    else:
        yield tag, annotation


def sections(annotation: Any, below: str = "") -> Iterator[tuple[str, str, type[Section]]]:
    """Yield (path below the key, tag, section) for the sections inside a type."""
    for tag, kind in kinds(annotation):
        if isinstance(kind, type) and issubclass(kind, Section):
            yield below, tag, kind
        elif get_origin(kind) is list:
            yield from sections(get_args(kind)[0], below + ".<i>")
        elif get_origin(kind) is dict:
            yield from sections(get_args(kind)[1], below + ".<name>")


def fields(section: type[Section]) -> Iterator[tuple[str, FieldInfo]]:
    """Yield (YAML key, field) for the keys of a section."""
    for name, field in section.model_fields.items():
        if section is not HFArchitecture or name == "hf":
            yield field.alias or name, field


def rows(section: type[Section] = Config, prefix: str = "") -> Iterator[Row]:
    """Yield every key below `section`, in schema order."""
    for name, field in fields(section):
        path = prefix + name
        yield Row(path, name, section, field)
        for below, _, inner in sections(field.annotation):
            yield from rows(inner, path + below + ".")


def section_at(location: Sequence[str | int]) -> type[Section] | None:
    """Return the section at one of pydantic's locations (keys, indices and tags), or None."""
    current: Any = Config
    for part in location:
        if is_tag(part):
            types = [kind for tag, kind in kinds(current) if tag == part]
        elif isinstance(part, int):
            types = [get_args(kind)[0] for _, kind in kinds(current) if get_origin(kind) is list]
        else:
            types = [inner for _, kind in kinds(current) if (inner := _below(kind, part)) is not None]
        current = types[0] if types else None
    matches = [kind for _, kind in kinds(current) if isinstance(kind, type) and issubclass(kind, Section)]
    return matches[0] if len(matches) == 1 else None


def _below(kind: Any, name: str) -> Any:
    if isinstance(kind, type) and issubclass(kind, Section):
        return next((f.annotation for key, f in fields(kind) if key == name), None)
    return get_args(kind)[1] if get_origin(kind) is dict else None


def siblings(location: Sequence[str | int]) -> set[str]:
    """Return the valid keys of the section at a location."""
    section = section_at(location)
    if section is HFArchitecture:
        return {"hf"}.union(*map(yaml_keys, built_in_sections().values()))
    return {name for name, _ in fields(section)} if section else set()


def owner(location: Sequence[str | int], name: str) -> str | None:
    """Return the tag of another variant of the key at `location` that has the key `name`, or None."""
    if not location or not is_tag(location[-1]):
        return None
    parent = section_at(location[:-2])
    annotation = dict(fields(parent)).get(str(location[-2])) if parent else None
    for tag, kind in kinds(annotation.annotation) if annotation else ():
        if tag != location[-1] and isinstance(kind, type) and issubclass(kind, Section) and name in yaml_keys(kind):
            return tag
    return None


@lru_cache(maxsize=1)
def paths_by_name() -> dict[str, list[str]]:
    """Return key name → the dotted paths that end in it."""
    paths: dict[str, list[str]] = {}
    for row in rows():
        if row.path not in paths.setdefault(row.name, []):
            paths[row.name].append(row.path)
    return paths


def json_schema() -> dict[str, Any]:
    """Return the JSON schema of a config file, for editors."""
    return Config.model_json_schema(by_alias=True) | {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "Kénotron config",
    }


def json_schema_text() -> str:
    """Return `json_schema` as indented JSON."""
    return json.dumps(json_schema(), indent=2, ensure_ascii=False) + "\n"
