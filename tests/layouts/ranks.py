"""Run a function on several gloo ranks, forked from this process (torch is loaded already, so a rank starts
in milliseconds).

    results = run_ranks(2, work, argument)     # [work(0, argument), work(1, argument)]

A rank that raises ends all of them, with its traceback first.
"""

from __future__ import annotations

import io
import multiprocessing
import tempfile
import traceback
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

TIMEOUT_S = 120


def run_ranks(world_size: int, work: Callable[..., Any], *args: Any) -> list[Any]:
    """`work(rank, *args)` on every rank, inside a gloo group of `world_size`; its results in rank order."""
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        pipes = [context.Pipe(duplex=False) for _ in range(world_size)]
        ranks = [
            context.Process(target=_rank, args=(rank, world_size, folder, pipe[1], work, args), daemon=True)
            for rank, pipe in enumerate(pipes)
        ]
        for process in ranks:
            process.start()
        try:
            return [_result(rank, pipe[0]) for rank, pipe in enumerate(pipes)]
        finally:
            for process in ranks:
                process.terminate()
                process.join()


def _result(rank: int, pipe: Any) -> Any:
    if not pipe.poll(TIMEOUT_S):
        raise TimeoutError(f"rank {rank} gave no answer in {TIMEOUT_S} s")
    failed, value = pipe.recv()
    if failed:
        raise AssertionError(f"rank {rank} failed:\n{value}")
    return torch.load(io.BytesIO(value), weights_only=False)


def _rank(rank: int, world_size: int, folder: str, pipe: Any, work: Callable[..., Any], args: tuple) -> None:
    torch.set_num_threads(1)  # an OpenMP pool does not survive a fork
    try:
        store = dist.FileStore(f"{folder}/store", world_size)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=timedelta(seconds=60))
        result = io.BytesIO()
        torch.save(work(rank, *args), result)  # by value: a shared tensor would die with its rank
        pipe.send((False, result.getvalue()))
        dist.barrier()
    except BaseException:
        pipe.send((True, traceback.format_exc()))
