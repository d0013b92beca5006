"""The list of keys of nanotron and of the first Kénotron that are not implemented yet.

    lighteval: null   off: accepted and removed
    lighteval: {…}    not supported yet: lighteval (my.yaml:43)

A change that implements one removes its line from the list and adds its section to the schema.
"""

from collections.abc import Iterator, Sequence
from typing import Any

# Key → its values for off. Parents come after their children, which are removed first.
_OFF: dict[str, tuple[Any, ...]] = {"checkpoints.local.copy_to_next_machine": (False,), "lighteval": (None,)}

Keys = tuple[str, ...]


def take_unserved(data: dict[str, Any]) -> list[tuple[Keys, object]]:
    """Return (keys, value) for every key of a config's plain `data` that turns on what is not implemented.

    Listed keys that are off are removed from `data`, because the schema does not have them.
    """
    return list(_keys(data))


def describe_key(keys: Sequence[str | int], value: object) -> str:
    """Return the dotted path of a key, with its value unless that is a map or a list."""
    path = ".".join(map(str, keys))
    if path == "lighteval":
        return "lighteval without a YAML file's tasks.tasks (expected evaluation: {tasks: [hellaswag]})"
    return path if isinstance(value, dict | list) else f"{path}: {value}"


def _keys(data: dict[str, Any]) -> Iterator[tuple[Keys, Any]]:
    init = _at(data, ("model", "init_method"))
    if isinstance(init, dict) and _same(init.get("use_mup"), False):
        del init["use_mup"]  # true selects the variant SpectralInit
    stages = data.get("data_stages")
    for stage in stages if isinstance(stages, list) else ():
        if isinstance(stage, dict) and stage.get("sequence_length_ramp", 0) is None:
            del stage["sequence_length_ramp"]  # in checkpoints from before the first release
    for path, off in _OFF.items():
        keys = tuple(path.split("."))
        section, name = _at(data, keys[:-1]), keys[-1]
        if isinstance(section, dict) and name in section:
            if any(_same(section[name], value) for value in off):
                del section[name]
            else:
                yield keys, section[name]
    dtype = _at(data, ("model", "dtype"))
    if str(dtype).lower().removeprefix("torch.").startswith(("float64", "fp64", "double", "float8", "fp8")):
        yield ("model", "dtype"), dtype  # weights may have it, but no run computes in it


def _at(data: Any, keys: Sequence[str]) -> Any:
    for name in keys:
        data = data.get(name) if isinstance(data, dict) else None
    return data


def _same(value: Any, off: Any) -> bool:
    """Return whether `value` equals `off`; case does not matter, and true is not 1."""
    if isinstance(value, str):
        return value.lower() == off
    return value == off and type(value) is type(off)
