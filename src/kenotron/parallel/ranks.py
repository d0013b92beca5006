"""Functions with which ranks share results, errors and waiting, mostly to save or load.

Without a process group, or in a group of one, they are plain calls. An error on one rank becomes a `PeerFailed` on all
others, so that none waits for a rank that has exited:

    path = run_on_rank0(lambda: make_temporary())     # rank 0 works, all get its result or error
    raise_on_any_rank(lambda: check_my_share())            # all work; if one fails, all fail
"""

import re
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from kenotron.config.errors import FOR_USERS, PeerFailed

T = TypeVar("T")
LOOK_EVERY_S = 0.1
SAY_EVERY_S = 60.0


def rank_and_size() -> tuple[int, int]:
    """Return this process's rank and the world size; (0, 1) without a process group. Does not import torch."""
    distributed: Any = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return 0, 1
    return distributed.get_rank(), distributed.get_world_size()


def gather(value: T) -> list[T]:
    """Return every rank's `value`, in rank order, on every rank; it must be small, as there may be many ranks."""
    _, size = rank_and_size()
    if size == 1:
        return [value]
    import torch.distributed as dist

    values: list[Any] = [None] * size
    dist.all_gather_object(values, value)
    return values


def raise_on_any_rank(work: Callable[[], T]) -> T:
    """Run `work` on every rank and return this rank's result; an error of one is a `PeerFailed` on the others."""
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
            raise PeerFailed(f"rank {rank}: {message}")
    return result


def run_on_rank0(work: Callable[[], T]) -> T:
    """Run `work` only on rank 0; every rank gets its result, or for an error a `PeerFailed`."""
    rank, size = rank_and_size()
    result = raise_on_any_rank(lambda: work() if rank == 0 else None)
    if size > 1:
        import torch.distributed as dist

        dist.broadcast_object_list(results := [result])  # a gather would take memory for every rank
        return results[0]  # type: ignore[return-value]
    return result  # type: ignore[return-value]


def gather_on_rank0(value: T) -> list[T]:
    """Return every rank's `value`, in rank order, on rank 0; on others an empty list."""
    rank, size = rank_and_size()
    if size == 1:
        return [value]
    import torch.distributed as dist

    values: list[Any] = [None] * size if rank == 0 else []
    dist.gather_object(value, values or None)
    return values


def scatter_from_rank0(values: list[T]) -> T:
    """Return ``values[r]`` of rank 0 on rank r; `values` of other ranks is ignored."""
    rank, size = rank_and_size()
    if size == 1:
        return values[0]
    import torch.distributed as dist

    mine: list[Any] = [None]
    dist.scatter_object_list(mine, values if rank == 0 else None)
    return mine[0]


def gather_at(place: str, value: T) -> list[T]:
    """As `gather`, but only of ranks that call it with the same `place`, such as a folder."""
    return [of_rank for other, of_rank in gather((place, value)) if other == place]


def ranks_with(place: str) -> list[int]:
    """Return the ranks that call this with the same `place`, in order."""
    return gather_at(place, rank_and_size()[0])


def run_on_first(ranks: list[int], work: Callable[[], T]) -> T:
    """Run `work` on the first of `ranks`; each of them gets its small result. An error anywhere is raised on all ranks.

    All ranks of the run call it, each with the ranks of its own set.
    """
    rank, _ = rank_and_size()
    return gather(raise_on_any_rank(lambda: work() if rank == ranks[0] else None))[ranks[0]]  # type: ignore[return-value]


def balance(costs: Sequence[float], owners: int) -> list[int]:
    """Assign each cost to an owner: largest first, to the least loaded owner. Costs 5 3 3 2 over two give 0 1 1 0."""
    load = [0.0] * owners
    chosen = [0] * len(costs)
    for index in sorted(range(len(costs)), key=lambda i: -costs[i]):
        chosen[index] = load.index(min(load))
        load[chosen[index]] += costs[index]
    return chosen


def describe(error: BaseException) -> str:
    """Return the error in one line: with its type, unless its message is meant for users."""
    return str(error) if isinstance(error, FOR_USERS) else f"{type(error).__name__}: {error}"


def comes_from_another_rank(error: BaseException) -> bool:
    """Return whether the error results from another rank's end: a closed connection of gloo, NCCL or the store."""
    import torch.distributed as dist

    found: BaseException | None = error
    while found is not None:
        of_gloo = type(found) is RuntimeError and re.search(r"\bgloo\b", str(found), re.IGNORECASE)
        if of_gloo or isinstance(found, PeerFailed | dist.DistError):
            return True
        found = found.__cause__ or found.__context__
    return False


def wait_for_all() -> None:
    """Wait until every rank has called this as often as this one, for any time.

    It is for work of unbounded length: one rank finds its tokens cached, another tokenizes for hours. A collective
    would time out after `parallelism.timeout_seconds`. Without a process group it returns at once.

    Once a minute, rank 0 writes a line to standard error with the ranks that it waits for; if rank 0 is missing, the
    first rank that arrived does so. Others do not query the ranks, to spare the shared store.
    """
    import torch.distributed as dist

    if not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1:
        return
    from kenotron.parallel.torch_internals import default_store

    store, rank, size = default_store(), dist.get_rank(), dist.get_world_size()
    mine = store.add(f"kenotron/arrivals/{rank}", 1)
    asks = store.add(f"kenotron/arrivals/of/{mine}", 1) == 1 or rank == 0
    pause, longest = LOOK_EVERY_S / 64, max(LOOK_EVERY_S, size / 2048)  # all query one store
    started = said = time.monotonic()
    while store.add(f"kenotron/arrivals/of/{mine}", 0) < size:
        time.sleep(pause)
        pause = min(2 * pause, longest)
        if asks and (now := time.monotonic()) - said > SAY_EVERY_S:
            said = now
            missing = [other for other in range(size) if store.add(f"kenotron/arrivals/{other}", 0) < mine]
            if missing and (rank == 0 or 0 in missing):
                line = f"rank {rank} has waited {now - started:.0f} s for {ranks_in_words(missing)} to be ready"
                print(f"{line}: without a limit, as preparing data may take hours", file=sys.stderr, flush=True)


def ranks_in_words(ranks: Sequence[int], size: int | None = None) -> str:
    """Return ``rank 1`` or ``ranks 1, 3-7``; ``all ranks`` if there are `size` of them."""
    if len(ranks) == size:
        return "all ranks"
    those = set(ranks)
    firsts, lasts = ([rank for rank in ranks if rank + step not in those] for step in (-1, 1))
    parts: list[str] = []
    for first, last in zip(firsts, lasts, strict=True):
        parts += [f"{first}-{last}"] if last > first + 1 else map(str, range(first, last + 1))
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {', '.join(parts)}"
