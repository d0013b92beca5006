"""Run functions on gloo ranks that are forked once and kept: torch is loaded already, so a job starts in milliseconds.

They are forked from a server that has imported torch and done nothing: a copy of a test process would inherit its
threads' locks, torch's caches and every open file.

    results = run_ranks(2, work, argument)     # [work(0, argument), work(1, argument)]

Every job gets a process group of its own. A rank that raises ends the job with its traceback first; the ranks are then
thrown away, because others may hang in a collective, and the next job forks new ones.
"""

from __future__ import annotations

import atexit
import io
import multiprocessing
import os
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import wait
from typing import Any

import torch
import torch.distributed as dist

TIMEOUT_S = 240
COLLECTIVE_TIMEOUT_S = 60
ROUNDING = 2e-6  # of a gradient or loss in fp32: both sides round, and every kind of processor in its own way
PRELOAD = ["kenotron.train.setup", "torch.distributed.fsdp", "torch.distributed.pipelining", "torch._dynamo", "pytest"]


class Pool:
    """`world_size` ranks, waiting for jobs."""

    def __init__(self, world_size: int) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOAD)
        self.pipes, self.processes = [], []
        for rank in range(world_size):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(rank, world_size, theirs), daemon=True)
            process.start()
            theirs.close()
            self.pipes.append(ours)
            self.processes.append(process)

    def run(self, work: Callable[..., Any], args: tuple[Any, ...]) -> list[Any]:
        with tempfile.TemporaryDirectory() as folder:
            for pipe in self.pipes:
                pipe.send((folder, work, args))
            return self._collect()

    def _collect(self) -> list[Any]:
        """Every rank's result, as they come: the first failure is the one that is told."""
        results: dict[int, Any] = {}
        until = time.monotonic() + TIMEOUT_S
        while len(results) < len(self.pipes):
            ready = wait([p for rank, p in enumerate(self.pipes) if rank not in results], until - time.monotonic())
            if not ready:
                silent = [rank for rank in range(len(self.pipes)) if rank not in results]
                raise TimeoutError(f"ranks {silent} gave no answer in {TIMEOUT_S} s")
            for pipe in ready:
                rank = self.pipes.index(pipe)  # type: ignore[arg-type]
                try:
                    failed, value = pipe.recv()  # type: ignore[union-attr]
                except EOFError:
                    raise AssertionError(f"rank {rank} died") from None
                if failed:
                    raise AssertionError(f"rank {rank} failed:\n{value}")
                results[rank] = torch.load(io.BytesIO(value), weights_only=False)
        return [results[rank] for rank in range(len(self.pipes))]

    def close(self) -> None:
        for process in self.processes:
            process.kill()
            process.join()


_pools: dict[int, Pool] = {}


def run_ranks(world_size: int, work: Callable[..., Any], *args: Any) -> list[Any]:
    """`work(rank, *args)` on every rank, inside a gloo group of `world_size`; its results in rank order.

    `work` is a function of a module that was imported before the first call with this `world_size` or can be imported
    by name; arguments travel by pickle.
    """
    if world_size not in _pools:
        _pools[world_size] = Pool(world_size)
    try:
        return _pools[world_size].run(work, args)
    except BaseException:
        _pools.pop(world_size).close()
        raise


@atexit.register
def _close_all() -> None:
    for pool in _pools.values():
        pool.close()


def _serve(rank: int, world_size: int, pipe: Any) -> None:
    torch.set_num_threads(1)  # an OpenMP pool does not survive a fork
    _pools.clear()
    while True:
        try:
            folder, work, args = pipe.recv()
        except EOFError:
            os._exit(0)
        try:
            store = dist.FileStore(f"{folder}/store", world_size)
            timeout = timedelta(seconds=COLLECTIVE_TIMEOUT_S)
            dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=timeout)
            result = io.BytesIO()
            torch.save(work(rank, *args), result)  # by value: a shared tensor would die with its rank
            dist.barrier()
            dist.destroy_process_group()
            forget_meshes()
            pipe.send((False, result.getvalue()))
        except BaseException:
            pipe.send((True, traceback.format_exc()))


def forget_meshes() -> None:
    """Forget how torch moved DTensors: it knows that by mesh, and the next group's equal mesh has groups of its own."""
    from torch.distributed.tensor import _redistribute
    from torch.distributed.tensor.debug import _clear_sharding_prop_cache

    _redistribute._gen_transform_infos.cache_clear()
    _clear_sharding_prop_cache()
