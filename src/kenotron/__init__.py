"""Kénotron: pretrain language models from one YAML file.

import kenotron as kn

config = kn.load("my.yaml", ["tokens.train_steps=100"])
run = kn.train(config)
print(run.last_metrics["lm_loss"])
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kenotron.config import Config
    from kenotron.training import Hook, Run

__version__ = "0.1.0.dev0"
__all__ = ["Hook", "load", "train"]

# Everything is imported where it is used: `import kenotron` costs nothing.


def load(
    source: str | Path | dict[str, Any] | Config,
    overrides: Sequence[str] = (),
    *,
    report: Callable[[str], None] | None = None,
) -> Config:
    """The config of a YAML file, a dict in the same schema, or another config, with ``path=value`` overrides on top.

    A config is not changed in place: ``config = kn.load(config, ["tokens.train_steps=100"])``.
    """
    from kenotron.config import load as load_config

    return load_config(source, overrides, report=report)


def train(config: Config | str | Path | dict[str, Any], *, fresh: bool = False) -> Run | None:
    """Train as `config` (or the YAML file of that name) says, going on from its newest checkpoint if there is one.

    A layout of one rank trains in this process, and so does a rank that torchrun started: that returns the run
    (model, metrics of the last step, data), as its checkpoint has it if all steps are done already. A layout of more
    starts its ranks on this machine, waits for them, and returns None: what they did is in the run's log folder and
    its checkpoints. `fresh` sets earlier checkpoints aside. Raises `kenotron.config.InputError` when the input is
    wrong, `kenotron.config.errors.RunFailed` when a rank failed.
    """
    from kenotron.config import Config
    from kenotron.launch import launch

    return launch(config if isinstance(config, Config) else load(config), fresh=fresh, reopen=True)


def __getattr__(name: str) -> type[Hook]:
    """`kn.Hook`, imported when it is first asked for: a hook of one's own derives from it."""
    if name == "Hook":
        from kenotron.training.hooks import Hook

        return Hook
    raise AttributeError(f"module 'kenotron' has no attribute {name!r}")
