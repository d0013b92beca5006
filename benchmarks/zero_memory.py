"""What a rank holds under each ZeRO stage: tensor bytes counted by storage, beside the formula.

    python benchmarks/zero_memory.py                    dp 4, and dp 4 x pp 2: some minutes on two cores
    python benchmarks/zero_memory.py --pp 1 --precision bf16

Every storage that an operation makes is counted once, while it lives. The model is wide and reads eight tokens, so that
activations are nothing beside weights. Three moments of a step of two micro-batches, in bytes; N parameters are on the
rank's part of the model, R of them in no block (embedding, norm, head) and B in each block; D ranks share (1 at stage
0), a block's weight at work has w bytes (4, in bf16 2), and U = w (N - R) + 4 R are all weights at work:

    moment                       stage 0      stage 1        stage 2           stage 3
    between two steps            12 N         12 N/D         12 N/D            12 N/D       fp32 masters, two moments
    before the last micro-batch  + 4 N        + 4 N + U      + 4 N/D + U       + 4 N/D      gradients, weights at work
    at the fullest, besides      + T                         + (w + 4) B       + (w + 4) B  a block's gradients, and the
                                              + (4 - w) B
                                              + 4 B/D        + 4 B/D           + 4 B/D      buffers of its scatter
                                                                               + 4 R + 2 w B    weights at work
                                                             + 2 R             + 2 R        the head's gradient waits

T is the buffer of one sum, 25 MiB or all 4 N. At stage 0 in bf16 layers cast the weights themselves, and autograd keeps
the copies until backward: the fullest is then + w N, if that is more. With pp
torch's schedules keep gradients whole until a step's last micro-batch, and weights from a first backward on, so stages
2 and 3 have stage 1's fullest moment; what is kept between steps is the same.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as processes
import yaml
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from kenotron.config import dump, load
from kenotron.data import TokenBatch
from kenotron.parallel import data
from kenotron.parallel.mesh import axes, build_mesh
from kenotron.training.run import Run
from kenotron.training.step import train_step

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE / "peers"))

from ours import build_run, configure  # noqa: E402
from work import Work  # noqa: E402

WORK = Work("wide", hidden=256, layers=8, heads=4, intermediate=704, vocab=1024, sequence=8, micro_batch=1)
DP = 4
STAGES = (0, 1, 2, 3)
MOMENTS = ("between two steps", "before the last micro-batch", "at the fullest")
TOLERANCE = 0.05


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--precision", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--pp", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--stages", nargs="+", type=int, choices=STAGES, default=list(STAGES))
    arguments = parser.parse_args()
    worst = 0.0
    for pp in arguments.pp:
        print(f"\ndp {DP} x pp {pp}, {arguments.precision}: MiB on the fullest rank, measured (formula)")
        print("  zero_stage  " + "  ".join(f"{moment:>28}" for moment in MOMENTS))
        for stage in arguments.stages:
            found = measure(
                sizes_of, DP * pp, arguments.precision, [f"parallelism.pp={pp}", f"optimizer.zero_stage={stage}"]
            )
            expected = formula(stage, pp, arguments.precision, Sizes(*found["sizes"]))
            cells = [(found["bytes"].get(moment), expected[moment]) for moment in MOMENTS]
            worst = max([worst, *(abs(a / b - 1) for a, b in cells if a is not None)])
            print(f"  {stage:10}  " + "  ".join(_cell(a, b) for a, b in cells), flush=True)
    report(worst)


def report(worst: float) -> None:
    """The last line: the largest difference from the formula, and whether it is within the bar."""
    verdict = "met" if worst <= TOLERANCE else "MISSED"
    print(f"\nLargest difference from the formula: {worst:.1%} (bar {TOLERANCE:.0%}: {verdict})")


def _cell(measured: int | None, expected: float) -> str:
    return f"{'-':>28}" if measured is None else f"{measured / 2**20:16.2f} ({expected / 2**20:8.2f}) "


@dataclass(frozen=True)
class Sizes:
    """Numbers of parameters on a rank's part: all, those in no block, and those of a block."""

    all: int
    rest: int
    block: int


