"""`parallelism`: how many ways each axis splits the run. The layout never changes what a run means.

    parallelism: {dp: 4, dp_shard: 2, pp: 2, tp: 2}     16 ranks: two stages, each on two copies of two shards, tp 2

`plan_axes` makes the mesh's axes of it; docs/parallelism.md has a picture of each.
"""

from __future__ import annotations

from typing import Annotated, Literal

from kenotron.config.section import OURS, Section, key, null_means, upper_case

PP_ENGINES = ("afab", "1f1b", "interleaved_1f1b", "interleaved_zero_bubble", "zbv_zero_bubble", "dualpipev")
V_ENGINES = ("zbv_zero_bubble", "dualpipev")  # a rank holds one stage of the way down and one of the way back up
ZERO_BUBBLE_ENGINES = ("interleaved_zero_bubble", *V_ENGINES)  # backward in two halves, the second to fill gaps
STRATEGIES: dict[str, int | str] = {"ddp": 0, "fsdp_grad_op": 2, "fsdp": 3, "fsdp_hybrid": "hybrid"}


class Parallelism(Section):
    dp: int = key("Data-parallel replicas.", 1, ge=1)
    dp_shard: int | None = key(
        "Ranks among which zero_stage shares things out; other groups of as many hold the same. null: all of dp "
        "(with zero_stage hybrid: those of one machine).",
        None,
        ge=1,
        mark=OURS,
    )
    strategy: str | None = key(
        "zero_stage by Gapetron's names: ddp 0, fsdp_grad_op 2, fsdp 3, fsdp_hybrid hybrid; or the dotted path of a "
        "function of yours that makes the model data-parallel.",
        None,
        mark=OURS,
    )
    cpu_offload: bool = key(
        "Keep sharded weights and optimizer state in host memory and update them there.", False, mark=OURS
    )
    pp: int = key("Pipeline stages.", 1, ge=1)
    tp: int = key("Tensor-parallel shards of every split weight.", 1, ge=1)
    pp_engine: Annotated[
        Literal["afab", "1f1b", "interleaved_1f1b", "interleaved_zero_bubble", "zbv_zero_bubble", "dualpipev"],
        null_means("afab"),
    ] = key(
        "Pipeline schedule: all forward then all backward, one forward one backward, or a schedule with several "
        "stages a rank (at pp 1 all are the same loop).",
        "afab",
    )
    pp_stages_per_rank: int | None = key(
        "Stages that each pipeline rank holds. null: 1 with afab and 1f1b, 2 with the others.", None, ge=1, mark=OURS
    )
    pp_layers: list[int] | None = key(
        "Layers of each pipeline stage, in the order of the model. null: split by cost, embedding and head counted.",
        None,
        mark=OURS,
    )
    tp_mode: Annotated[Literal["ALL_REDUCE", "REDUCE_SCATTER"], upper_case("ALL_REDUCE")] = key(
        "Whether activations between split weights are whole or split along the sequence (at tp 1 the same).",
        "ALL_REDUCE",
    )
    tp_linear_async_communication: Annotated[bool, null_means(False)] = key(
        "Overlap tensor-parallel communication with the matrix product (at tp 1 there is none).", False
    )
    recompute_layer: bool = key(
        "Forget a layer's activations after forward and compute them again in backward: less memory, about a "
        "third more time.",
        False,
    )
    tp_recompute_allgather: bool = key(
        "Gather sequence shards again in backward instead of keeping them (at tp 1 there are none).", True
    )
    expert_parallel_size: int = key("Ranks that share the experts of a layer.", 1, ge=1)
    context_parallel_size: int = key("Ranks that share one sequence.", 1, ge=1)
    context_parallel_method: Literal["ring", "ulysses", "allgather"] = key(
        "How attention sees a sequence that ranks share: keys and values go round, heads are exchanged for tokens, or "
        "keys and values are gathered.",
        "ring",
        mark=OURS,
    )
    timeout_seconds: float = key(
        "A collective that some rank has not joined after this long ends the run, naming those ranks.",
        1800.0,
        gt=0,
        mark=OURS,
    )

    @property
    def world_size(self) -> int:
        """Processes that the layout needs."""
        return self.dp * self.pp * self.tp * self.context_parallel_size

    @property
    def stages_per_rank(self) -> int:
        """Pipeline stages on each rank."""
        return self.pp_stages_per_rank or (1 if self.pp_engine in ("afab", "1f1b") else 2)
