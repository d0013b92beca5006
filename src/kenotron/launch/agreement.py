"""Check that all ranks were started alike: with one config, one command line, and one version of the code.

Each machine starts its own ranks, from its own copy of the YAML file and its own installation. Ranks with different
layouts would wait for each other forever, and ranks with different versions would compute different functions.
"""

import json
import socket
from collections.abc import Iterator, Mapping
from math import gcd
from pathlib import Path
from typing import Any

import torch
import xxhash

from kenotron.config.errors import InputError, first_of
from kenotron.config.writing import differences, flatten
from kenotron.launch.environment import Ranks
from kenotron.launch.functions import RankConfig
from kenotron.parallel.ranks import gather, run_on_rank0

# Keys that rank 0 sets for all ranks: the name and the folders of a run, the prompts of a generation.
OF_RANK_0 = ("general.run", "logging.log_dir", "checkpoints.checkpoints_path", "prompts", "built_in")


def check_started_alike(config: RankConfig, options: Mapping[str, object]) -> None:
    """Raise InputError on every rank if a rank differs from rank 0, with its first difference."""
    facts = dict(_facts(config, options))
    if len(set(gather(xxhash.xxh3_64(json.dumps(facts, default=str).encode()).hexdigest()))) == 1:
        return
    expected = run_on_rank0(lambda: facts)
    found = [f"{name} is {value} and not {first}" for name, first, value in differences(expected, facts)]
    prefix = f" on {socket.gethostname()} was started differently from rank 0: "
    for rank, message in enumerate(gather(prefix + first_of(found) if found else None)):
        if message:
            raise InputError(f"rank {rank}{message}")


def ranks_on_every_machine(ranks: Ranks) -> int:
    """Return the greatest common divisor of the numbers of ranks of all machines."""
    return gcd(*gather(ranks.local_world_size))


def _facts(config: RankConfig, options: Mapping[str, object]) -> Iterator[tuple[str, Any]]:
    """Yield the names and values to compare, as messages show them."""
    yield "torch", torch.__version__
    yield "the hash of kenotron's code", _code()
    yield from ((f"--{name}", value) for name, value in options.items())
    for name, value in flatten(config.model_dump(mode="json", by_alias=True)):
        if not name.startswith(OF_RANK_0):
            yield name, value


def _code() -> str:
    """Return a hash of all files of the package."""
    root = Path(__file__).parents[1]
    digest = xxhash.xxh3_64()
    for file in sorted(root.rglob("*.py")):
        digest.update(file.relative_to(root).as_posix().encode())
        digest.update(file.read_bytes())
    return digest.hexdigest()[:8]
