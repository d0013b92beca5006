"""Run functions on gloo ranks that are forked once a session and kept, so a job starts in milliseconds.

    results = run_ranks(2, work, argument)     # [work(0, argument), work(1, argument)]

There is one pool for all world sizes: a job on two ranks takes the first two, in a process group made for that job.
Ranks are forked when first needed, at most eight, from a server that has imported torch and done nothing else: a
copy of a test process would inherit its threads' locks, torch's caches and every open file.

A rank that raises ends the job and its traceback is reported; the ranks are then killed, because others may hang in a
collective, and the next job forks new ones.
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
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

import torch
import torch.distributed as dist

from support.preload import PRELOAD

MOST_RANKS = 8
TIMEOUT_S = 300
COLLECTIVE_TIMEOUT_S = 120  # long: a machine may be busy with other work
ROUNDING = 2e-6  # of a gradient or loss in fp32: both sides round, and every kind of processor in its own way


class Pool:
    """Ranks that wait for jobs, forked as the largest job so far needed them."""

    def __init__(self) -> None:
        self.pipes: list[Connection] = []
        self.processes: list[BaseProcess] = []

    def run(self, world_size: int, work: Callable[..., Any], args: tuple[Any, ...]) -> list[Any]:
        """`work(rank, *args)` on the first `world_size` ranks."""
        while len(self.pipes) < world_size:
            self._fork()
        with tempfile.TemporaryDirectory() as folder:
            for rank, pipe in enumerate(self.pipes[:world_size]):
                pipe.send((folder, rank, world_size, work, args))
            return self._collect(self.pipes[:world_size])

    def _fork(self) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([*PRELOAD, "pytest"])
        ours, theirs = context.Pipe()
        process = context.Process(target=_serve, args=(theirs,), daemon=True)
        process.start()
        theirs.close()
        self.pipes.append(ours)
        self.processes.append(process)

    def _collect(self, pipes: list[Connection]) -> list[Any]:
        """Every rank's result; the first failure to arrive is the one reported."""
        results: dict[int, Any] = {}
        until = time.monotonic() + TIMEOUT_S
        while len(results) < len(pipes):
            ready = wait([p for rank, p in enumerate(pipes) if rank not in results], until - time.monotonic())
            if not ready:
                silent = [rank for rank in range(len(pipes)) if rank not in results]
                raise TimeoutError(f"ranks {silent} sent no result in {TIMEOUT_S} s")
            for pipe in ready:
                rank = pipes.index(pipe)  # type: ignore[arg-type]
                try:
                    failed, value = pipe.recv()  # type: ignore[union-attr]
                except EOFError:
                    raise AssertionError(f"rank {rank} died") from None
                if failed:
                    raise AssertionError(f"rank {rank} failed:\n{value}")
                results[rank] = torch.load(io.BytesIO(value), weights_only=False)
        return [results[rank] for rank in range(len(pipes))]

    def close(self) -> None:
        """Kill all ranks; the next job forks new ones."""
        for process in self.processes:
            process.kill()
            process.join()
        self.pipes, self.processes = [], []


_pool = Pool()


def run_ranks(world_size: int, work: Callable[..., Any], *args: Any) -> list[Any]:
    """`work(rank, *args)` on every rank, inside a gloo group of `world_size`; its results in rank order.

    `work` is a function of a module that can be imported by name; arguments travel by pickle.
    """
    assert world_size <= MOST_RANKS, f"{world_size} ranks: the pool has at most {MOST_RANKS}"
    try:
        return _pool.run(world_size, work, args)
    except BaseException:
        _pool.close()
        raise


atexit.register(_pool.close)


def _serve(pipe: Connection) -> None:
    torch.set_num_threads(1)  # an OpenMP pool does not survive a fork
    while True:
        try:
            folder, rank, world_size, work, args = pipe.recv()
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
