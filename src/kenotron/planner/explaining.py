"""`kenotron plan --explain`: the parts of the largest rank's memory and of a step's time, and how to reduce each."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING

from kenotron.planner.hardware import GIB
from kenotron.planner.verdict import COLUMNS, by_column

if TYPE_CHECKING:
    from kenotron.planner.planning import Plan

SHARDS = "a higher optimizer.zero_stage with dp, parallelism.tp, pp"
SMALLER = "a smaller tokens.micro_batch_size"
MEMORY = {  # category → its content, and how to reduce it
    "weights": ("parameters as they are kept, this rank's shard", f"{SHARDS}; of weights stage 3"),
    "gradients": ("gradients that exist at the peak", f"{SHARDS}; of gradients stage 2 or 3"),
    "optimizer": ("moments and other state", SHARDS),
    "activations": (
        "tensors that forward passes save for backward",
        f"parallelism.recompute_layer, {SMALLER}, tp_mode REDUCE_SCATTER, context_parallel_size; with afab another "
        "pp_engine",
    ),
    "logits": ("the loss and its gradients, in chunks", f"{SMALLER}, parallelism.tp"),
    "communication": ("gathered weights, and buffers of collectives", "optimizer.zero_stage 1 instead of 2 or 3"),
    "other": ("gradients of activations, buffers, temporaries of the update", SMALLER),
}
TIME = {
    "products": ("products of matrices", "parallelism.recompute_layer false or selective"),
    "attention": ("scores of each token with earlier tokens", "shorter documents or sequences, a sliding window"),
    "other kernels": ("norms, activations, sums, the update, all bound by memory bandwidth", "model.compile"),
    "waits for dp": (
        "communication of gradients and weights that computation does not hide",
        "tokens.batch_accumulation_per_replica, optimizer.zero_stage 1 instead of 3, dp_shard within machines",
    ),
    "waits for tp": (
        "communication of activations within layers",
        "a smaller parallelism.tp, tp_linear_async_communication with REDUCE_SCATTER",
    ),
    "waits for cp": ("communication of keys and values", "a smaller parallelism.context_parallel_size, another method"),
    "waits for ep": ("communication of tokens to experts", "a smaller parallelism.expert_parallel_size"),
    "waits for pp": (
        "the bubble of the pipeline",
        "more micro-batches (tokens.batch_accumulation_per_replica), interleaved_1f1b or a zero-bubble pp_engine",
    ),
    "waits for host": ("an idle GPU without launched kernels", f"model.compile, not {SMALLER}"),
    "waits for all": ("sums over several axes", "fewer ranks"),
}
LEAST = 0.01
"""The smallest share that is shown."""


def explained(plan: Plan) -> Iterator[str]:
    """Yield lines that explain the memory of the rank with the largest peak, and the time of the first rank's step."""
    rank = max(plan.ranks, key=lambda rank: rank.peak.bytes)
    yield f"Rank {rank.rank} holds {rank.peak.bytes / GIB:.3g} GiB at its peak:"
    yield from _shares(dict(zip(COLUMNS, by_column(rank.peak.of))), MEMORY, lambda size: f"{size / GIB:6.3g} GiB")
    if plan.speed is not None:
        yield f"A step takes {1000 * plan.speed.seconds:,.1f} ms, of rank {plan.ranks[0].rank}:"
        yield from _shares(plan.speed.ranks[0].of, TIME, lambda size: f"{1000 * size:9,.1f} ms")


def _shares(
    parts: Mapping[str, float], texts: Mapping[str, tuple[str, str]], formatted: Callable[[float], str]
) -> Iterator[str]:
    total = sum(parts.values())
    for part, size in sorted(parts.items(), key=lambda item: -item[1]):
        if size >= LEAST * total:
            what, less = texts.get(part, ("other queues of the GPU", "nothing known"))
            yield f"  {size / total:4.0%} {formatted(size)}  {part}: {what}. Less with {less}."
