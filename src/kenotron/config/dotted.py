"""Objects named by dotted path or entry point: how a config refers to a user's own class or function.

import_dotted("torch.optim.Adagrad", "optimizer.optimizer_factory.name")      # the class
import_dotted("counting.CountingTokens", "dataset.source")                    # counting.py beside the YAML file
import_registered("genomes", "dataset.source", "kenotron.datasets")           # an entry point of an installed package
"""

import importlib
import os
import sys
from collections.abc import Collection
from importlib.metadata import entry_points
from pathlib import Path
from sysconfig import get_paths
from typing import Any

from kenotron.config.errors import InputError, nearest

FOUND: dict[str, str] = {}
"""The files of the modules that were found by dotted path outside of installed packages: a user's own."""


def import_dotted(path: str, key: str) -> Any:
    """The object that ``package.module.name`` names; `key` is the config key to blame when there is none.

    Installed modules come first, then those beside the YAML file (`find_beside`), then those of the working folder,
    which a console script would not search. Raises `InputError`.
    """
    module_name, _, name = path.rpartition(".")
    if not module_name or "/" in path or path.startswith(".") or path.endswith(".py"):
        raise InputError(f"{key}: expected a dotted path such as my_module.name, found '{path}'")
    try:
        module = _import_module(module_name)
    except (ImportError, SyntaxError) as error:
        absent = isinstance(error, ModuleNotFoundError) and module_name.startswith(f"{error.name}")
        looked = "; looked beside the YAML, in the current folder and in PYTHONPATH: add its own" if absent else ""
        raise InputError(f"{key}: cannot import '{module_name}' of '{path}': {error}{looked}") from error
    if not hasattr(module, name):
        raise InputError(f"{key}: module '{module_name}' has no '{name}'{nearest(name, dir(module))}")
    file = getattr(module, "__file__", None) or ""
    if file and module_name.partition(".")[0] != "kenotron" and not file.startswith((*get_paths().values(),)):
        FOUND[module_name] = file
    return getattr(module, name)


def import_registered(name: str, key: str, group: str, built_in: Collection[str] = ()) -> Any:
    """The object that an installed package registers as `name` among the entry points of `group`; what has a dot in it
    is a dotted path. `built_in` are names that the caller knows itself, for the message. Raises `InputError`.
    """
    if "." in name:
        return import_dotted(name, key)
    registered = entry_points(group=group)
    found = {entry.value: entry for entry in registered.select(name=name)}
    if not found:
        names = sorted({*built_in, *registered.names})
        known = ", ".join(names) or "none"
        raise InputError(
            f"{key}: expected a dotted path such as my_module.name, or a name that an installed package registers "
            f"under {group} ({known}), found '{name}'{nearest(name, names)}"
        )
    if len(found) > 1:
        raise InputError(f"{key}: '{name}' is registered under {group} more than once: {', '.join(sorted(found))}")
    (entry,) = found.values()
    try:
        return entry.load()
    except (ImportError, SyntaxError, AttributeError) as error:
        raise InputError(
            f"{key}: '{name}' is registered as {entry.value}, which cannot be imported: {error}"
        ) from error


def find_beside(file: Path) -> None:
    """Find modules in the folder of a config `file` too; ranks that this process starts get its search path."""
    folder = str(file.absolute().parent)
    if folder not in sys.path:
        sys.path.append(folder)


def _import_module(name: str) -> Any:
    here = os.getcwd()
    if here in sys.path or "" in sys.path:
        return importlib.import_module(name)
    sys.path.append(here)
    try:
        return importlib.import_module(name)
    finally:
        sys.path.remove(here)


def search_path() -> str:
    """PYTHONPATH for a child process that is to find the modules that this process finds, those beside a script too."""
    return os.pathsep.join(os.path.abspath(entry) for entry in sys.path)
