"""Every kernel beside the plain composition of torch operations that it stands for.

    python benchmarks/kernels.py                                    both sizes, fp32 and bf16, 1 and 2 threads
    python benchmarks/kernels.py --sizes 17M --threads 1 --only attention

A line is one kernel, forward and backward: milliseconds of the plain form and of ours, and how many times faster ours
is. The two take turns and each keeps its best, so a disturbance has to last a whole run to hit only one of them.
Memory is what autograd keeps for the backward, beyond inputs and output.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import Tensor

from kenotron.kernels.attention import attention
from kenotron.kernels.linear_cross_entropy import linear_cross_entropy
from kenotron.kernels.random import fill_normal_
from kenotron.kernels.rms_norm import rms_norm
from kenotron.kernels.rope import apply_rope
from kenotron.kernels.swiglu import swiglu
from kenotron.kernels.tensor_shard import TensorShard

SIZES = {  # benchmarks/training.py's: (sequences, length, heads, head_dim, intermediate, vocabulary)
    "17M": (8, 256, 6, 64, 1024, 8192),
    "135M": (1, 1024, 12, 64, 2048, 32768),
}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}

Step = Callable[[], None]


def main() -> None:
    arguments = parse()
    print(f"{'':38}{'plain':>9}{'ours':>9}{'faster':>9}{'plain':>12}{'ours':>10}")
    for threads in arguments.threads:
        torch.set_num_threads(threads)
        for size in arguments.sizes:
            for dtype in arguments.precisions:
                print(f"\n{size}, {dtype}, {threads} thread{'s' * (threads > 1)}")
                for name, plain, ours in cases(*SIZES[size], DTYPES[dtype]):
                    if arguments.only in name:
                        show(name, plain, ours, arguments.rounds)
    if not arguments.only:
        random_numbers()


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=list(SIZES))
    parser.add_argument("--precisions", nargs="+", choices=DTYPES, default=list(DTYPES))
    parser.add_argument("--threads", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--only", default="", help="kernels whose name holds this text")
    return parser.parse_args()


def show(name: str, plain: tuple[Step, int], ours: tuple[Step, int], rounds: int) -> None:
    a, b = best_of(rounds, plain[0], ours[0])
    kept = f"{plain[1] / 2**20:8.1f} MiB{ours[1] / 2**20:6.1f} MiB"
    print(f"  {name:36}{a * 1e3:6.2f} ms{b * 1e3:6.2f} ms{a / b:8.2f}x{kept}")


def best_of(rounds: int, *steps: Step) -> list[float]:
    """Seconds: the fastest of `rounds` runs of each, taking turns, after one warm-up."""
    best = [float("inf")] * len(steps)
    for round_number in range(rounds + 1):
        for i, step in enumerate(steps):
            begin = time.perf_counter()
            step()
            if round_number:
                best[i] = min(best[i], time.perf_counter() - begin)
    return best


def forward_backward(function: Callable[..., Tensor], *leaves: Tensor) -> tuple[Step, int]:
    """One step of forward and backward, and the bytes that autograd keeps in between."""
    grad: list[Tensor] = []

    def step() -> None:
        out = function(*leaves)
        if not grad:
            grad.append(torch.randn_like(out) if out.dim() else torch.ones_like(out))
        out.backward(grad[0])
        for leaf in leaves:
            leaf.grad = None

    return step, bytes_kept(function, *leaves)


def bytes_kept(function: Callable[..., Tensor], *leaves: Tensor) -> int:
    known, kept = {leaf.untyped_storage().data_ptr() for leaf in leaves}, {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        out = function(*leaves)
    known.add(out.untyped_storage().data_ptr())
    return sum(size for pointer, size in kept.items() if pointer not in known)


def cases(
    sequences: int, length: int, heads: int, head_dim: int, intermediate: int, vocabulary: int, dtype: torch.dtype
) -> Iterator[tuple[str, tuple[Step, int], tuple[Step, int]]]:
    """(name, plain, ours) for every kernel at one shape."""
    torch.manual_seed(0)
    tokens, hidden = sequences * length, heads * head_dim

    def leaf(*shape: int, std: float = 1.0) -> Tensor:
        return (torch.randn(shape) * std).to(dtype).requires_grad_()

    def both(name: str, plain: Callable[..., Tensor], ours: Callable[..., Tensor], *leaves: Tensor):
        return name, forward_backward(plain, *leaves), forward_backward(ours, *leaves)

    x, weight = leaf(tokens, hidden), leaf(hidden)
    yield both("rms_norm", plain_norm, lambda x, w: rms_norm(x, w, 1e-5), x, weight)

    x = leaf(sequences, length, heads, head_dim)
    tables = angles(sequences, length, head_dim)
    for interleaved in (False, True):
        yield both(
            f"rope{', interleaved' * interleaved}",
            lambda x, i=interleaved: plain_rope(x, *tables, i),
            lambda x, i=interleaved: apply_rope(x, *tables, i),
            x,
        )

    gate, up = leaf(tokens, intermediate), leaf(tokens, intermediate)
    yield both("swiglu", lambda g, u: F.silu(g) * u, swiglu, gate, up)

    q, k, v = (leaf(sequences, length, heads, head_dim) for _ in range(3))
    whole = SimpleNamespace(cu_seqlens=None)
    yield both("attention, against sdpa", plain_attention, fold(whole), q, k, v)
    step = length // 8
    documents = SimpleNamespace(cu_seqlens=(0, *range(step // 2, tokens, step), tokens))
    mask = document_mask(documents.cu_seqlens, sequences, length)
    yield both(
        "attention, 8 documents, against mask",
        lambda *qkv: F.scaled_dot_product_attention(*(t.transpose(1, 2) for t in qkv), attn_mask=mask),
        fold(documents),
        *(q, k, v),
    )

    hidden_states, head = leaf(tokens, hidden), leaf(vocabulary, hidden, std=0.02)
    labels = torch.randint(0, vocabulary, (tokens,))
    yield both(
        "linear_cross_entropy",
        lambda h, w: F.cross_entropy(F.linear(h, w).float(), labels, reduction="sum") / tokens,
        lambda h, w: linear_cross_entropy(h, w, labels, scale=1 / tokens)[0],
        *(hidden_states, head),
    )


def plain_norm(x: Tensor, weight: Tensor) -> Tensor:
    wide = x.float()
    return weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)).to(x.dtype)


def angles(sequences: int, length: int, head_dim: int) -> tuple[Tensor, Tensor]:
    turns = torch.arange(length)[:, None] * 10000.0 ** (-torch.arange(0, head_dim, 2) / head_dim)
    cos, sin = (table.expand(sequences, length, -1).contiguous() for table in (turns.cos(), turns.sin()))
    return cos, sin


def plain_rope(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    cos, sin = cos.unsqueeze(-2).to(x.dtype), sin.unsqueeze(-2).to(x.dtype)
    if interleaved:
        a, b = x[..., 0::2], x[..., 1::2]
        return torch.stack((a * cos - b * sin, b * cos + a * sin), -1).flatten(-2)
    a, b = x.chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


def plain_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(*(t.transpose(1, 2) for t in (q, k, v)), is_causal=True)


def fold(ctx: SimpleNamespace) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    return lambda q, k, v: attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), ctx)


def document_mask(cu_seqlens: tuple[int, ...], sequences: int, length: int) -> Tensor:
    ids = torch.bucketize(torch.arange(sequences * length), torch.tensor(cu_seqlens), right=True)
    ids = ids.view(sequences, 1, length)
    return (ids.unsqueeze(-1) == ids.unsqueeze(-2)) & torch.ones(length, length, dtype=torch.bool).tril()


def random_numbers() -> None:
    tensor = torch.empty(10_000_000)
    ours, torchs = best_of(3, lambda: fill_normal_(TensorShard.full(tensor), 1), lambda: tensor.normal_())
    print(f"\n10 million normals: ours {ours * 1e3:.0f} ms, torch's generator {torchs * 1e3:.0f} ms")


if __name__ == "__main__":
    main()
