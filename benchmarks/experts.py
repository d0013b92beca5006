"""A mixture of experts, forward and backward, against transformers' block with the same weights.

    python benchmarks/experts.py

Ours runs as training runs it, with freed memory kept (`kernels.host_memory`); transformers' fastest form runs as it
ships, and once more with the same setting. `products` are the block's matrix products alone, into memory that is there:
nothing can be faster. Each contender is a process of its own; they take turns, with other tokens, and so other numbers
of rows for each expert, in every round, as in training. The best of several rounds counts.
"""

from __future__ import annotations

import multiprocessing
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

TOKENS, HIDDEN, ROUNDS = 2048, 512, 9
SHAPES = {"8 experts, top 2": (8, 2, 1024), "64 experts, top 8": (64, 8, 256)}
Block = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Contender:
    """Who computes: ours, one of transformers' implementations of experts, or the products alone.

    transformers' batched_mm is left out: it copies an expert's weights for every token, 25 GB here.
    """

    name: str
    implementation: str | None = None
    keeps_memory: bool = False


CONTENDERS = (
    Contender("ours", keeps_memory=True),
    Contender("eager", "eager"),
    Contender("grouped_mm", "grouped_mm"),
    Contender("grouped_mm, memory kept", "grouped_mm", keeps_memory=True),
    Contender("products", keeps_memory=True),
)


def theirs(experts: int, k: int, width: int, implementation: str) -> torch.nn.Module:
    """transformers' block of a Qwen3-MoE, in fp32."""
    from transformers import Qwen3MoeConfig
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

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
    return block


def ours(experts: int, k: int, width: int) -> torch.nn.Module:
    """Our block with the same weights."""
    from kenotron.models.blocks.moe import MixtureOfExperts, Routing

    block: Any = theirs(experts, k, width, "eager")
    moe = MixtureOfExperts(HIDDEN, experts, width, "silu", Routing(k, normalize=True))
    gate, up = block.experts.gate_up_proj.data.chunk(2, 1)
    weights = (block.gate.weight.data, gate, up, block.experts.down_proj.data)
    for parameter, weight in zip(moe.parameters(), weights, strict=True):
        parameter.data = weight.clone()
    return moe.eval()


def block_of(contender: Contender, shape: tuple[int, int, int], dtype: torch.dtype) -> tuple[torch.nn.Module, Block]:
    """The module, and what calls it with x ``[tokens, hidden]``."""
    if contender.implementation is not None:
        module = theirs(*shape, contender.implementation).to(dtype)
        return module, lambda x: module(x[None])[0]
    from kenotron.kernels.attention import attention
    from kenotron.models import Context

    ctx = Context((1, TOKENS), torch.arange(TOKENS), attention)
    module = ours(*shape).to(dtype)
    return module, lambda x: module(x, ctx)


def products(shape: tuple[int, int, int], dtype: torch.dtype) -> Callable[[], None]:
    """Three products for each of an expert's matrices, with an even share of the rows, as ours calls them."""
    from kenotron.kernels.products import rows_by_matrix, rows_by_rows

    experts, k, width = shape
    rows = TOKENS * k // experts
    x, hidden = torch.randn(experts, rows, HIDDEN, dtype=dtype), torch.randn(experts, rows, width, dtype=dtype)
    up, gradient = torch.randn(2, experts, width, HIDDEN, dtype=dtype).unbind()
    wide, narrow = torch.empty_like(hidden), torch.empty_like(x)

    def multiply() -> None:
        for e in range(experts):
            for _ in range(3):
                rows_by_matrix(x[e], up[e], out=wide[e])
                rows_by_matrix(hidden[e], up[e].t(), out=narrow[e])
                rows_by_rows(hidden[e], x[e], out=gradient[e])

    return multiply


def serve(contender: Contender, pipe: Any) -> None:
    """Answer ``(shape, dtype)`` with the outputs, and a number of a round with its forward and backward in seconds."""
    from kenotron.kernels.host_memory import keep_freed_memory

    if contender.keeps_memory:
        keep_freed_memory()
    try:
        while True:
            request = pipe.recv()
            if not isinstance(request, int):
                torch.manual_seed(0)
                shape, dtype = request
                x = torch.randn(TOKENS, HIDDEN).to(dtype)
                upstream = torch.randn(TOKENS, HIDDEN, dtype=dtype)
                alone = contender.name == "products"
                module, block = (None, None) if alone else block_of(contender, shape, dtype)
                multiply = products(shape, dtype) if alone else None
                pipe.send(None if block is None else block(x).detach().float().numpy())
                continue
            x = torch.randn(TOKENS, HIDDEN, generator=torch.Generator().manual_seed(request)).to(dtype).requires_grad_()
            started = time.perf_counter()
            if multiply is not None:
                multiply()
            else:
                block(x).backward(upstream)
            seconds = time.perf_counter() - started
            for tensor in () if module is None else (x, *module.parameters()):
                tensor.grad = None
            pipe.send(seconds)
    except EOFError:
        pass
    except BaseException:
        pipe.send(traceback.format_exc())


def main() -> None:
    """Print a table of milliseconds and ratios."""
    context = multiprocessing.get_context("spawn")
    pipes = {}
    for contender in CONTENDERS:
        pipes[contender.name], theirs_end = context.Pipe()
        context.Process(target=serve, args=(contender, theirs_end), daemon=True).start()
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, {TOKENS} tokens of width {HIDDEN}")
    for dtype in (torch.float32, torch.bfloat16):
        for title, shape in SHAPES.items():
            outputs = {name: ask(pipe, (shape, dtype)) for name, pipe in pipes.items()}
            error = abs(outputs["ours"] - outputs["eager"]).max() / abs(outputs["eager"]).max()
            rounds = [{name: ask(pipe, number) for name, pipe in pipes.items()} for number in range(1, ROUNDS + 1)]
            best = {name: min(each[name] for each in rounds) for name in pipes}
            print(f"{dtype}, {title}: outputs differ by {error:.1e} of the largest")
            for name, seconds in best.items():
                ratio, share = seconds / best["ours"], best["products"] / seconds
                print(
                    f"  {name:24} {1000 * seconds:7.1f} ms   {ratio:5.2f} of ours   {share:4.0%} of the products' speed"
                )


def ask(pipe: Any, request: Any) -> Any:
    """What a contender answers."""
    pipe.send(request)
    answer = pipe.recv()
    if isinstance(answer, str):
        raise RuntimeError(answer)
    return answer


if __name__ == "__main__":
    main()
