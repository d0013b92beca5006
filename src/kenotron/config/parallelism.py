"""`parallelism`: how many ways each axis splits the run. The layout never changes what a run means.

Degrees above 1 are refused for now, by `unsupported.py`.
"""

from __future__ import annotations

from typing import Annotated, Literal

from kenotron.config.section import Section, key, null_means, upper_case


class Parallelism(Section):
    dp: int = key("Data-parallel replicas.", 1, ge=1)
    pp: int = key("Pipeline stages.", 1, ge=1)
    tp: int = key("Tensor-parallel shards of every split weight.", 1, ge=1)
    pp_engine: Annotated[Literal["afab", "1f1b"], null_means("afab")] = key(
        "Pipeline schedule: all forward then all backward, or one forward one backward (at pp 1 both are the "
        "same loop).",
        "afab",
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

    @property
    def world_size(self) -> int:
        """Processes that the layout needs."""
        return self.dp * self.pp * self.tp * self.context_parallel_size
