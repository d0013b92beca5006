"""What a training step asks of a GPU, counted without one, and the time that would take at best.

python benchmarks/gpu/roofline.py "llama-3.2-1b 4096" "llama-3.1-8b 4096 selective"

    case                                         launches      GB   TFLOP  waits     A100     H100     H200 …   tokens/s
    llama-3.2-1b 4096                               1,624     270    68.4      1   16,874   41,702   48,267 …

The trainer's own step runs on the stand-in of tests/support, whose tensors have no memory. Every operator on the device
is a launch, reads its arguments once and writes its results once; products and attention have their FLOPs. An operator
takes as long as its bytes or its FLOPs, whichever is longer, and `LAUNCH` at least. Blocks are not compiled and torch's
operators compute: with `model.compile` or our kernels in Triton a step has fewer launches and bytes.

Rates are the data sheets', times what one H200 reached of its own (docs/benchmarks.md): other GPUs may do otherwise.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "src"))

import torch
import torch.nn.functional as F
from cases import Case, find
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from kenotron.kernels import rms_norm
from kenotron.kernels.attentions.packed import torch_flash
from kenotron.parallel.device import PEAK_BF16
from kenotron.parallel.mesh import Mesh
from kenotron.planner.rehearsal import build_on
from kenotron.training.step import train_step
from support import stand_in

BANDWIDTH = {"A100": 2.04e12, "H100": 3.35e12, "H200": 4.8e12, "B200": 8.0e12, "MI300X": 5.3e12}  # by the data sheets
PRODUCTS, ATTENTION, MEMORY = 0.75, {64: 0.31, 128: 0.44}, 0.71  # of these, an H200 by its traces of Llama 1B and 8B
LAUNCH = 3e-6  # seconds
# They make no kernel: views, memory, and what Python asks of a tensor.
NAMES_OF_FREE = """
    view _unsafe_view t transpose permute expand slice select split split_with_sizes unsqueeze squeeze detach alias
    as_strided unbind chunk empty empty_like new_empty empty_strided new_empty_strided lift_fresh view_as reshape
    _reshape_alias set_ record_stream unfold narrow movedim resize_ is_pinned _pin_memory device _local_scalar_dense
    stride size is_contiguous storage_offset sym_size numel dim layout"""
FREE = frozenset(NAMES_OF_FREE.split())
ADAM_NUMBERS = 7  # fp32: reads weight, gradient and two moments; writes weight and moments


@dataclass
class Costs(TorchDispatchMode):
    """Launches with their bytes, FLOPs and head size (of attention), in order."""

    launches: list[tuple[float, float, int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = func._schema.name.split("::")[1]
        tensors = [each for each in tree_leaves((args, kwargs, out)) if isinstance(each, Tensor)]
        if name not in FREE and any(each.device.type == stand_in.NAME for each in tensors):
            moved = float(sum(each.numel() * each.element_size() for each in tensors))
            if name.startswith("_fused_adam"):
                moved = 4.0 * ADAM_NUMBERS * sum(each.numel() for each in args[0])
            self.launches.append((moved, *_flops(name, tensors, args, kwargs or {})))
        return out

    def seconds(self, machine: str) -> float:
        """How long `machine` takes at the rates of this file, one launch after the other."""
        peak, bandwidth = PEAK_BF16[machine], BANDWIDTH[machine]
        total = 0.0
        for moved, flops, head_dim in self.launches:
            rate = peak * (ATTENTION.get(head_dim, min(ATTENTION.values())) if head_dim else PRODUCTS)
            total += max(moved / (MEMORY * bandwidth), flops / rate, LAUNCH)
        return total


def _flops(name: str, tensors: list[Tensor], args: Any, kwargs: Mapping[str, Any]) -> tuple[float, int]:
    """FLOPs of a product or of causal attention, half of the square, and attention's head size."""
    matrices = [each for each in tensors if each.dim() == 2]
    if name in ("mm", "addmm", "addmm_"):
        a, b = matrices[:2] if name == "mm" else matrices[-3:-1]
        return 2.0 * a.shape[0] * a.shape[1] * b.shape[1], 0
    if name == "_grouped_mm":  # rows of experts by a matrix each, or by rows, which gives a matrix each
        return 2.0 * tensors[0].numel() * tensors[1].shape[-1], 0
    if "varlen_attn" in name:
        backward = "backward" in name
        tokens, heads, head_dim = tensors[1 if backward else 0].shape
        longest = next(each for each in (*args, *kwargs.values()) if isinstance(each, int))
        return 2.0 * tokens * longest * heads * head_dim * (2.5 if backward else 1.0), head_dim
    return 0.0, 0


@contextmanager
def _fused_norms() -> Iterator[None]:
    """RMSNorm as one launch each way, which it is on a GPU: LayerNorm is, on the stand-in too."""
    functions = SimpleNamespace(**{name: getattr(F, name) for name in dir(F)})
    functions.rms_norm = lambda x, shape, weight, eps: F.layer_norm(x, shape, weight, None, eps)
    with patch.object(rms_norm, "F", functions):
        yield


@cache
def device() -> torch.device:
    """The stand-in, which a process has once."""
    return stand_in.install()


def second_step(case: Case) -> tuple[Costs, dict[str, int]]:
    """The costs of the second step of `case`, and where the host waited for the device in it."""
    there, config = device(), case.config(Path("/nowhere"))
    with stand_in.memoryless(), _fused_norms():
        run = build_on(config, Mesh(), there, torch_flash)  # a launch for whole sequences, too, as SDPA's is on a GPU
        batches = [case.batch(config.model.decoder.vocab_size)] * case.accumulation
        with stand_in.HostWaits():
            train_step(run, batches)
        run.step += 1
        with stand_in.HostWaits() as waits, Costs() as costs:
            train_step(run, batches)
    return costs, dict(waits.sites)


def line(case: Case) -> str:
    """A row of the table."""
    costs, waits = second_step(case)
    moved, flops = (sum(each[column] for each in costs.launches) for column in (0, 1))
    speeds = (f"{case.tokens / costs.seconds(machine):8,.0f}" for machine in BANDWIDTH)
    counted = f"{len(costs.launches):8,} {moved / 1e9:7,.0f} {flops / 1e12:7,.1f} {sum(waits.values()):6}"
    return f"{case.name:44} {counted} {' '.join(speeds)}"


if __name__ == "__main__":
    print(
        f"{'case':44} launches      GB   TFLOP  waits " + " ".join(f"{name:>8}" for name in BANDWIDTH) + "   tokens/s"
    )
    for name in sys.argv[1:] or ("llama-3.2-1b 4096", "llama-3.1-8b 4096 recompute", "llama-3.1-8b 4096 selective"):
        print(line(find(name)), flush=True)
