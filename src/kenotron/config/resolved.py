"""Read configs that a run wrote, which are complete and have no older forms, overrides or line numbers.

An earlier version with more keys may have written the config.yaml of a checkpoint (see `unserved`).
"""

from copy import deepcopy
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from kenotron.config.config import Config
from kenotron.config.errors import InputError, NotSupportedYet
from kenotron.config.unserved import describe_key, take_unserved

CODE = "# imported"
"""Prefix of the lines at the end of a checkpoint's config.yaml that name the files of the user's modules."""


def resolved(saved: dict[str, Any]) -> Config:
    """Return the config of plain data that a run wrote. Raises pydantic's ValidationError for another schema."""
    data = deepcopy(saved)
    if unserved := take_unserved(data):
        raise NotSupportedYet("; ".join(describe_key(keys, value) for keys, value in unserved))
    return Config.model_validate(data)


def read_resolved(file: Path) -> Config:
    """Read the config of a checkpoint's config.yaml. Raises InputError that names the file and the first wrong key."""
    try:
        text = file.read_text(encoding="utf-8")
        return resolved(yaml.safe_load(text))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise InputError(f"{file}: cannot be read: {str(error).splitlines()[0]}") from error
    except (ValidationError, InputError) as error:
        message = str(error)
        if isinstance(error, ValidationError):
            first = error.errors()[0]
            path = ".".join(str(part) for part in first["loc"] if not str(part).startswith("(")) or "config"
            message = f"{path}: {first['msg']}"
        code = ", ".join(line.removeprefix(f"{CODE} ") for line in text.splitlines() if line.startswith(CODE))
        imports = code and "cannot import" in message
        reason = f"its run imported {code}" if imports else "another version of kenotron wrote it"
        raise InputError(f"{file}: {message}; {reason}") from error
