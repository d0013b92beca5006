"""LlaMoE, nanotron's example of a mixture of experts: a Llama whose experts are MLPs without a gate.

Its experts use GELU for any `hidden_act`, and routing weights are the softmax over all experts, not renormalized.
It has no counterpart in transformers.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Literal

from kenotron.config.section import NO_EFFECT, key, our_key
from kenotron.models.families.mixtral import SparseArchitecture, SparseStyle

if TYPE_CHECKING:
    from torch import nn


class LlamoeArchitecture(SparseArchitecture):
    """The keys of nanotron's LlaMoEConfig."""

    experts_key = "moe_num_experts"

    family: Literal["llamoe"] = our_key("The family's name.", "llamoe")
    is_llamoe_config: bool = key("Marks the family; its value changes nothing.", True)
    hidden_act: str = key("Accepted for old files: the experts compute with GELU.", "silu", mark=NO_EFFECT)
    moe_num_experts: int = key("Experts per layer.", 1, ge=1)
    num_experts_per_tok: int = key("Experts per token.", 1, ge=1)
    moe_capacity_factor: float = key(
        "Accepted for old files: moe_expert_capacity_factor drops tokens.", 1.0, mark=NO_EFFECT
    )
    pretraining_tp: int = key("Accepted for old files.", 1, mark=NO_EFFECT)
    router_aux_loss_coef: float = our_key("Weight of the load-balancing loss.", 0.0, ge=0)


class Llamoe(SparseStyle[LlamoeArchitecture]):
    """LlaMoE, with experts in every layer."""

    section = LlamoeArchitecture

    def mixture(self) -> nn.Module:
        """Return a mixture of experts without gates."""
        from kenotron.models.blocks.moe import MixtureOfExperts

        config, routing = self.config, replace(self.routing(), normalize=False)
        shapes = config.hidden_size, config.experts, config.expert_width
        return MixtureOfExperts(*shapes, "gelu_pytorch_tanh", routing, gated=False)
