"""Keys of nanotron and of the first Kénotron that are known here and not implemented yet: the one list of them.

    metrics_logging: null   asks for nothing: accepted and left out
    metrics_logging: {…}    not supported yet: metrics_logging (my.yaml:43)

A feature that arrives takes its line out of the list and adds its section to the schema.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

# Key → the values that ask for nothing. Parents come after their children: what is left of them is nothing either.
_OFF: dict[str, tuple[Any, ...]] = {
    "metrics_logging.log_detail_interval": (),
    "metrics_logging.log_level": (0,),
    "metrics_logging": (None, {}),
    "tokens.limit_test_batches": (0,),
    "checkpoints.local.copy_to_next_machine": (False,),
    "lighteval": (None,),
    "wandb": (None,),
}

# Served key → its values that are not.
_VALUES: dict[str, tuple[str, ...]] = {
    "model.dtype": (
        *("float16", "fp16", "half", "float64", "fp64", "complex64", "complex128"),
        *("uint8", "int8", "int16", "int32", "int64", "bool"),
    ),
    "model.init_method.scaling_method": ("model_scale",),
}

# Keys that name local files or folders. A URL there would be taken for a folder called `s3:`.
_LOCAL = (
    "general.benchmark_csv_path",
    "general.kill_switch_path",
    "checkpoints.staging_path",
    "checkpoints.local.path",
    "logging.log_dir",
    "profiler.profiler_export_path",
    "remote_data.cache_folder",
    "model.init_method.path",
)
# Keys that name a local path or a store that checkpoints are written to.
_STORES = ("checkpoints.checkpoints_path", "checkpoints.resume_checkpoint_path", "s3_upload.upload_s3_path")
_NO_STORES = re.compile(r"(hf|https?|file|local):/|[A-Za-z][A-Za-z0-9+.-]+:/(?!/.)")
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/")  # `s3:/bucket` too: what pathlib makes of `s3://bucket`

Keys = tuple[str, ...]


def take_unserved(data: dict[str, Any]) -> list[tuple[Keys, object]]:
    """Every key of a config's plain `data` that asks for what is not implemented, with its value.

    Listed keys that ask for nothing are taken out of `data`: the schema does not have them.
    """
    return [*_passwords(data)] or [*_keys(data), *_values(data), *_urls(data)]  # the others repeat values


def named(keys: Sequence[str | int], value: object) -> str:
    """The dotted path of a key, with its value where that is short."""
    path = ".".join(map(str, keys))
    if path == "wandb":
        return "wandb (numbers go to metrics.jsonl and TensorBoard, and to other trackers by a hook, docs/extend.md)"
    if path == "lighteval":
        return "lighteval without a YAML file's tasks.tasks (expected evaluation: {tasks: [hellaswag]})"
    if path == "model.init_method.scaling_method":
        value = f"{value} (nanotron names it without a definition; expected NUM_LAYERS, LAYER_INDEX or NONE)"
    return path if isinstance(value, dict | list) else f"{path}: {value}"


def _keys(data: dict[str, Any]) -> Iterator[tuple[Keys, Any]]:
    details = _at(data, ("metrics_logging",))
    if isinstance(details, dict) and _same(details.get("log_level"), 0):
        details.pop("log_detail_interval", None)  # counts at log_level 1 only
    init = _at(data, ("model", "init_method"))
    if isinstance(init, dict) and _same(init.get("use_mup"), False):
        del init["use_mup"]  # true selects a variant of its own
    for path, off in _OFF.items():
        *around, name = keys = tuple(path.split("."))
        section = _at(data, around)
        if isinstance(section, dict) and name in section:
            if any(_same(section[name], value) for value in off):
                del section[name]
            else:
                yield keys, section[name]


def _values(data: dict[str, Any]) -> Iterator[tuple[Keys, Any]]:
    for path, values in _VALUES.items():
        keys = tuple(path.split("."))
        value = _at(data, keys)
        if isinstance(value, str) and value.lower().removeprefix("torch.") in values:
            yield keys, value


def _urls(data: dict[str, Any]) -> Iterator[tuple[Keys, Any]]:
    wrong = dict.fromkeys(_LOCAL, (_URL, "a local path"))
    wrong |= dict.fromkeys(_STORES, (_NO_STORES, "a local path, or a store's URL such as s3://bucket/run"))
    for path, (pattern, expected) in wrong.items():
        keys = tuple(path.split("."))
        value = _at(data, keys)
        if isinstance(value, str) and pattern.match(value):
            yield keys, f"{value}: expected {expected}"


def _passwords(data: Any, around: Keys = ()) -> Iterator[tuple[Keys, str]]:
    """URLs as ``https://user:password@host``, also as pathlib has them; ``hf://gpt2@main`` is a revision."""
    for name, value in data.items() if isinstance(data, dict) else enumerate(data if isinstance(data, list) else ()):
        found = [x for x in (name, value) if isinstance(x, str) and re.search(r"(?<!\bhf)://?[^/?#\s]*@", x)]
        if found:  # a mix of datasets has URLs as keys
            at = around if name in found else (*around, str(name))
            yield at, "a URL with a user or password; credentials come from the environment"
        else:
            yield from _passwords(value, (*around, str(name)))


def _at(data: Any, keys: Sequence[str]) -> Any:
    for name in keys:
        data = data.get(name) if isinstance(data, dict) else None
    return data


def _same(value: Any, off: Any) -> bool:
    """Whether `value` is the listed one: text in any case, and true is not 1."""
    if isinstance(value, str):
        return value.lower() == off
    return value == off and type(value) is type(off)
