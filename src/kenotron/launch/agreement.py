"""Whether all ranks were started alike: with one config, one command line, and one version of the code.

On several machines each starts its own ranks, from its own copy of the YAML and its own installation. Ranks with
different layouts would wait for each other forever; those with different versions would train different things.
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

# What rank 0 decides for all: the name and the folders of a run, the prompts of a generation.
OF_RANK_0 = ("general.run", "logging.log_dir", "checkpoints.checkpoints_path", "prompts", "built_in")


def check_started_alike(config: RankConfig, options: Mapping[str, object]) -> None:
    """Raise InputError on every rank, with the first difference from rank 0, if there is one."""
    mine = dict(_facts(config, options))
    if len(set(gather(xxhash.xxh3_64(json.dumps(mine, default=str).encode()).hexdigest()))) == 1:
        return
    first = run_on_rank0(lambda: mine)
    found = [f"{name} is {here} and not {there}" for name, there, here in differences(first, mine)]
    place = f" on {socket.gethostname()} was started differently from rank 0: "
    for rank, difference in enumerate(gather(place + first_of(found) if found else None)):
        if difference:
            raise InputError(f"rank {rank}{difference}")


def ranks_on_every_machine(ranks: Ranks) -> int:
    """The size of the largest blocks of consecutive ranks that machines, perhaps of unequal numbers, are made of."""
    return gcd(*gather(ranks.local_world_size))


def _facts(config: RankConfig, options: Mapping[str, object]) -> Iterator[tuple[str, Any]]:
    """Names and values, as a message would have them."""
    yield "torch", torch.__version__
    yield "the hash of kenotron's code", _code()
    yield from ((f"--{name}", value) for name, value in options.items())
    for name, value in flatten(config.model_dump(mode="json", by_alias=True)):
        if not name.startswith(OF_RANK_0):
            yield name, value


def _code() -> str:
    """A hash of all files of the package."""
    root = Path(__file__).parents[1]
    digest = xxhash.xxh3_64()
    for file in sorted(root.rglob("*.py")):
        digest.update(file.relative_to(root).as_posix().encode())
        digest.update(file.read_bytes())
    return digest.hexdigest()[:8]
