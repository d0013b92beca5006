"""The few things that the ranks of a run do together when they save or load.

Without a process group, or with a group of one, all of them are plain calls. An error on one rank becomes an
error on every rank, so none waits for one that has left:

    path = on_first(lambda: make_temporary())     # rank 0 works, everyone gets its result, or its error
    together(lambda: check_my_share())            # everyone works; if one fails, all fail
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, TypeVar

from kenotron.checkpoint.durable import CheckpointError
from kenotron.config.errors import InputError

T = TypeVar("T")


def rank_and_size() -> tuple[int, int]:
    """This process's rank and their number; (0, 1) without a process group. Does not import torch."""
    distributed: Any = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return 0, 1
    return distributed.get_rank(), distributed.get_world_size()


def gather(value: T) -> list[T]:
    """Every rank's `value`, in order of rank, on every rank."""
    _, size = rank_and_size()
    if size == 1:
        return [value]
    import torch.distributed as dist

    values: list[Any] = [None] * size
    dist.all_gather_object(values, value)
    return values


def together(work: Callable[[], T]) -> T:
    """Run `work` on every rank and return this rank's result; an error of one is raised on all."""
    _, size = rank_and_size()
    if size == 1:
        return work()
    mine: Exception | None = None
    try:
        result = work()
    except Exception as error:
        mine = error
    messages = gather(None if mine is None else describe(mine))
    if mine is not None:
        raise mine
    for rank, message in enumerate(messages):
        if message is not None:
            raise CheckpointError(f"rank {rank}: {message}")
    return result


def on_first(work: Callable[[], T]) -> T:
    """Run `work` on rank 0 alone; every rank gets its result, or its error."""
    rank, _ = rank_and_size()
    return gather(together(lambda: work() if rank == 0 else None))[0]  # type: ignore[return-value]


def describe(error: BaseException) -> str:
    """An error in one line, for the other ranks: with its type unless it was written to be read."""
    return str(error) if isinstance(error, InputError) else f"{type(error).__name__}: {error}"
