"""Attention over sequences that ranks share, against one rank: time, and how even the work is.

    python benchmarks/context_parallel.py                       2 gloo ranks, one thread each: under a minute
    python benchmarks/context_parallel.py --ranks 4 --dtype bfloat16

Time is forward and backward of one layer's attention (no projections), the best of some rounds in which all take turns:
one rank while the others wait, every rank for itself (two cores are seldom twice as fast as one), and the methods, for
which 1 / ranks is perfect. On a busy machine compare processor times. Work is the number of attention scores that the
busiest rank computes, divided by the mean.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as processes
from torch import Tensor

from kenotron.kernels.attention import Borders, attention
from kenotron.parallel import context
from kenotron.parallel.cp_schedule import Chunks, contiguous, earlier_blocks, local_blocks, zigzag

Documents = tuple[int, ...] | None
METHODS = {name: context.attention_of(name) for name in context.METHODS if name != "state_passing"}  # no attention


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--length", type=int, default=4096)
    parser.add_argument("--heads", type=int, default=6)
    parser.add_argument("--kv-heads", type=int, default=6)
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--documents", type=int, default=8, help="documents of random length in the second table")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    documents = drawn_documents(arguments.length, arguments.documents)
    for name, borders in (("one document", None), (f"{arguments.documents} documents", documents)):
        print(f"{name}: work of the busiest rank over the mean, at 2, 4, 8 ranks")
        for kind, chunks in (("zig-zag", zigzag), ("contiguous", contiguous)):
            print(f"  {kind:11s}", *(f"{imbalance(chunks, arguments.length, n, borders):5.2f}" for n in (2, 4, 8)))
    with tempfile.TemporaryDirectory() as folder:
        processes.spawn(measure, (arguments, documents, folder), nprocs=arguments.ranks)


def drawn_documents(length: int, count: int) -> tuple[int, ...]:
    generator = torch.Generator().manual_seed(0)
    inner = torch.randperm(length - 1, generator=generator)[: count - 1] + 1
    return (0, *sorted(inner.tolist()), length)


def imbalance(chunks: Callable[[int, int, int], Chunks], length: int, ranks: int, borders: Documents) -> float:
    work = []
    for rank in range(ranks):
        ours = chunks(length, ranks, rank)
        blocks = local_blocks(ours, 1, length, borders) + earlier_blocks(ours, ((0, length),), 1, length, borders)
        areas = [(t.q.stop - t.q.start) * (t.k.stop - t.k.start) / (2 if t.causal else 1) for t in blocks]
        work.append(sum(areas))
    return max(work) / (sum(work) / ranks)


def measure(rank: int, arguments: Any, documents: Documents, folder: str) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", arguments.ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=arguments.ranks)
    for name, borders in (("one document", None), (f"{arguments.documents} documents", documents)):
        times = best_times(rank, arguments, borders)
        if rank == 0:
            wall, cpu = times["one rank"]
            print(f"{name}: wall and processor time, ms, and over one rank's")
            for method, (t, c) in times.items():
                print(f"  {method:10s} {1e3 * t:5.0f} {t / wall:5.2f} {1e3 * c:7.0f} {c / cpu:5.2f}", flush=True)
    dist.destroy_process_group()


def best_times(rank: int, arguments: Any, borders: Documents) -> dict[str, list[float]]:
    """Seconds that passed and that the processor worked, of the slowest rank, each the best of all rounds."""
    whole, local = tensors(arguments, arguments.length), tensors(arguments, arguments.length // arguments.ranks)
    best: dict[str, list[float]] = {}
    for _ in range(arguments.rounds + 1):
        for name in ("one rank", "each alone", *METHODS):
            dist.barrier()
            started = time.perf_counter(), time.process_time()
            if name in METHODS:
                step(lambda q, k, v, method=METHODS[name]: method(q, k, v, dist.group.WORLD, borders), *local)
            elif rank == 0 or name == "each alone":
                step(lambda q, k, v: attention(q, k, v, Borders(borders)), *whole)
            took = torch.tensor([time.perf_counter() - started[0], time.process_time() - started[1]])
            dist.all_reduce(took, op=dist.ReduceOp.MAX)
            best[name] = [min(pair) for pair in zip(best.get(name, took.tolist()), took.tolist())]
    return best


def tensors(arguments: Any, length: int) -> list[Tensor]:
    """q, k, v and the output's gradient."""
    widths = (arguments.heads, arguments.kv_heads, arguments.kv_heads, arguments.heads)
    dtype = getattr(torch, arguments.dtype)
    drawn = [torch.randn(1, heads, length, arguments.head_dim, dtype=dtype) for heads in widths]
    return [*(x.requires_grad_() for x in drawn[:3]), drawn[3]]


def step(function: Callable[..., Tensor], q: Tensor, k: Tensor, v: Tensor, grad: Tensor) -> None:
    torch.autograd.grad(function(q, k, v), (q, k, v), grad)


if __name__ == "__main__":
    main()
