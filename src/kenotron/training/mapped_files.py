"""Which token file was cut short under a run: asked when a rank has died of SIGBUS."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kenotron.config.errors import InputError

if TYPE_CHECKING:
    from kenotron.config import Config


def truncated_file(config: Config) -> str | None:
    """What is wrong with the first token file of `config` that cannot be opened, in a line; None if all can."""
    from kenotron.data.stage_plan import plan_stages

    try:
        for stage in plan_stages(config):
            for source in stage.sources:
                source.spec.check_files()
    except InputError as error:
        return str(error)
    return None
