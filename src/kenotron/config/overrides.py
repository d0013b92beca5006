"""What a command line lays over a config: a dotted path, `=`, and a YAML value; or another YAML file.

tokens.train_steps=100    data_stages.0.data.seed=1    model.init_method={path: checkpoints/100}    data.yaml
"""

from kenotron.config.document import Document, Keys, parse_value
from kenotron.config.errors import InputError


def is_file(text: str) -> bool:
    """Whether `text` is the name of a YAML file, and not ``path=value``."""
    return "=" not in text and text.endswith((".yaml", ".yml"))


VARIANTS = {"optimizer_factory": ["name"], "loss": ["name"], "init_method": ["path", "use_mup", "std"]}
"""Sections that have variants, and the keys by which one is chosen."""


def merge(document: Document, other: Document, keys: Keys = ()) -> None:
    """Lay `other` over `document` at `keys`: maps are joined, anything else takes the place of what is there.

    So does a map that chooses another variant.
    """
    for name, value in other.get(*keys).items():
        here = (*keys, name)
        before = document.get(*here)
        if isinstance(value, dict) and isinstance(before, dict) and not _is_another(name, value, before):
            merge(document, other, here)
        else:
            document.put(here, value, other.place(here))
            document.places |= {each: place for each, place in other.places.items() if each[: len(here)] == here}


def _is_another(section: object, new: dict[str, object], old: dict[str, object]) -> bool:
    chosen = [key for key in VARIANTS.get(str(section), ()) if key in new]
    return any(key not in old or (key == "name" and new[key] != old[key]) for key in chosen)


def apply(document: Document, text: str) -> None:
    """Put one `path=value` into `document`; whether path and value are valid is checked with the complete config."""
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
                last = len(target) - 1
                raise InputError(f"{place}: '{at}' is a list: expected a number from 0 to {last}, found '{part}'")
            keys = (*keys, int(part))
        elif target is None or isinstance(target, dict):
            keys = (*keys, part)
        else:
            raise InputError(f"{place}: '{at}' is {target!r}, it has no key '{part}'")
        target = document.get(*keys)
    return keys
