"""`parallelism`: the degree of each parallel axis. The layout does not change the result of a run.

    parallelism: {dp: 4, dp_shard: 2, pp: 2, tp: 2}     16 ranks: 2 stages x 2 replicas of 2 shards x tp 2

`parallel.mesh` builds the axes; docs/parallelism.md explains each of them.
"""

from __future__ import annotations

import os
from math import prod
from typing import Annotated, Literal, Protocol, get_args

from kenotron.config.errors import InputError
from kenotron.config.section import Section, key, null_means, our_key, upper_case

CONTIGUOUS_METHODS = ("ulysses", "state_passing")  # of context parallelism: a rank holds one contiguous part
PPEngine = Literal["afab", "1f1b", "interleaved_1f1b", "interleaved_zero_bubble", "zbv_zero_bubble", "dualpipev"]
PP_ENGINES: tuple[str, ...] = get_args(PPEngine)
# Each rank holds one stage of the first half of the model and one of the second.
V_ENGINES = ("zbv_zero_bubble", "dualpipev")
# Backward is split in two; the weight gradients fill the bubbles.
ZERO_BUBBLE_ENGINES = ("interleaved_zero_bubble", *V_ENGINES)
STRATEGIES: dict[str, int | str] = {"ddp": 0, "fsdp_grad_op": 2, "fsdp": 3, "fsdp_hybrid": "hybrid"}


def stays_on_cpu() -> bool:
    """Return whether ``KENOTRON_DEVICE=cpu`` keeps runs on the CPU. Raises InputError for another value."""
    device = os.environ.get("KENOTRON_DEVICE", "")
    if device not in ("", "cpu"):
        raise InputError(f"KENOTRON_DEVICE: expected cpu, or unset to use an accelerator if any, found {device!r}")
    return device == "cpu"


class HasLayout(Protocol):
    """An object with a layout: the config of a run, or a request for generation."""

    @property
    def parallelism(self) -> Parallelism:
        """The degrees of all axes."""

    @property
    def zero_stage(self) -> int | str:
        """0, 1, 2, 3 or "hybrid"."""

    @property
    def expert_sizes(self) -> tuple[int, ...]:
        """The dimensions of the stacked experts of a rank, before ZeRO shards them; empty if there are none."""


class Parallelism(Section):
    """Degrees and settings of the parallel axes."""

    dp: int = key("Data-parallel replicas.", 1, ge=1)
    dp_shard: int | None = our_key(
        "Ranks that zero_stage shards over; the dp / dp_shard groups are replicas of each other. null: all of dp (with "
        "zero_stage hybrid: the ranks of one machine).",
        None,
        ge=1,
    )
    strategy: str | None = our_key(
        "zero_stage under Gapetron's names: ddp 0, fsdp_grad_op 2, fsdp 3, fsdp_hybrid hybrid; or the dotted path of "
        "your own function that makes the model data-parallel.",
        None,
    )
    cpu_offload: bool = our_key(
        "Keep sharded weights and optimizer state in host memory, and update them there.", False
    )
    pp: int = key("Pipeline stages.", 1, ge=1)
    tp: int = key("Tensor-parallel ranks that each split weight is divided over.", 1, ge=1)
    pp_engine: Annotated[PPEngine, null_means("afab")] = key(
        "Pipeline schedule: all forward then all backward, one forward one backward, or a schedule with several stages "
        "per rank. No effect at pp 1.",
        "afab",
    )
    pp_stages_per_rank: int | None = our_key(
        "Pipeline stages per rank. null: 1 with afab and 1f1b, 2 with the others.", None, ge=1
    )
    pp_layers: list[int] | None = our_key(
        "Number of layers of each pipeline stage, in model order. null: split by cost, counting the embedding and "
        "the head.",
        None,
    )
    tp_mode: Annotated[Literal["ALL_REDUCE", "REDUCE_SCATTER"], upper_case("ALL_REDUCE")] = key(
        "Whether activations between split weights are replicated or split along the sequence. No effect at tp 1.",
        "ALL_REDUCE",
    )
    tp_linear_async_communication: Annotated[bool, null_means(False)] = key(
        "Overlap tensor-parallel communication with matrix products. No effect at tp 1.", False
    )
    recompute_layer: Literal[True, False, "selective", "elementwise"] = key(
        "Drop a layer's activations after forward and recompute them in backward: less memory, about a third more "
        "compute. selective keeps the results of attention and of its products, elementwise those of the MLP, too.",
        False,
    )
    tp_recompute_allgather: bool = key(
        "Gather sequence shards again in backward instead of keeping them. No effect at tp 1.", True
    )
    context_parallel_size: int = key("Ranks that each sequence is divided over.", 1, ge=1)
    context_parallel_method: Literal["ring", "ulysses", "allgather", "state_passing"] = our_key(
        "How attention reaches the tokens of other ranks: keys and values go round a ring, an all-to-all exchanges "
        "heads for tokens, or keys and values are gathered. state_passing: for Mamba, whose states are passed on.",
        "ring",
    )
    expert_parallel_size: int = key(
        "Ranks that the experts of a layer are divided over, some of the dp x cp ranks: the number of processes does "
        "not change.",
        1,
        ge=1,
    )
    timeout_seconds: float = our_key(
        "End the run when a collective has waited this long, and name the ranks that did not join it.", 1800.0, gt=0
    )

    @property
    def world_size(self) -> int:
        """The number of processes of the layout."""
        return prod(self.degrees.values())

    @property
    def degrees(self) -> dict[str, int]:
        """Short name → degree, for the axes whose product is the number of processes."""
        return {"dp": self.dp, "pp": self.pp, "tp": self.tp, "cp": self.context_parallel_size}

    @property
    def stages_per_rank(self) -> int:
        """The number of pipeline stages on each rank."""
        return self.pp_stages_per_rank or (1 if self.pp_engine in ("afab", "1f1b") else 2)
