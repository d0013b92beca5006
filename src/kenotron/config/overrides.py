"""Apply the overrides of a command line to a config: a dotted path, `=`, and a YAML value; or another YAML file.

tokens.train_steps=100    data_stages.0.data.seed=1    model.init_method={path: checkpoints/100}    data.yaml
"""

from kenotron.config.document import Document, Keys, parse_value
from kenotron.config.errors import InputError, counted


def check_overrides(overrides: object) -> None:
    """Raise InputError unless `overrides`, the argument of a function, is a list of texts."""
    if not isinstance(overrides, list | tuple) or not all(isinstance(text, str) for text in overrides):
        raise InputError(f"overrides: expected a list such as ['tokens.train_steps=100'], found {overrides!r}")


def is_file(text: str) -> bool:
    """Return whether `text` is the name of a YAML file rather than ``path=value``."""
    return "=" not in text and text.endswith((".yaml", ".yml"))


VARIANTS = {"optimizer_factory": ["name"], "loss": ["name"], "init_method": ["path", "use_mup", "std"]}
"""Section with variants → the keys that select one."""


def merge(document: Document, other: Document, keys: Keys = ()) -> None:
    """Merge maps of `other` into `document` below `keys`; other values, and maps of other variants, replace the old."""
    for name, value in other.get(*keys).items():
        path = (*keys, name)
        old = document.get(*path)
        if isinstance(value, dict) and isinstance(old, dict) and not _selects_another(name, value, old):
            merge(document, other, path)
        else:
            document.put(path, value, other.place(path))
            document.places |= {inner: place for inner, place in other.places.items() if inner[: len(path)] == path}


def _selects_another(section: object, new: dict[str, object], old: dict[str, object]) -> bool:
    selecting = [key for key in VARIANTS.get(str(section), ()) if key in new]
    return any(key not in old or (key == "name" and new[key] != old[key]) for key in selecting)


def apply(document: Document, text: str) -> None:
    """Apply one override `path=value` to `document`; path and value are validated later, with the complete config."""
    path, equals, value = text.partition("=")
    path = path.strip()
    if not equals or not path or not all(path.split(".")):
        raise InputError(f"{text}: expected an override of the form section.key=value, without spaces")
    place = f"override {text}"
    document.put(_keys(document, path, place), parse_value(value, place), place)


def _keys(document: Document, path: str, place: str) -> Keys:
    keys: Keys = ()
    target: object = document.data
    for part in path.split("."):
        at = ".".join(map(str, keys))
        if isinstance(target, list):
            if not part.isdecimal() or int(part) >= len(target):
                items = counted(len(target), "item")
                raise InputError(f"{place}: '{at}' is a list of {items}, numbered from 0; it has no '{part}'")
            keys = (*keys, int(part))
        elif target is None or isinstance(target, dict):
            keys = (*keys, part)
        else:
            raise InputError(f"{place}: '{at}' is {target!r}, it has no key '{part}'")
        target = document.get(*keys)
    return keys
