"""Mixtral (Jiang et al. 2024, arXiv 2401.04088): a Mistral whose MLP is a mixture of experts in every layer.

This file also has the keys, the plan and the block that all sparse families share.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar, Literal, TypeVar

from kenotron.config.decoder import DecoderArchitecture, Problem
from kenotron.config.section import key, our_key
from kenotron.models.families.llama import LlamaStyle, LlamaStyleArchitecture
from kenotron.models.init_rules import Constant, InitRule, Normal

if TYPE_CHECKING:
    from torch import nn

    from kenotron.models.blocks.moe import Routing


class MixtureArchitecture(DecoderArchitecture):
    """A decoder with a mixture of experts in some layers."""

    num_experts_per_tok: int = key("Experts per token.", 2, ge=1)
    router_aux_loss_coef: float = key("Weight of the load-balancing loss.", 0.001, ge=0)
    router_aux_loss_scope: Literal["sequence", "global_batch"] = our_key(
        "What the load-balancing loss counts loads over: each sequence, or the whole global batch (of the previous "
        "step).",
        "sequence",
    )
    router_z_loss_coef: float = our_key("Weight of the router's z-loss, a mean over tokens.", 0.0, ge=0)
    moe_expert_capacity_factor: float | None = our_key(
        "Most tokens of a sequence that an expert computes in training, as a multiple of tokens * "
        "num_experts_per_tok / experts; null: no limit, no token is dropped.",
        None,
        gt=0,
    )

    def shape_problems(self) -> Iterator[Problem]:
        """Yield a problem if a token should go through more experts than there are."""
        yield from super().shape_problems()
        if 0 < self.experts < self.num_experts_per_tok:
            found = self.num_experts_per_tok
            yield "num_experts_per_tok", f"expected at most the {self.experts} experts, found {found}"

    def cp_problems(self, cp: int, tp: int, method: str, lengths: Mapping[str, int]) -> Iterator[str]:
        """Yield a problem for a capacity, which is counted over whole sequences."""
        yield from super().cp_problems(cp, tp, method, lengths)
        if self.moe_expert_capacity_factor is not None:
            yield f"expected 1 with moe_expert_capacity_factor, which drops tokens by whole sequences; found {cp}"

    def routing(self) -> Routing:
        """Return how tokens choose experts."""
        from kenotron.models.blocks.moe import Routing

        return Routing(
            self.num_experts_per_tok,
            normalize=getattr(self, "norm_topk_prob", True),
            balance=self.router_aux_loss_coef,
            z=self.router_z_loss_coef,
            over_global_batch=self.router_aux_loss_scope == "global_batch",
            capacity=self.moe_expert_capacity_factor,
        )


class BiasedMixtureArchitecture(MixtureArchitecture):
    """A mixture whose router has sigmoid scores, groups, and biases that balance the loads."""

    n_group: int = key("Groups that the experts are divided into.", 1, ge=1)
    topk_group: int = key("Groups that a token's experts are chosen from.", 1, ge=1)
    norm_topk_prob: bool = key("Divide the weights of a token's experts by their sum.", True)
    routed_scaling_factor: float = key("Factor on the weights of a token's experts.", 1.0, gt=0)
    router_bias_update_rate: float = our_key(
        "What each step adds to the bias of an expert below the mean load, and subtracts from one above it; 0: "
        "nothing.",
        0.001,
        ge=0,
    )

    def shape_problems(self) -> Iterator[Problem]:
        """Yield a problem unless groups are equal, and have enough experts for a token."""
        yield from super().shape_problems()
        experts, groups = self.experts, self.n_group
        if experts % groups:
            yield "n_group", f"expected a divisor of n_routed_experts {experts}, found {groups}"
        elif self.topk_group > groups:
            yield "topk_group", f"expected at most n_group {groups}, found {self.topk_group}"
        elif self.topk_group < groups and experts == groups:
            yield "n_group", f"expected at least two experts per group, found {groups} groups of {experts}"
        elif self.topk_group < groups and 0 < (most := self.topk_group * experts // groups) < self.num_experts_per_tok:
            expected = f"expected at most the {most} experts of topk_group {self.topk_group} groups"
            yield "num_experts_per_tok", f"{expected}, found {self.num_experts_per_tok}"

    def routing(self) -> Routing:
        """Return the routing with sigmoid scores, groups and biases."""
        return replace(
            super().routing(),
            scores="sigmoid",
            scale=self.routed_scaling_factor,
            groups=self.n_group,
            top_groups=self.topk_group,
            biased=True,
            bias_rate=self.router_bias_update_rate,
        )


class SparseArchitecture(MixtureArchitecture, LlamaStyleArchitecture):
    """A Llama-style decoder with experts in some layers; `experts_key` is its key for their number."""

    experts_key: ClassVar[str] = "num_experts"

    @property
    def experts(self) -> int:
        """The number of experts per layer."""
        return getattr(self, self.experts_key)

    @property
    def expert_width(self) -> int:
        """The inner width of an expert."""
        return getattr(self, "moe_intermediate_size", self.intermediate_size)

    @property
    def sparse_layers(self) -> tuple[int, ...]:
        """Return the layers with experts; the others have a plain gated MLP."""
        return tuple(range(self.num_hidden_layers))

    def shape_problems(self) -> Iterator[Problem]:
        """Yield a problem if there are no experts."""
        yield from super().shape_problems()
        if not self.sparse_layers:
            yield "num_hidden_layers", "expected a layer with experts, found none; without them the family is dense"


S = TypeVar("S", bound=LlamaStyleArchitecture)


class SparseStyle(LlamaStyle[S]):
    """Llama-style blocks, sparse or dense layer by layer."""

    def __init__(self, config: S) -> None:
        super().__init__(config)
        sparse, plan = config.sparse_layers, self.plan
        self.plan = replace(plan, experts=tuple(f"model.layers.{layer}.mlp" for layer in sparse))
        if len(sparse) == config.next_token_layers.stop:  # no layer has a plain MLP
            self.plan = replace(
                self.plan,
                column=tuple(name for name in plan.column if ".mlp." not in name),
                row=tuple(name for name in plan.row if ".mlp." not in name),
            )

    def routing(self) -> Routing:
        """Return how tokens choose experts."""
        assert isinstance(self.config, SparseArchitecture)
        return self.config.routing()

    def shared_expert(self) -> tuple[nn.Module | None, nn.Module | None]:
        """Return (the shared expert, the linear whose sigmoid weights it), each None if the family has none."""
        return None, None

    def gated_expert(self, width: int) -> tuple[nn.Module, nn.Module]:
        """Return a shared expert of inner width `width`, and the linear that weights it."""
        from kenotron.models.blocks.linear import Linear

        return self.gated_mlp(width), Linear(self.config.hidden_size, 1)

    def block(self, layer: int) -> nn.Module:
        """Return the module of layer `layer`."""
        from kenotron.models.blocks.moe import MoEBlock

        if layer not in self.config.sparse_layers:
            return super().block(layer)
        return MoEBlock(self.final_norm(), self.attention(layer), self.final_norm(), self.mixture())

    def mixture(self) -> nn.Module:
        """Return the experts of a layer with their router."""
        from kenotron.models.blocks.moe import MixtureOfExperts

        config = self.config
        shapes = config.hidden_size, config.experts, config.expert_width
        return MixtureOfExperts(*shapes, config.hidden_act, self.routing(), *self.shared_expert())

    def init_rules(self, std: float, scaling: str) -> list[InitRule]:
        """Return rules that damp the experts' projections into the residual stream; router biases start at 0."""
        rows = self.damped(scaling, ("model.layers.*.*down_proj",), lambda by: Normal(std / by))
        return [InitRule("*.e_score_correction_bias", Constant(0.0)), *rows, *super().init_rules(std, scaling)]


class MixtralArchitecture(SparseArchitecture):
    """The Mixtral family, under Hugging Face's names."""

    experts_key = "num_local_experts"

    family: Literal["mixtral"] = our_key("The family's name.", "mixtral")
    is_mixtral_config: bool = our_key("Marks the family; its value changes nothing.", True)
    num_local_experts: int = key("Experts per layer.", 8, ge=1)
    sliding_window: int | None = our_key(
        "Tokens that a token attends to, itself included; null: all before it.", None, ge=1
    )


class Mixtral(SparseStyle[MixtralArchitecture]):
    """Mixtral, where the weights of a token's experts are divided by their sum."""

    section = MixtralArchitecture
    hf_model_type = "mixtral"
    hf_class = "MixtralForCausalLM"
    hf_names = {  # noqa: RUF012
        ".mlp.": ".block_sparse_moe.",
        ".gate_proj.": ".w1.",
        ".up_proj.": ".w3.",
        ".down_proj.": ".w2.",
    }
