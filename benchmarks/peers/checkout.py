"""Peers that are not on the package index: an environment variable names a checkout of each, which is imported.

    git clone https://github.com/huggingface/picotron
    PICOTRON=$PWD/picotron python benchmarks/training.py --contenders picotron kenotron

Both import packages for GPUs that their models do not call here; where these are not installed, an empty one is put in
their place.
"""

from __future__ import annotations

import os
import sys
from importlib.util import find_spec
from types import ModuleType, SimpleNamespace

# contender → its variable and its repository
CHECKOUTS = {
    "picotron": ("PICOTRON", "https://github.com/huggingface/picotron"),
    "lingua": ("LINGUA", "https://github.com/facebookresearch/lingua"),
}


def missing(contender: str) -> str | None:
    """Why this contender cannot take part, or None."""
    variable, repository = CHECKOUTS.get(contender.removesuffix(" compiled"), ("PATH", ""))
    return None if os.environ.get(variable) else f"left out: {variable} is not set, the folder of {repository}"


def add_to_path(contender: str) -> None:
    """Make its packages importable."""
    sys.path.insert(0, os.environ[CHECKOUTS[contender][0]])


def replace_if_missing(package: str, **modules: tuple[str, ...]) -> None:
    """Where `package` is not installed: modules in its place, with attributes that are classes without anything."""
    if find_spec(package) is not None:
        return
    for dotted in {".".join((package, *name.split("__"))[:n]) for name in modules for n in range(1, 9)}:
        sys.modules.setdefault(dotted, ModuleType(dotted))
    for name, attributes in modules.items():
        module = sys.modules[f"{package}.{name.replace('__', '.')}"]
        for attribute in attributes:
            setattr(module, attribute, type(attribute, (SimpleNamespace,), {}))
