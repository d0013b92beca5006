"""Keys of nanotron and of the first Kénotron that are known here and not implemented yet: the one list of them.

    lighteval: null   asks for nothing: accepted and left out
    lighteval: {…}    not supported yet: lighteval (my.yaml:43)

A feature that arrives takes its line out of the list and adds its section to the schema.
"""

from collections.abc import Iterator, Sequence
from typing import Any

# Key → the values that ask for nothing. Parents come after their children: what is left of them is nothing either.
_OFF: dict[str, tuple[Any, ...]] = {
    "checkpoints.local.copy_to_next_machine": (False,),
    "lighteval": (None,),
}

Keys = tuple[str, ...]


def take_unserved(data: dict[str, Any]) -> list[tuple[Keys, object]]:
    """Every key of a config's plain `data` that asks for what is not implemented, with its value.

    Listed keys that ask for nothing are taken out of `data`: the schema does not have them.
    """
    return list(_keys(data))


def named(keys: Sequence[str | int], value: object) -> str:
    """The dotted path of a key, with its value where that is short."""
    path = ".".join(map(str, keys))
    if path == "lighteval":
        return "lighteval without a YAML file's tasks.tasks (expected evaluation: {tasks: [hellaswag]})"
    return path if isinstance(value, dict | list) else f"{path}: {value}"


def _keys(data: dict[str, Any]) -> Iterator[tuple[Keys, Any]]:
    init = _at(data, ("model", "init_method"))
    if isinstance(init, dict) and _same(init.get("use_mup"), False):
        del init["use_mup"]  # true selects a variant of its own
    stages = data.get("data_stages")
    for stage in stages if isinstance(stages, list) else ():
        if isinstance(stage, dict) and stage.get("sequence_length_ramp", 0) is None:
            del stage["sequence_length_ramp"]  # of checkpoints from before the first release
    for path, off in _OFF.items():
        *around, name = keys = tuple(path.split("."))
        section = _at(data, around)
        if isinstance(section, dict) and name in section:
            if any(_same(section[name], value) for value in off):
                del section[name]
            else:
                yield keys, section[name]
    dtype = _at(data, ("model", "dtype"))
    if str(dtype).lower().removeprefix("torch.").startswith(("float64", "fp64", "double", "float8", "fp8")):
        yield ("model", "dtype"), dtype  # weights may be in it, no run computes in it


def _at(data: Any, keys: Sequence[str]) -> Any:
    for name in keys:
        data = data.get(name) if isinstance(data, dict) else None
    return data


def _same(value: Any, off: Any) -> bool:
    """Whether `value` is the listed one: text in any case, and true is not 1."""
    if isinstance(value, str):
        return value.lower() == off
    return value == off and type(value) is type(off)
