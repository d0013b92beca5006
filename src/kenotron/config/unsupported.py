"""Refuse keys of a model family, or of the environment, that are not implemented, instead of ignoring them.

Keys of other sections that are not implemented are not in the schema; `unserved` lists them.
"""

from kenotron.config.config import Config
from kenotron.config.errors import NotSupportedYet
from kenotron.config.parallelism import stays_on_cpu


def refuse_unsupported(config: Config) -> None:
    """Raise NotSupportedYet that names every key of the architecture that would otherwise have no effect.

    Raises InputError if KENOTRON_DEVICE is no device, as `stays_on_cpu` does.
    """
    stays_on_cpu()
    if unsupported := [f"model.model_config.{setting}" for setting in config.model.architecture.unsupported()]:
        raise NotSupportedYet("; ".join(unsupported))