def formula(stage: int, pp: int, precision: str, sizes: Sizes) -> dict[str, float]:
    """The table above."""
    width, share = (2 if precision == "bf16" else 4), (1 if stage == 0 else DP)
    at_work = width * (sizes.all - sizes.rest) + 4 * sizes.rest
    between = 12 * sizes.all / share
    in_flight = (width + 4) * sizes.block + 4 * sizes.block / share + 2 * sizes.rest
    if stage == 0:
        before = between + 4 * sizes.all
        buffer = min(25 << 20, 4 * sizes.all)
        fullest = before + max(buffer, width * sizes.all if precision == "bf16" else 0)
    elif stage == 1 or pp > 1:
        before = between + 4 * sizes.all + at_work
        fullest = before + (4 - width) * sizes.block + 4 * sizes.block / share
    elif stage == 2:
        before = between + 4 * sizes.all / share + at_work
        fullest = before + in_flight
    else:
        before = between + 4 * sizes.all / share
        fullest = before + in_flight + 4 * sizes.rest + 2 * width * sizes.block
    return dict(zip(MOMENTS, (between, before, fullest), strict=True))


def measure(
    sizes_of: Callable[[Run], Sequence[int]], ranks: int, precision: str, overrides: Sequence[str]
) -> dict[str, Any]:
    """What `sizes_of` says, and the bytes at each moment, of the rank that is fullest between steps."""
    with tempfile.TemporaryDirectory() as folder:
        arguments = (ranks, sizes_of, precision, overrides, folder)
        processes.start_processes(on_rank, args=arguments, nprocs=ranks, start_method="fork")
        found = [json.loads(Path(folder, f"{rank}.json").read_text()) for rank in range(ranks)]
    return max(found, key=lambda rank: rank["bytes"][MOMENTS[0]])


def on_rank(
    rank: int,
    ranks: int,
    sizes_of: Callable[[Run], Sequence[int]],
    precision: str,
    overrides: Sequence[str],
    folder: str,
) -> None:
    torch.set_num_threads(1)
    logging.getLogger("kenotron").setLevel(logging.ERROR)  # it would warn that two micro-batches are few for a pipeline
    store = dist.FileStore(f"{folder}/store", ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=timedelta(seconds=300))
    settings = yaml.safe_load(dump(configure(replace(WORK, precision=precision), compiled=False)))
    config = load(settings, [*overrides, f"parallelism.dp={DP}", "tokens.batch_accumulation_per_replica=2"])
    mesh = build_mesh(axes(config, ranks), ranks, "cpu")
    with Live() as live:
        run = build_run(config, mesh)
        found = steps(run, live)
    Path(folder, f"{rank}.json").write_text(json.dumps({"sizes": sizes_of(run), "bytes": found}))
    dist.destroy_process_group()


def sizes_of(run: Run) -> tuple[int, int, int]:
    """The fields of `Sizes`."""
    part = run.parts[0]
    blocks = [sum(parameter.numel() for parameter in block.parameters()) for block in part.model.layers.values()]
    total = sum(parameter.numel() for parameter in part.parameters())
    return total, total - sum(blocks), max(blocks)


def steps(run: Run, live: Live) -> dict[str, int]:
    """Bytes at the three moments of a third step: everything has its memory by then."""
    found: dict[str, int] = {}
    set_last_micro_batch = data.set_last_micro_batch

    def looking(root: torch.nn.Module, last: bool) -> None:
        if last:
            found[MOMENTS[1]] = live.now()
        set_last_micro_batch(root, last)

    data.set_last_micro_batch = looking
    tokens = np.zeros((WORK.micro_batch, WORK.sequence + 1), np.int64)
    batch = TokenBatch(tokens[:, :-1], tokens[:, 1:], np.arange(len(tokens)))
    for _ in range(3):
        live.peak = 0
        train_step(run, [batch, batch])
        found[MOMENTS[0]], found[MOMENTS[2]] = live.now(), live.peak
    return found


class Live(TorchDispatchMode):
    """Bytes of all storages that operations made and that still live, and the `peak` of them."""

    def __init__(self) -> None:
        super().__init__()
        self.storages: dict[int, StorageWeakRef] = {}
        self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tensors_in(result):
            storage = tensor.untyped_storage()
            if tensor.device.type != "meta" and storage._cdata not in self.storages:
                self.storages[storage._cdata] = StorageWeakRef(storage)
        self.peak = max(self.peak, self.now())
        return result

    def now(self) -> int:
        total = 0
        for key, reference in list(self.storages.items()):
            if reference.expired():
                del self.storages[key]
            else:  # FSDP2 empties storages without giving them up, so their size is asked each time
                total += torch.UntypedStorage._new_with_weak_ptr(reference.cdata).nbytes()
        return total


def tensors_in(result: Any) -> Iterator[torch.Tensor]:
    """The plain tensors of an operation's result; of a DTensor what this rank holds."""
    if isinstance(result, torch.Tensor):
        yield getattr(result, "_local_tensor", result)
    elif isinstance(result, list | tuple):
        for each in result:
            yield from tensors_in(each)


if __name__ == "__main__":
    main()
