"""Find model families by name. Built-in families are discovered like a user's, so this file names none of them.

    model_config: {is_llama_config: true, …}              the module `llama` of kenotron.models.families
    model_config: {family: my_module.MyFamily, …}         my_module.py of yours
    model_config: {family: bigbird, …}                    an entry point of the group kenotron.models

A family is a class with a `section`, the keys of its `model_config`. Modules of built-in families do not import torch,
so a config is checked without delay.
"""

import importlib
import pkgutil
from functools import cache
from typing import ClassVar, Protocol

from kenotron.config.decoder import DecoderArchitecture
from kenotron.config.dotted import import_registered
from kenotron.config.errors import InputError

BUILT_IN = "kenotron.models.families"  # a package whose modules hold one family each, under its name
GROUP = "kenotron.models"
KEY = "model.model_config.family"
USER_MODULE = "kenotron.models.foreign.UserModule"  # the family of a model_config with the key `module`


class HasSection(Protocol):
    """The part of a family that the config needs; `kenotron.models.family.Family` has the rest."""

    section: ClassVar[type[DecoderArchitecture]]


@cache
def built_in_names() -> tuple[str, ...]:
    """Return the names of the built-in families, alphabetically, without importing them."""
    package = importlib.import_module(BUILT_IN)
    return tuple(sorted(info.name for info in pkgutil.iter_modules(package.__path__)))


@cache
def built_in_family(name: str) -> type[HasSection]:
    """Return the family of one of `built_in_names`: the only class of its module with a section."""
    module = importlib.import_module(f"{BUILT_IN}.{name}")
    (family,) = (value for value in vars(module).values() if _is_family_of(value, module.__name__))
    return family


def built_in_families() -> dict[str, type[HasSection]]:
    """Return name → family for all built-in families, alphabetically."""
    return {name: built_in_family(name) for name in built_in_names()}


def is_user_family(name: str) -> bool:
    """Return whether a family is code of the user, or of a package that the user installed."""
    return name not in built_in_names() and not name.startswith("kenotron.")


def _is_family_of(value: object, module: str) -> bool:
    return isinstance(value, type) and value.__module__ == module and "section" in vars(value)


def find_family(name: str, where: str = KEY) -> type[HasSection]:
    """Return the family called `name`: a built-in family, a dotted path or an entry point.

    Raises InputError if it is missing, cannot be imported or is not a family. `where` is the config key for errors.
    """
    if name in built_in_names():
        return built_in_family(name)
    family = import_registered(name, where, GROUP, built_in_names())
    section = getattr(family, "section", None)
    if not (isinstance(section, type) and issubclass(section, DecoderArchitecture)):
        raise InputError(
            f"{where}: '{name}' is not a model family: expected a subclass of kenotron.models.family.Family whose "
            f"`section` derives from kenotron.config.decoder.DecoderArchitecture, found {family!r}"
        )
    return family
