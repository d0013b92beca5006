"""YAML as plain data that keeps the line of every key, for error messages.

    tokens:                    >>> document = read("my.yaml")
      train_steps: abc         >>> document.data
                               {'tokens': {'train_steps': 'abc'}}
                               >>> document.place(("tokens", "train_steps"))
                               'my.yaml:2'

Plain scalars follow `scalars`; every tag other than plain data is an error. Of a key that is there twice the last one
counts, as for PyYAML, with a line in `notes`: some of nanotron's examples have one.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from os import PathLike
from pathlib import Path
from typing import Any

import yaml

from kenotron.config.errors import InputError, nearest
from kenotron.config.scalars import Loader

Keys = tuple[str | int, ...]  # ("data_stages", 0, "name")

_LARGEST = 100_000  # nodes of a file with aliases expanded; stops a malicious one


_PLAIN = {f"tag:yaml.org,2002:{tag}" for tag in ("bool", "int", "float", "null", "str")}
_MERGE = "tag:yaml.org,2002:merge"
_HINTS = {  # what a parser says, and what it usually means
    "mapping values are not allowed here": "is a space missing after a colon, or the indentation wrong, here or above?",
    r"character '\t'": "indent with spaces",
}
_scalars = yaml.constructor.SafeConstructor()


@dataclass
class Document:
    """Plain data, and the origin of every key, such as `my.yaml:12` ("" if unknown)."""

    data: dict[str, Any]
    name: str = ""
    places: dict[Keys, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)  # what a reader of the file should know

    def place(self, keys: Keys) -> str:
        """The origin of `keys`, or of the innermost section around them that has one."""
        for length in range(len(keys), 0, -1):
            if keys[:length] in self.places:
                return self.places[keys[:length]]
        return self.name

    def at(self, keys: Keys, message: str) -> str:
        """`message`, after the file and line (or the override) where `keys` were written."""
        place = self.place(keys)
        return f"{place}: {message}" if place else message

    def error(self, keys: Keys, message: str) -> InputError:
        """The error that says `message` of `keys`."""
        return InputError(self.at(keys, message))

    def get(self, *keys: str | int) -> Any:
        """The value at `keys`, or None."""
        value: Any = self.data
        for part in keys:
            if isinstance(value, dict):
                value = value.get(part)
            elif isinstance(value, list) and isinstance(part, int) and -len(value) <= part < len(value):
                value = value[part]
            else:
                return None
        return value

    def put(self, keys: Keys, value: object, place: str | None = None) -> None:
        """Set `keys` to `value`, and create missing maps on the way."""
        target: Any = self.data
        for i, part in enumerate(keys[:-1]):
            if isinstance(target, dict) and target.get(part) is None:
                target[part] = {}
                if place is not None:
                    self.places[keys[: i + 1]] = place
            target = target[part]
        target[keys[-1]] = value
        if place is not None:
            for old in [k for k in self.places if k[: len(keys)] == keys]:
                del self.places[old]
            self.places[keys] = place

    def move(self, old: Keys, new: Keys) -> None:
        """Move a key with everything below it; origins move along."""
        parent: Any = self.get(*old[:-1])
        self.put(new, parent.pop(old[-1]))
        for keys in [k for k in self.places if k[: len(old)] == old]:
            self.places[new + keys[len(old) :]] = self.places.pop(keys)


def read(source: str | Path | dict[str, Any]) -> Document:
    """The document of a YAML file, or of plain data from a program. Raises InputError."""
    if isinstance(source, dict):
        if not all(isinstance(name, str) for name in source):
            raise InputError(f"config: expected the names of sections as keys, found {next(iter(source))!r}")
        return Document(_copy(source))
    if not isinstance(source, str | PathLike):
        raise InputError(f"config: expected the path of a YAML file, a dict or another config, found {source!r:.60}")
    path = Path(source)
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        near = nearest(path.name, (p.name for p in path.parent.glob("*.y*ml")) if path.parent.is_dir() else ())
        raise InputError(f"{path}: no such file{near}") from None
    except IsADirectoryError:
        raise InputError(f"{path}: expected a YAML file, found a folder") from None
    except UnicodeDecodeError:
        raise InputError(f"{path}: expected text in UTF-8") from None
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror})") from None
    return parse(text, str(path))


def parse(text: str, name: str = "") -> Document:
    """The document of a YAML text; `name` precedes line numbers in messages. Raises InputError."""
    node = _compose(text, name)
    if node is None:
        raise InputError(f"{name or 'config'}: expected a config, found nothing")
    if not isinstance(node, yaml.MappingNode):
        raise InputError(f"{name or 'config'}: expected a map of sections at the top")
    document = Document({}, name)
    document.data = _NodeReader(document).value(node, ())
    return document


def parse_value(text: str, name: str) -> Any:
    """The value of a YAML fragment on the command line; what cannot start YAML (`%date`) is text."""
    if text.startswith(("%", "@", "`")):
        return text
    node = _compose(text, name)
    return None if node is None else _NodeReader(Document({}, name)).value(node, ())


def _compose(text: str, name: str) -> yaml.Node | None:
    try:
        return yaml.compose(text, Loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        at = f"{name}:{mark.line + 1}" if mark and not name.startswith("override ") else name
        detail = " ".join(part for part in (error.context, error.problem) if part)
        detail += "".join(f"; {hint}" for words, hint in _HINTS.items() if words in detail)
        if at == name and text.startswith(("{", "[")):
            detail += "; in a shell, quote the complete override: '…={a: 1}'"
        raise InputError(f"{at}: not valid YAML: {detail}") from None
    except yaml.YAMLError as error:
        raise InputError(f"{name}: not valid YAML: {str(error).splitlines()[0]}") from None


class _NodeReader:
    """Turns nodes into values and records their lines."""

    def __init__(self, document: Document) -> None:
        self.document = document
        self.open: set[int] = set()
        self.count = 0

    def value(self, node: yaml.Node, keys: Keys) -> Any:
        """The plain data of `node`, which is at `keys` of the document."""
        self.count += 1
        if self.count > _LARGEST:
            raise InputError(f"{self._at(node)}: more than {_LARGEST} values with aliases expanded")
        if isinstance(node, yaml.ScalarNode):
            if node.tag not in _PLAIN:
                raise InputError(f"{self._at(node)}: expected plain YAML, found the tag '{node.tag}'")
            try:
                value = _scalars.construct_object(node)
                # 1e3 is a whole number; a key that wants a float gets 1000.0 of it
                whole = isinstance(value, float) and "e" in node.value.lower() and value.is_integer()
                return int(value) if whole else value
            except (ValueError, yaml.YAMLError):
                raise InputError(f"{self._at(node)}: cannot read '{node.value}' as {node.tag.split(':')[-1]}") from None
        if id(node) in self.open:
            raise InputError(f"{self._at(node)}: an alias contains itself")
        self.open.add(id(node))
        if isinstance(node, yaml.SequenceNode):
            result: Any = [self._noted(item, item, (*keys, i)) for i, item in enumerate(node.value)]
        else:
            result = self._mapping(node, keys)
        self.open.remove(id(node))
        return result

    def _mapping(self, node: yaml.Node, keys: Keys) -> dict[str, Any]:
        result: dict[str, Any] = {}
        own: dict[str, yaml.Node] = {}
        for name_node, value_node in node.value:
            if name_node.tag == _MERGE:
                continue
            name = self.value(name_node, keys)
            if not isinstance(name, str):
                raise InputError(f"{self._at(name_node)}: expected text as a key, found {name_node.value} (quote it)")
            if name in own:
                first = own[name].start_mark.line + 1
                twice = f"{self._at(name_node)}: duplicate key '{name}' (first on line {first}); the last one counts"
                self.document.notes.append(twice)
            own[name] = name_node
            result[name] = self._noted(name_node, value_node, (*keys, name))
        for name_node, value_node in self._merged(node):
            name = self.value(name_node, keys)
            if name not in result:
                result[name] = self._noted(name_node, value_node, (*keys, name))
        return result

    def _merged(self, node: yaml.Node) -> Iterator[tuple[yaml.Node, yaml.Node]]:
        """Pairs merged by `<<:`; the map's own keys win, then earlier maps."""
        for name_node, value_node in node.value:
            if name_node.tag != _MERGE:
                continue
            maps = value_node.value if isinstance(value_node, yaml.SequenceNode) else [value_node]
            for each in maps:
                if not isinstance(each, yaml.MappingNode) or id(each) in self.open:
                    raise InputError(f"{self._at(name_node)}: expected a map, or a list of maps, after '<<'")
                yield from (pair for pair in each.value if pair[0].tag != _MERGE)
                self.open.add(id(each))
                yield from self._merged(each)
                self.open.remove(id(each))

    def _noted(self, at: yaml.Node, node: yaml.Node, keys: Keys) -> Any:
        self.document.places[keys] = self._at(at)
        return self.value(node, keys)

    def _at(self, node: yaml.Node) -> str:
        line = node.start_mark.line + 1
        return f"{self.document.name}:{line}" if self.document.name else f"line {line}"


def _copy(value: Any) -> Any:
    """A copy of nested maps and lists, so that the caller's are not modified."""
    if isinstance(value, dict):
        return {k: _copy(v) for k, v in value.items()}
    return [_copy(v) for v in value] if isinstance(value, list | tuple) else value
