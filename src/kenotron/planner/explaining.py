"""`kenotron plan --explain`: what the largest rank's memory and a step's time consist of, and what makes each less."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING

from kenotron.planner.hardware import GIB
from kenotron.planner.verdict import COLUMNS, by_column

if TYPE_CHECKING:
    from kenotron.planner.planning import Plan

SHARDS = "a higher optimizer.zero_stage with dp, parallelism.tp, pp"
SMALLER = "a smaller tokens.micro_batch_size"
MEMORY = {  # what it is, what makes it less
    "weights": ("parameters as they are kept, this rank's shard", f"{SHARDS}; of weights stage 3"),
    "gradients": ("those that exist at the peak", f"{SHARDS}; of gradients stage 2 or 3"),
    "optimizer": ("moments and other state", SHARDS),
    "activations": (
        "what forward passes keep for their backward passes",
        f"parallelism.recompute_layer, {SMALLER}, tp_mode REDUCE_SCATTER, context_parallel_size; with afab another "
        "pp_engine",
    ),
    "logits": ("the loss and its gradients, in chunks", f"{SMALLER}, parallelism.tp"),
    "communication": ("gathered weights, and buffers of collectives", "optimizer.zero_stage 1 in the place of 2 or 3"),
    "other": ("gradients of activations, buffers, temporaries of the update", SMALLER),
}
TIME = {
    "products": ("products of matrices", "parallelism.recompute_layer false or selective"),
    "attention": ("each token beside those before it", "shorter documents or sequences, a sliding window"),
    "other kernels": ("norms, activations, sums, the update: memory that is read and written", "model.compile"),
    "waits for dp": (
        "gradients and weights on their way that nothing hides",
        "tokens.batch_accumulation_per_replica, optimizer.zero_stage 1 in the place of 3, dp_shard within machines",
    ),
    "waits for tp": (
        "activations on their way between the parts of a layer",
        "a smaller parallelism.tp, tp_linear_async_communication with REDUCE_SCATTER",
    ),
    "waits for cp": ("keys and values on their way", "a smaller parallelism.context_parallel_size, another method"),
    "waits for ep": ("tokens on their way to experts", "a smaller parallelism.expert_parallel_size"),
    "waits for pp": (
        "the bubble of the pipeline",
        "more micro-batches (tokens.batch_accumulation_per_replica), interleaved_1f1b or a zero-bubble pp_engine",
    ),
    "waits for host": ("a GPU that nothing has been asked of", f"model.compile, not {SMALLER}"),
    "waits for all": ("sums over several axes", "fewer ranks"),
}
LEAST = 0.01
"""Shares below it are not told."""


def explained(plan: Plan) -> Iterator[str]:
    """Lines for people: of the rank with the largest peak, and of the slowest of those that were followed."""
    rank = max(plan.ranks, key=lambda each: each.peak.bytes)
    yield f"Rank {rank.rank} holds {rank.peak.bytes / GIB:.3g} GiB at its peak:"
    yield from _shares(dict(zip(COLUMNS, by_column(rank.peak.of))), MEMORY, lambda size: f"{size / GIB:6.3g} GiB")
    if plan.speed is not None:
        yield f"A step takes {1000 * plan.speed.seconds:,.1f} ms, of rank {plan.ranks[0].rank}:"
        yield from _shares(plan.speed.ranks[0].of, TIME, lambda size: f"{1000 * size:9,.1f} ms")


def _shares(
    of: Mapping[str, float], known: Mapping[str, tuple[str, str]], shown: Callable[[float], str]
) -> Iterator[str]:
    whole = sum(of.values())
    for part, size in sorted(of.items(), key=lambda item: -item[1]):
        if size >= LEAST * whole:
            what, less = known.get(part, ("other queues of the GPU", "nothing known"))
            yield f"  {size / whole:4.0%} {shown(size)}  {part}: {what}. Less with {less}."
