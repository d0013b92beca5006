"""Measure the rates of this machine's GPUs within a minute, for kinds that gpus.yaml lacks, or to check it.

    gpu = measure(gpu_here(), torch.device("cuda", 0), report)
    write_gpu(Path("my-gpu.yaml"), gpu)              # kenotron plan my.yaml --gpu my-gpu.yaml

Each rate is the mean over some seconds, not the best of a few turns: a busy GPU has a lower clock than an idle one.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
import yaml
from torch import Tensor

from kenotron.kernels.products import rows_by_matrix
from kenotron.kernels.swiglu import swiglu
from kenotron.parallel.device import backend, synchronize
from kenotron.planner.hardware import Gpu
from kenotron.planner.rates import LINK

SECONDS = 3.0
"""The time for which each rate is measured."""
HEADER = "# Measured by `kenotron plan --measure`, but for network and watts. The fields are those of gpus.yaml.\n"
PCIE, NETWORK = 3.2e10, 2.5e10  # bytes/s, for unknown kinds of GPUs


def measure(
    known: Gpu, device: torch.device, report: Callable[[int, int], None] | None = None, ranks: int = 1, scale: int = 1
) -> Gpu:
    """Return `known` with the measured rates of `device`, and of a collective of `ranks` devices; its peaks are kept.

    `report` gets the number of measured rates, and of all rates. `scale` divides the sizes of the matrices.
    """
    side, length, rates = 8192 // scale, 4096 // scale, []
    steps = [
        lambda: products(side, torch.bfloat16, device),
        lambda: products(side, torch.float32, device),
        lambda: attention(length, 64, device),
        lambda: attention(length, 128, device),
        lambda: bytes_moved(side, device),
        lambda: bytes_sent(ranks, side * side, device.type) if ranks > 1 else known.link or PCIE,
    ]
    for number, step in enumerate(steps):
        if report is not None:
            report(number, len(steps))
        rates.append(step())
    flops, bandwidth = known.flops or rates[0], known.bandwidth or rates[4]
    share = rates[0] / flops
    return known._replace(
        flops=flops,
        fp32=rates[1] / share,
        products=share,
        attention={64: rates[2] / flops, 128: rates[3] / flops},
        bandwidth=bandwidth,
        memory=rates[4] / bandwidth,
        link=rates[5],
        network=known.network or NETWORK,
        in_machine=ranks,
    )


def write_gpu(path: Path, gpu: Gpu) -> None:
    """Write the file that `gpu_called` reads."""
    fields = gpu._asdict() | {"capability": list(gpu.capability)}
    path.write_text(HEADER + yaml.safe_dump(fields, sort_keys=False), encoding="utf-8")


def products(side: int, dtype: torch.dtype, device: torch.device) -> float:
    """Measure the FLOP/s of square products."""
    a = unequal((side, side), device).to(dtype)
    return 2 * side**3 / average_seconds(lambda: rows_by_matrix(a, a), device)


def attention(length: int, head_dim: int, device: torch.device) -> float:
    """Measure the FLOP/s of causal attention: seven products, forward and backward, of half of the square."""
    q, k, v = (unequal((2, 16, length, head_dim), device).bfloat16().requires_grad_() for _ in range(3))

    def attend() -> None:
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        torch.autograd.grad(out, (q, k, v), out)

    return 7 * q.numel() * length / average_seconds(attend, device)


def bytes_moved(side: int, device: torch.device) -> float:
    """Measure the bytes/s of SwiGLU, forward and backward, and of an AdamW update, which are bound by memory."""
    gate, up = (unequal((side, side), device).bfloat16().requires_grad_() for _ in range(2))
    weight = torch.nn.Parameter(unequal((side, side), device))
    weight.grad = unequal((side, side), device)
    optimizer = torch.optim.AdamW([weight], fused=True)

    def work() -> None:
        out = swiglu(gate, up)
        torch.autograd.grad(out, (gate, up), out)
        optimizer.step()

    swiglu_bytes, adam_bytes = 8 * 2, 7 * 4  # per element
    return (swiglu_bytes + adam_bytes) * side**2 / average_seconds(work, device)


def bytes_sent(ranks: int, numbers: int, device: str) -> float:
    """Measure the bytes/s of a rank's link, by an all-reduce over `ranks` of this machine."""
    answers = mp.get_context("spawn").SimpleQueue()
    store = dist.TCPStore("127.0.0.1", 0, is_master=True)
    mp.spawn(_sum, (ranks, store.port, numbers, device, answers), nprocs=ranks)
    sent = 2 * 4 * numbers * (ranks - 1) / ranks
    return float(sent / answers.get() / LINK)


def _sum(rank: int, ranks: int, port: int, numbers: int, kind: str, answers: Any) -> None:
    device = torch.device(kind, rank)
    if kind == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group(backend(device), store=dist.TCPStore("127.0.0.1", port), rank=rank, world_size=ranks)
    tensor = torch.zeros(numbers, device="cpu" if kind == "cpu" else device)
    turns = 20
    for turn in range(turns + 1):
        if turn == 1:  # the first turn connects the ranks
            synchronize(device)
            dist.barrier()
            started = time.perf_counter()
        dist.all_reduce(tensor)
    synchronize(device)
    if rank == 0:
        answers.put((time.perf_counter() - started) / turns)
    dist.destroy_process_group()


def unequal(shape: tuple[int, ...], device: torch.device) -> Tensor:
    """Return random numbers: with equal numbers a GPU needs less power, and is faster."""
    return torch.randn(shape, generator=torch.Generator(device).manual_seed(0), device=device)


def average_seconds(work: Callable[[], object], device: torch.device) -> float:
    """Return the average time of `work` over `SECONDS`, after a first call."""
    work()
    synchronize(device)
    started, turns = time.perf_counter(), 0
    while (passed := time.perf_counter() - started) < SECONDS:
        work()
        synchronize(device)
        turns += 1
    return passed / turns
