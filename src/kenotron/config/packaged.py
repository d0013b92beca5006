"""YAML files that are part of the package."""

from importlib.resources import files
from typing import Any

import yaml


def packaged(package: str, name: str) -> Any:
    """What the YAML file `name` of a package of ours says."""
    return yaml.safe_load(files(package).joinpath(name).read_text(encoding="utf-8"))
