"""What a model family's keys, or the environment, ask for that is not implemented: refused by name, never ignored.

Unsupported keys of other sections are not in the schema; `unserved` lists them.
"""

from kenotron.config.config import Config
from kenotron.config.errors import NotSupportedYet
from kenotron.config.parallelism import stays_on_cpu


def refuse_unsupported(config: Config) -> None:
    """Raise NotSupportedYet that names every key of the architecture that would otherwise have no effect.

    Raises InputError for a device that no run takes, as `stays_on_cpu` does.
    """
    stays_on_cpu()
    if found := [f"model.model_config.{each}" for each in config.model.architecture.unsupported()]:
        raise NotSupportedYet("; ".join(found))
