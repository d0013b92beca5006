"""The YAML schema: pydantic models, one file per section, are its single source. The package does not import torch.

>>> from kenotron.config import load
>>> config = load("my.yaml", ["tokens.train_steps=100"])
>>> config.global_batch_size, config.model.architecture.hidden_size
(2, 16)
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kenotron.config.config import Config
    from kenotron.config.errors import InputError, NotSupportedYet
    from kenotron.config.loading import load
    from kenotron.config.runs import fill_run_name, same_run_difference
    from kenotron.config.unsupported import refuse_unsupported
    from kenotron.config.writing import ABSENT, diff, dump, to_dict

# Imported at first use, because `kenotron --help` needs the errors but not the schema.
_MODULES = {
    "config": ["Config"],
    "errors": ["InputError", "NotSupportedYet"],
    "loading": ["load"],
    "runs": ["fill_run_name", "same_run_difference"],
    "unsupported": ["refuse_unsupported"],
    "writing": ["ABSENT", "diff", "dump", "to_dict"],
}
__all__ = [
    "ABSENT",
    "Config",
    "InputError",
    "NotSupportedYet",
    "diff",
    "dump",
    "fill_run_name",
    "load",
    "refuse_unsupported",
    "same_run_difference",
    "to_dict",
]


def __getattr__(name: str) -> Any:
    for module, names in _MODULES.items():
        if name in names:
            return getattr(importlib.import_module(f"kenotron.config.{module}"), name)
    raise AttributeError(f"module 'kenotron.config' has no attribute {name!r}")
