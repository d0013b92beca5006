"""Read YAML as plain data, with the line of every key for error messages.

    tokens:                    >>> document = read("my.yaml")
      train_steps: abc         >>> document.data
                               {'tokens': {'train_steps': 'abc'}}
                               >>> document.place(("tokens", "train_steps"))
                               'my.yaml:2'

Plain scalars are read by the rules of `scalars`; a tag for anything but plain data is an error. Of a duplicate key the
last one counts, as for PyYAML, and `notes` gets a line, because some of nanotron's examples have one.
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

_MAX_NODES = 100_000  # with aliases expanded: stops a malicious file


_PLAIN = {f"tag:yaml.org,2002:{tag}" for tag in ("bool", "int", "float", "null", "str")}
_MERGE = "tag:yaml.org,2002:merge"
_HINTS = {  # words of the parser → the usual mistake
    "mapping values are not allowed here": "is a space missing after a colon, or the indentation wrong, here or above?",
    r"character '\t'": "indent with spaces",
}
_scalars = yaml.constructor.SafeConstructor()


@dataclass
class Document:
    """Plain data with the place of every key, such as `my.yaml:12` ("" if unknown)."""

    data: dict[str, Any]
    name: str = ""
    places: dict[Keys, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)  # warnings about the file

    def place(self, keys: Keys) -> str:
        """Return the place of `keys`, or of the innermost section around them that has one."""
        for length in range(len(keys), 0, -1):
            if keys[:length] in self.places:
                return self.places[keys[:length]]
        return self.name

    def at(self, keys: Keys, message: str) -> str:
        """Return `message` with the file and line, or the override, of `keys` in front."""
        place = self.place(keys)
        return f"{place}: {message}" if place else message

    def error(self, keys: Keys, message: str) -> InputError:
        """Return an InputError with `message` and the place of `keys`."""
        return InputError(self.at(keys, message))

    def get(self, *keys: str | int) -> Any:
        """Return the value at `keys`, or None."""
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
        """Set `keys` to `value`, creating missing maps on the way; `place` replaces the places of the old value."""
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
        """Move a key with everything below it, including places."""
        parent: Any = self.get(*old[:-1])
        self.put(new, parent.pop(old[-1]))
        for keys in [k for k in self.places if k[: len(old)] == old]:
            self.places[new + keys[len(old) :]] = self.places.pop(keys)


def read(source: str | Path | dict[str, Any]) -> Document:
    """Return the document of a YAML file, or of plain data from a program. Raises InputError."""
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
        inside = f"; did you mean '{path / 'config.yaml'}'?" if (path / "config.yaml").exists() else ""
        raise InputError(f"{path}: expected a YAML file, found a folder{inside}") from None
    except UnicodeDecodeError:
        raise InputError(f"{path}: expected text in UTF-8") from None
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror})") from None
    return parse(text, str(path))


def parse(text: str, name: str = "") -> Document:
    """Return the document of a YAML text; `name` precedes line numbers in messages. Raises InputError."""
    node = _compose(text, name)
    if node is None:
        raise InputError(f"{name or 'config'}: expected a config, found nothing")
    if not isinstance(node, yaml.MappingNode):
        raise InputError(f"{name or 'config'}: expected a map of sections at the top")
    document = Document({}, name)
    document.data = _NodeReader(document).value(node, ())
    return document


def parse_value(text: str, name: str) -> Any:
    """Return the value of a YAML fragment on the command line; what cannot start YAML (`%date`) is text."""
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
    """Converts nodes to values and records their lines."""

    def __init__(self, document: Document) -> None:
        self.document = document
        self.open: set[int] = set()  # ids of the nodes around the current one, to find aliases that contain themselves
        self.count = 0

    def value(self, node: yaml.Node, keys: Keys) -> Any:
        """Return the plain data of `node`, which is at `keys` of the document."""
        self.count += 1
        if self.count > _MAX_NODES:
            raise InputError(f"{self._at(node)}: more than {_MAX_NODES} values with aliases expanded")
        if isinstance(node, yaml.ScalarNode):
            if node.tag not in _PLAIN:
                raise InputError(f"{self._at(node)}: expected plain YAML, found the tag '{node.tag}'")
            try:
                value = _scalars.construct_object(node)
                # 1e3 is an integer; a key that expects a float converts it to 1000.0
                whole = isinstance(value, float) and "e" in node.value.lower() and value.is_integer()
                return int(value) if whole else value
            except (ValueError, yaml.YAMLError):
                raise InputError(f"{self._at(node)}: cannot read '{node.value}' as {node.tag.split(':')[-1]}") from None
        if id(node) in self.open:
            raise InputError(f"{self._at(node)}: an alias contains itself")
        self.open.add(id(node))
        if isinstance(node, yaml.SequenceNode):
            result: Any = [self._item(item, item, (*keys, i)) for i, item in enumerate(node.value)]
        else:
            result = self._mapping(node, keys)
        self.open.remove(id(node))
        return result

    def _mapping(self, node: yaml.Node, keys: Keys) -> dict[str, Any]:
        result: dict[str, Any] = {}
        names: dict[str, yaml.Node] = {}
        for name_node, value_node in node.value:
            if name_node.tag == _MERGE:
                continue
            name = self.value(name_node, keys)
            if not isinstance(name, str):
                raise InputError(f"{self._at(name_node)}: expected text as a key, found {name_node.value} (quote it)")
            if name in names:
                first = names[name].start_mark.line + 1
                note = f"{self._at(name_node)}: duplicate key '{name}' (first on line {first}); the last one counts"
                self.document.notes.append(note)
            names[name] = name_node
            result[name] = self._item(name_node, value_node, (*keys, name))
        for name_node, value_node in self._merged(node):
            name = self.value(name_node, keys)
            if name not in result:
                result[name] = self._item(name_node, value_node, (*keys, name))
        return result

    def _merged(self, node: yaml.Node) -> Iterator[tuple[yaml.Node, yaml.Node]]:
        """Yield the pairs that `<<:` merges into a map, whose own keys win, then the earlier maps."""
        for name_node, value_node in node.value:
            if name_node.tag != _MERGE:
                continue
            maps = value_node.value if isinstance(value_node, yaml.SequenceNode) else [value_node]
            for merged in maps:
                if not isinstance(merged, yaml.MappingNode) or id(merged) in self.open:
                    raise InputError(f"{self._at(name_node)}: expected a map, or a list of maps, after '<<'")
                yield from (pair for pair in merged.value if pair[0].tag != _MERGE)
                self.open.add(id(merged))
                yield from self._merged(merged)
                self.open.remove(id(merged))

    def _item(self, at: yaml.Node, node: yaml.Node, keys: Keys) -> Any:
        self.document.places[keys] = self._at(at)
        return self.value(node, keys)

    def _at(self, node: yaml.Node) -> str:
        line = node.start_mark.line + 1
        return f"{self.document.name}:{line}" if self.document.name else f"line {line}"


def _copy(value: Any) -> Any:
    """Copy nested maps and lists, so that changes do not reach the caller."""
    if isinstance(value, dict):
        return {k: _copy(v) for k, v in value.items()}
    return [_copy(v) for v in value] if isinstance(value, list | tuple) else value
