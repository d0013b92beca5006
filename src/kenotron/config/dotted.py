"""Import the classes and functions that a config names by dotted path or entry point.

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

USER_MODULES: dict[str, str] = {}
"""Module → file, for the modules that were imported by dotted path and are not in an installed package."""


def import_dotted(path: str, key: str) -> Any:
    """Import and return the object ``package.module.name``; `key` is the config key for errors.

    Installed modules come first, then modules beside the YAML file (`search_folder_of`), then the working folder,
    which a console script would not search. Raises `InputError`.
    """
    module_name, _, name = path.rpartition(".")
    if not module_name or "/" in path or path.startswith(".") or path.endswith(".py"):
        raise InputError(f"{key}: expected a dotted path such as my_module.name, found '{path}'")
    try:
        module = _import_module(module_name)
    except (ImportError, SyntaxError) as error:
        missing = isinstance(error, ModuleNotFoundError) and module_name.startswith(f"{error.name}")
        hint = "; looked beside the YAML, in the current folder and in PYTHONPATH: add its own" if missing else ""
        raise InputError(f"{key}: cannot import '{module_name}' of '{path}': {error}{hint}") from error
    if not hasattr(module, name):
        raise InputError(f"{key}: module '{module_name}' has no '{name}'{nearest(name, dir(module))}")
    file = getattr(module, "__file__", None) or ""
    if file and module_name.partition(".")[0] != "kenotron" and not file.startswith((*get_paths().values(),)):
        USER_MODULES[module_name] = file
    return getattr(module, name)


def import_registered(name: str, key: str, group: str, built_in: Collection[str] = ()) -> Any:
    """Import and return the entry point `name` of `group`, or the object of a dotted path.

    `built_in` are the names that the caller resolves itself, for the message. Raises `InputError`.
    """
    if "." in name:
        return import_dotted(name, key)
    registered = entry_points(group=group)
    matches = {entry.value: entry for entry in registered.select(name=name)}
    if not matches:
        names = sorted({*built_in, *registered.names})
        known = ", ".join(names) or "none"
        raise InputError(
            f"{key}: expected a dotted path such as my_module.name, or a name that an installed package registers "
            f"under {group} ({known}), found '{name}'{nearest(name, names)}"
        )
    if len(matches) > 1:
        raise InputError(f"{key}: '{name}' is registered under {group} more than once: {', '.join(sorted(matches))}")
    (entry,) = matches.values()
    try:
        return entry.load()
    except (ImportError, SyntaxError, AttributeError) as error:
        raise InputError(
            f"{key}: '{name}' is registered as {entry.value}, which cannot be imported: {error}"
        ) from error


def search_folder_of(file: Path) -> None:
    """Append the folder of a config `file` to the module search path, which ranks inherit from this process."""
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
    """Return a PYTHONPATH with which a child process finds all modules of this process, also those beside a script."""
    return os.pathsep.join(os.path.abspath(entry) for entry in sys.path)
