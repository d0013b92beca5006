"""Configs that a run wrote: complete, without older forms, overrides or line numbers of a user's file.

A checkpoint's config.yaml may be of an earlier version, whose schema had more keys (see `unserved`).
"""

from copy import deepcopy
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from kenotron.config.config import Config
from kenotron.config.errors import InputError, NotSupportedYet
from kenotron.config.unserved import named, take_unserved

CODE = "# imported"
"""Begins the lines at the end of a checkpoint's config.yaml that say where a user's modules were."""


def resolved(saved: dict[str, Any]) -> Config:
    """The config of plain data that a run wrote. Raises pydantic's ValidationError for another schema."""
    data = deepcopy(saved)
    if found := take_unserved(data):
        raise NotSupportedYet("; ".join(named(*each) for each in found))
    return Config.model_validate(data)


def read_resolved(file: Path) -> Config:
    """The config of a checkpoint's config.yaml. Raises InputError that names the file and the first wrong key."""
    try:
        text = file.read_text(encoding="utf-8")
        return resolved(yaml.safe_load(text))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise InputError(f"{file}: cannot be read: {str(error).splitlines()[0]}") from error
    except (ValidationError, InputError) as error:
        what = str(error)
        if isinstance(error, ValidationError):
            first = error.errors()[0]
            where = ".".join(str(part) for part in first["loc"] if not str(part).startswith("(")) or "config"
            what = f"{where}: {first['msg']}"
        code = ", ".join(line.removeprefix(f"{CODE} ") for line in text.splitlines() if line.startswith(CODE))
        why = f"its run imported {code}" if code and "cannot import" in what else "another version of kenotron wrote it"
        raise InputError(f"{file}: {what}; {why}") from error
