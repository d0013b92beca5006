"""Site profiles: the settings of a cluster that are not in the config, as YAML. Some are built in; users add theirs.

    kenotron submit my.yaml --site jean-zay-h100
    kenotron submit my.yaml --site my-cluster.yaml

A profile is trusted as the user's own code: its `setup` lines are shell code, which jobs run unchanged.
"""

from pathlib import Path

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from kenotron.config.errors import InputError, nearest
from kenotron.config.scalars import Loader

BUILT_IN = Path(__file__).with_name("sites")
GENERIC = "generic"


class Site(BaseModel):
    """The profile of a cluster, or of one kind of its nodes."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    description: str = ""
    gpus_per_node: int = Field(0, ge=0)
    """0: as ``--gpus-per-node`` sets it. With KENOTRON_DEVICE=cpu, the number of ranks on a node."""
    cpus_per_rank: int | None = Field(None, ge=1)
    sbatch: dict[str, str | int | None] = {}
    """Options of sbatch, without dashes; null for a flag."""
    srun: dict[str, str | int | None] = {}
    """Options of srun."""
    setup: list[str] = []
    """Shell lines at the start of every job: modules, caches, network interfaces."""
    environment: dict[str, str] = {}
    container: str = "apptainer exec --nv {image}"
    """The prefix of the command with ``--container``."""


def load_site(name: str) -> Site:
    """Load a built-in profile by name, or a YAML file. Raises InputError that lists the built-in profiles."""
    built_in = sorted(path.stem for path in BUILT_IN.glob("*.yaml"))
    path = BUILT_IN / f"{name}.yaml" if name in built_in else Path(name).expanduser()
    try:
        return Site.model_validate(yaml.load(path.read_text(encoding="utf-8"), Loader) or {})
    except OSError:
        raise InputError(
            f"--site: expected {', '.join(built_in)} or a YAML file, found {name!r}{nearest(name, built_in)}"
        ) from None
    except yaml.YAMLError as error:
        raise InputError(f"{path} is not YAML: {' '.join(str(error).split())}") from None
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(map(str, first["loc"]))
        hint = nearest(key, list(Site.model_fields)) if first["type"] == "extra_forbidden" else ""
        raise InputError(f"{path}: {key}: {first['msg']}{hint}") from None
