"""Run functions on gloo ranks that are forked once a session and kept, so a job starts in milliseconds.

    results = run_ranks(2, work, argument)     # [work(0, argument), work(1, argument)]

Ranks keep their process group and its device meshes for the next job on as many ranks, and with them what torch has
worked out for each mesh (how DTensors move), which is a third of a small job's time. Jobs on another number of ranks
have other processes: a group lives as long as its ranks, so no test depends on how well torch takes one down. Between
jobs ranks are stopped: gloo's thread wakes a hundred times a second, and ranks of several jobs wait at a time.

Ranks are forked, at most eight of a job, from the server of `preload`.

A rank that raises ends the job and its traceback is reported; the ranks are then killed, because others may hang in a
collective, and the next job forks new ones.
"""

import atexit
import functools
import io
import itertools
import os
import signal
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
from torch.distributed import device_mesh, distributed_c10d

from kenotron.launch.environment import end_with_parent
from kenotron.parallel.torch_internals import set_timeout_of_all_groups
from support.preload import fork_server

MOST_RANKS = 8
TIMEOUT_S = 300
COLLECTIVE_TIMEOUT_S = 120  # long: a machine may be busy with other work
JOBS_PER_RANKS = 25  # then new ones are forked: groups that a job made, such as an optimizer's, are its own
ROUNDING = 2e-6  # of a gradient or loss in fp32: both sides round, and every kind of processor in its own way


class Pool:
    """As many ranks as its jobs have, which wait for the next one."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self.pipes: list[Connection] = []
        self.processes: list[BaseProcess] = []
        self.jobs = 0  # since they were forked
        self.numbers = itertools.count()
        self.folder = tempfile.TemporaryDirectory()  # of the stores through which the ranks of a group meet
        atexit.register(self.close)

    def run(self, work: Callable[..., Any], args: tuple[Any, ...]) -> list[Any]:
        """`work(rank, *args)` on every rank."""
        if not self.pipes or self.jobs == JOBS_PER_RANKS:
            self._fork()
        self.jobs += 1
        self._signal(signal.SIGCONT)
        for pipe in self.pipes:
            pipe.send((work, args))
        results = self._collect(self.pipes)
        self._signal(signal.SIGSTOP)
        return results

    def _signal(self, number: signal.Signals) -> None:
        for process in self.processes:
            assert process.pid is not None
            os.kill(process.pid, number)

    def _fork(self) -> None:
        """New ranks instead of those that there are."""
        self.close()
        context = fork_server()
        store = f"{self.folder.name}/{next(self.numbers)}"
        for rank in range(self.world_size):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs, store, rank, self.world_size), daemon=True)
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
        for process in self.processes:
            process.join()
        for pipe in self.pipes:
            pipe.close()
        self.pipes, self.processes, self.jobs = [], [], 0


pool_of = functools.cache(Pool)


def run_ranks(world_size: int, work: Callable[..., Any], *args: Any) -> list[Any]:
    """`work(rank, *args)` on every rank, inside a gloo group of `world_size`; its results in rank order.

    `work` is a function of a module that can be imported by name; arguments travel by pickle.
    """
    assert world_size <= MOST_RANKS, f"{world_size} ranks: the pool has at most {MOST_RANKS}"
    pool = pool_of(world_size)
    try:
        return pool.run(work, args)
    except BaseException:
        pool.close()
        raise


def relative_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Norm of the difference over the norm of `expected`."""
    return ((found - expected).norm() / expected.norm()).item()


class OneDeviceGloo(distributed_c10d.ProcessGroupGloo):
    """Gloo's process group on a network device that all groups of a rank share.

    torch makes one for each group, and its thread wakes a hundred times a second: eight ranks with twenty groups each
    spend a quarter of two cores on that.
    """

    device = None

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta, **_: object) -> None:
        cls = type(self)
        cls.device = cls.device or distributed_c10d.ProcessGroupGloo.create_default_device()
        options = distributed_c10d.ProcessGroupGloo._Options()
        options._devices, options._timeout = [cls.device], timeout
        super().__init__(store, rank, size, options)


def _serve(pipe: Connection, store: str, rank: int, world_size: int) -> None:
    end_with_parent()  # also while it is stopped
    torch.set_num_threads(1)  # an OpenMP pool does not survive a fork
    distributed_c10d.ProcessGroupGloo = OneDeviceGloo
    init_device_mesh = functools.lru_cache(None)(device_mesh.init_device_mesh)
    device_mesh.init_device_mesh = lambda *args, **options: init_device_mesh(*args, **options)
    dist.init_process_group("gloo", store=dist.FileStore(store, world_size), rank=rank, world_size=world_size)
    while True:
        try:
            work, args = pipe.recv()
        except EOFError:
            os._exit(0)
        try:
            set_timeout_of_all_groups(COLLECTIVE_TIMEOUT_S)
            result = io.BytesIO()
            torch.save(work(rank, *args), result)  # by value: a shared tensor would die with its rank
            dist.barrier()
            pipe.send((False, result.getvalue()))
        except BaseException:
            pipe.send((True, traceback.format_exc()))
