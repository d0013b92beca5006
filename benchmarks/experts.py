"""A mixture of experts, forward and backward, against transformers' block with the same weights.

    python benchmarks/experts.py

Each of transformers' implementations of experts is timed that fits in memory,
in turn with ours in one process, so that the machine's noise hits all alike; the best of several rounds counts.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

import torch
from transformers import Qwen3MoeConfig
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

from kenotron.kernels.attention import attention
from kenotron.models import Context
from kenotron.models.blocks.moe import MixtureOfExperts, Routing

TOKENS, HIDDEN, ROUNDS = 2048, 512, 9
SHAPES = {"8 experts, top 2": (8, 2, 1024), "64 experts, top 8": (64, 8, 256)}
IMPLEMENTATIONS = ("eager", "grouped_mm")  # batched_mm copies an expert's weights for every token: 25 GB here


def theirs(experts: int, k: int, width: int, implementation: str, dtype: torch.dtype) -> torch.nn.Module:
    """transformers' block of a Qwen3-MoE."""
    config = Qwen3MoeConfig(
        hidden_size=HIDDEN,
        num_experts=experts,
        num_experts_per_tok=k,
        moe_intermediate_size=width,
        norm_topk_prob=True,
    )
    config._experts_implementation = implementation
    block = Qwen3MoeSparseMoeBlock(config)
    generator = torch.Generator().manual_seed(0)
    for parameter in block.parameters():
        parameter.data.normal_(0, 0.05, generator=generator)
    return block.to(dtype)


def ours(block: torch.nn.Module, experts: int, k: int, width: int) -> MixtureOfExperts:
    """Our block with the same weights."""
    moe = MixtureOfExperts(HIDDEN, experts, width, "silu", Routing(k, normalize=True))
    gate, up = block.experts.gate_up_proj.data.chunk(2, 1)
    weights = (block.gate.weight.data, gate, up, block.experts.down_proj.data)
    for parameter, weight in zip(moe.parameters(), weights, strict=True):
        parameter.data = weight.clone()
    return moe.eval()


def step(call: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor, upstream: torch.Tensor) -> float:
    """Seconds of one forward and backward."""
    x.grad = None
    started = time.perf_counter()
    call(x).backward(upstream)
    return time.perf_counter() - started


def main() -> None:
    """Print a table of milliseconds and ratios."""
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, {TOKENS} tokens of width {HIDDEN}")
    for dtype in (torch.float32, torch.bfloat16):
        for name, (experts, k, width) in SHAPES.items():
            x = torch.randn(TOKENS, HIDDEN, dtype=dtype, requires_grad=True)
            upstream = torch.randn(TOKENS, HIDDEN, dtype=dtype)
            ctx = Context((1, TOKENS), torch.arange(TOKENS), attention)
            blocks = {kind: theirs(experts, k, width, kind, dtype) for kind in IMPLEMENTATIONS}
            moe = ours(blocks["eager"], experts, k, width)
            calls: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {"ours": lambda x, moe=moe, ctx=ctx: moe(x, ctx)}
            for kind, block in blocks.items():
                calls[kind] = lambda x, block=block: block(x[None])[0]
            expected = calls["eager"](x)
            error = float((calls["ours"](x) - expected).norm() / expected.norm())
            best = dict.fromkeys(calls, float("inf"))
            for _ in range(ROUNDS):
                for kind, call in calls.items():
                    try:
                        best[kind] = min(best[kind], step(call, x, upstream))
                    except RuntimeError as failure:
                        print(f"  {kind}: {failure}", file=sys.stderr)
            fastest = min(value for kind, value in best.items() if kind != "ours")
            times = "  ".join(f"{kind} {1000 * value:6.1f}" for kind, value in best.items())
            print(
                f"{dtype!s:15} {name:18} ms: {times}   fastest / ours {fastest / best['ours']:.2f}   differ {error:.1e}"
            )


if __name__ == "__main__":
    main()
