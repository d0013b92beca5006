"""Whether all ranks were started alike: with one config, one command line, and one version of the code.

On several machines each starts its own ranks, from its own copy of the YAML and its own installation. Ranks with
different layouts would wait for each other forever; those with different versions would train different things.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import xxhash

from kenotron.config.errors import InputError
from kenotron.parallel.ranks import gather, run_on_rank0

if TYPE_CHECKING:
    from kenotron.launch import RankConfig


# What rank 0 decides for all: the name and the folders of a run, the prompts of a generation.
OF_RANK_0 = ("general.run", "logging.log_dir", "checkpoints.checkpoints_path", "prompts", "built_in")


def check_started_alike(config: RankConfig, options: Mapping[str, object]) -> None:
    """Raise InputError on every rank, with the first difference from rank 0, if there is one."""
    mine = dict(_facts(config, options))
    if len(set(gather(xxhash.xxh3_64(json.dumps(mine, default=str).encode()).hexdigest()))) == 1:
        return
    first = run_on_rank0(lambda: mine)
    found = [f"{name} is {mine.get(name)} and not {first.get(name)}" for name in _different(mine, first)]
    more = f" (and {len(found) - 1} more)" if len(found) > 1 else ""
    place = f" on {socket.gethostname()} was started differently from rank 0: "
    for rank, difference in enumerate(gather(place + found[0] + more if found else None)):
        if difference:
            raise InputError(f"rank {rank}{difference}")


def _different(mine: Mapping[str, Any], first: Mapping[str, Any]) -> list[str]:
    return [name for name in {**first, **mine} if mine.get(name) != first.get(name)]


def _facts(config: RankConfig, options: Mapping[str, object]) -> Iterator[tuple[str, Any]]:
    """Names and values, as a message would have them."""
    yield "torch", torch.__version__
    yield "the hash of kenotron's code", _code()
    yield from ((f"--{name}", value) for name, value in options.items())
    for name, value in _flat("", config.model_dump(mode="json", by_alias=True)):
        if not name.startswith(OF_RANK_0):
            yield name, value


def _flat(path: str, value: Any) -> Iterator[tuple[str, Any]]:
    """``{"a": {"b": [1, 2]}}`` as a.b.0 and a.b.1."""
    if not isinstance(value, dict | list) or not value:
        yield path, value
        return
    for key, part in value.items() if isinstance(value, dict) else enumerate(value):
        yield from _flat(f"{path}.{key}" if path else str(key), part)


def _code() -> str:
    """A hash of all files of the package."""
    root = Path(__file__).parents[1]
    digest = xxhash.xxh3_64()
    for file in sorted(root.rglob("*.py")):
        digest.update(file.relative_to(root).as_posix().encode())
        digest.update(file.read_bytes())
    return digest.hexdigest()[:8]
