"""Model families, found by name. The built-in ones are found the way a user's are: nothing here names one of them.

    model_config: {is_llama_config: true, …}              the module `llama` of kenotron.models.families
    model_config: {family: my_module.MyFamily, …}         my_module.py of yours
    model_config: {family: bigbird, …}                    an entry point of the group kenotron.models

A family is a class with a `section`, the keys of its `model_config`. Modules of built-in families import no torch, so
that a config is checked at once.
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
USER_MODULE = "kenotron.models.foreign.UserModule"  # of a model_config that names a `module`


class HasSection(Protocol):
    """What the config asks of a family; the rest is `kenotron.models.family.Family`."""

    section: ClassVar[type[DecoderArchitecture]]


@cache
def built_in_names() -> tuple[str, ...]:
    """Names of the built-in families, alphabetically; none of them is imported."""
    package = importlib.import_module(BUILT_IN)
    return tuple(sorted(info.name for info in pkgutil.iter_modules(package.__path__)))


@cache
def built_in_family(name: str) -> type[HasSection]:
    """One of `built_in_names`: the class of the module that has a section."""
    module = importlib.import_module(f"{BUILT_IN}.{name}")
    (found,) = (each for each in vars(module).values() if _is_family_of(each, module.__name__))
    return found


def built_in_families() -> dict[str, type[HasSection]]:
    """Every built-in family by name, alphabetically."""
    return {name: built_in_family(name) for name in built_in_names()}


def is_users_own(name: str) -> bool:
    """Whether a family is code of the user's, or of a package of theirs."""
    return name not in built_in_names() and not name.startswith("kenotron.")


def _is_family_of(value: object, module: str) -> bool:
    return isinstance(value, type) and value.__module__ == module and "section" in vars(value)


def find_family(name: str, where: str = KEY) -> type[HasSection]:
    """The family called `name`: built in, a dotted path, or an entry point.

    Raises InputError: missing, cannot be imported, or not a family. `where` is the key to blame.
    """
    if name in built_in_names():
        return built_in_family(name)
    found = import_registered(name, where, GROUP, built_in_names())
    section = getattr(found, "section", None)
    if not (isinstance(section, type) and issubclass(section, DecoderArchitecture)):
        raise InputError(
            f"{where}: '{name}' is not a model family: expected a subclass of kenotron.models.family.Family whose "
            f"`section` derives from kenotron.config.decoder.DecoderArchitecture, found {found!r}"
        )
    return found
