"""Read YAML files that are part of the package."""

from importlib.resources import files
from typing import Any

import yaml


def packaged_yaml(package: str, name: str) -> Any:
    """Return the content of the YAML file `name` in `package`, such as ``kenotron.launch.slurm``."""
    return yaml.safe_load(files(package).joinpath(name).read_text(encoding="utf-8"))
