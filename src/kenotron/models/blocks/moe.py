"""Mixture of experts: a router sends every token through k of many small MLPs.

    x ──┬─ router ── softmax or sigmoid ── top k ── experts, weights
        │                                              │
        ├──────────────── experts' MLPs ───────────────┴──(+)── y
        └─ shared expert, where a family has one ──────────┘

The router computes in fp32. Two auxiliary losses, each a mean over the global batch, keep it balanced and bounded:

    balance   coefficient * mean over sequences of  E sum_e f_e P_e      f_e: share of the sequence's slots that chose e
    z         coefficient * mean over tokens of  log(sum_e exp(logit_e))^2                     P_e: e's mean probability

(Switch Transformers, arXiv 2101.03961; per sequence as in DeepSeek-V3, arXiv 2412.19437; z: ST-MoE, arXiv 2202.08906.)
A sequence lies in one micro-batch, so its loss is the same on every layout, and means over sequences add up. The
losses' gradients are added in backward of the experts' weights (`WithLoss`), so the losses need not go through the
pipeline.

f_e may be the share in the whole global batch instead, which lets experts specialize (arXiv 2501.11873). That share is
complete only after the last micro-batch, so the loss uses the share of the previous step, `previous_load`, and the
first step has no balance loss.

No token is dropped, unless training has a capacity: of a sequence's slots, each expert computes
``ceil(capacity * tokens * k / E)``, those of the largest weights (`within_capacity`).
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from kenotron.kernels.experts import expert_mlp
from kenotron.kernels.products import linear
from kenotron.models.blocks.head import WithLoss
from kenotron.models.blocks.pre_norm import PreNormBlock
from kenotron.models.context import Context


@dataclass(frozen=True)
class Routing:
    """How tokens choose experts. `scores` are the softmax of the logits over all experts, or the sigmoid of each.

    A token has `top_k` experts; with `normalize` their weights are divided by their sum, and then multiplied by
    `scale`. `balance`, `z`: coefficients of the two losses. Experts form `groups` of adjacent ones, and a token chooses
    among the `top_groups` with the largest sums of their two best scores. `biased`: experts are chosen by score plus a
    bias, but weighted by the score. `bias_rate`: the amount that a training step adds to the biases of experts with
    less than the mean load, and subtracts from the others (`training.expert_loads`). `over_global_batch`: the balance
    loss uses the loads of the previous step's global batch instead of the sequence's. `capacity`: the slots of a
    sequence that an expert computes in training, as a multiple of an even share; None: all.
    """

    top_k: int
    normalize: bool = False
    scores: Literal["softmax", "sigmoid"] = "softmax"
    scale: float = 1.0
    balance: float = 0.0
    z: float = 0.0
    groups: int = 1
    top_groups: int = 1
    biased: bool = False
    bias_rate: float = 0.0
    over_global_batch: bool = False
    capacity: float | None = None


class Router(nn.Module):
    """Maps x ``[tokens, hidden]`` to (experts ``[tokens, k]`` int64, weights ``[tokens, k]`` fp32, logits, scores).

    Logits and scores are ``[tokens, experts]`` fp32. The bias is a buffer, not a parameter: no gradient reaches it.
    """

    def __init__(self, hidden_size: int, experts: int, routing: Routing) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(experts, hidden_size))
        self.e_score_correction_bias = nn.Parameter(torch.empty(experts), False) if routing.biased else None
        self.routing = routing

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Compute in fp32 for any dtype of x: in bf16, rounding would decide near ties.

        The router's weights are rounded to x's dtype, as ZeRO gathers them, so that all layouts choose the same
        experts.
        """
        logits = linear(x.float(), self.weight.to(x.dtype).float())
        scores = logits.softmax(-1) if self.routing.scores == "softmax" else logits.sigmoid()
        experts = self._choose(scores.detach())
        weights = scores.gather(-1, experts)
        if self.routing.normalize:
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)  # sigmoids may all be 0
        return experts, weights * self.routing.scale, logits, scores

    def _choose(self, scores: Tensor) -> Tensor:
        """Return each token's experts ``[tokens, k]``."""
        routing, bias = self.routing, self.e_score_correction_bias
        choice = scores if bias is None else scores + bias
        if routing.top_groups < routing.groups:
            groups = choice.unflatten(-1, (routing.groups, -1))
            best = groups.topk(2, dim=-1)[0].sum(-1).topk(routing.top_groups, dim=-1)[1]
            others = torch.ones_like(groups[..., 0], dtype=torch.bool).scatter(-1, best, False)
            choice = groups.masked_fill(others[..., None], -torch.inf).flatten(-2)
        return choice.topk(routing.top_k, dim=-1)[1]


class ExpertLinear(nn.Module):
    """One matrix per expert, ``[experts, out_features, in_features]``; `kernels.experts` multiplies them."""

    def __init__(self, experts: int, in_features: int, out_features: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(experts, out_features, in_features))


class Experts(nn.Module):
    """The MLPs of all experts, `gated` or not. Hugging Face's names also contain the expert's number."""

    def __init__(self, experts: int, hidden_size: int, width: int, activation: str, gated: bool = True) -> None:
        super().__init__()
        self.activation = activation
        self.gate_proj = ExpertLinear(experts, hidden_size, width) if gated else None
        self.up_proj = ExpertLinear(experts, hidden_size, width)
        self.down_proj = ExpertLinear(experts, width, hidden_size)

    def forward(self, x: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
        """Return the output for x ``[tokens, hidden]``; experts and weights ``[tokens, k]`` come from `Router`."""
        gate = None if self.gate_proj is None else self.gate_proj.weight.to(x.dtype)
        up, down = self.up_proj.weight.to(x.dtype), self.down_proj.weight.to(x.dtype)
        return expert_mlp(x, experts, weights, gate, up, down, self.activation)


class MixtureOfExperts(nn.Module):
    """A mixture of experts of x ``[tokens, hidden]``, with a result of the same shape.

    `shared`: an expert that sees every token; `shared_gate`: a linear to one number, whose sigmoid weights it. Experts
    that are not `gated` are ``down(act(up(x)))``.
    """

    expert_load: Tensor
    router_totals: Tensor
    previous_load: Tensor

    def __init__(
        self,
        hidden_size: int,
        experts: int,
        width: int,
        activation: str,
        routing: Routing,
        shared: nn.Module | None = None,
        shared_gate: nn.Module | None = None,
        gated: bool = True,
    ) -> None:
        super().__init__()
        self.routing = routing
        # Tensor parallelism sets its communication before and after the layer, and the number of ranks that route the
        # same tokens, each of which adds an equal share of the losses' gradients.
        self.enter: Callable[[Tensor, bool], Tensor] | None = None
        self.leave: Callable[[Tensor, bool], Tensor] | None = None
        self.equal_ranks = 1
        self.gate = Router(hidden_size, experts, routing)
        self.experts = Experts(experts, hidden_size, width, activation, gated)
        self.shared_expert, self.shared_expert_gate = shared, shared_gate
        # Totals of this training step: slots of each expert, and (balance loss, z-loss, dropped slots); and the slots
        # of each expert in the previous global batch, which `training.expert_loads` writes.
        self.register_buffer("expert_load", torch.zeros(experts), persistent=False)
        self.register_buffer("router_totals", torch.zeros(3), persistent=False)
        self.register_buffer("previous_load", torch.zeros(experts), persistent=False)

    def forward(self, x: Tensor, ctx: Context) -> Tensor:
        """Return the output; training adds the router's losses in backward and drops slots beyond the capacity."""
        x = x if self.enter is None else self.enter(x, self.training)
        experts, weights, logits, scores = self.gate(x)
        if self.training:
            experts, weights = self._in_training(experts, weights, logits, scores, ctx)
        y = self.experts(x, experts, weights)
        if self.shared_expert is not None:
            shared = self.shared_expert(x)
            y = y + (shared if self.shared_expert_gate is None else shared * self.shared_expert_gate(x).sigmoid())
        return y if self.leave is None else self.leave(y, self.training)

    def _in_training(
        self, experts: Tensor, weights: Tensor, logits: Tensor, scores: Tensor, ctx: Context
    ) -> tuple[Tensor, Tensor]:
        """Return `experts` and `weights`, whose backward pass adds the gradients of both losses.

        For a dropped slot they are the number of experts and 0.
        """
        routing, count = self.routing, logits.shape[-1]
        chosen = slots_by_sequence(experts, count, ctx)
        losses = router_losses(chosen, logits, scores, routing, ctx, self.previous_load)
        capacity = routing.capacity
        kept = None if capacity is None else within_capacity(experts, weights.detach(), chosen, capacity)
        seen = chosen.sum(0), torch.cat((losses.detach(), losses.new_zeros(1) if kept is None else (~kept).sum()[None]))
        for total, here in zip((self.expert_load, self.router_totals), seen):
            total += here if ctx.counted is None else here * ctx.counted
        if losses.requires_grad:
            weights = WithLoss.apply(weights, losses.sum() / self.equal_ranks)
        return (experts, weights) if kept is None else (experts.where(kept, count), weights * kept)

    def flops_per_token(self, sequence_length: int, causal: bool) -> float:
        """Return the FLOPs of a token's experts and of the router; the shared expert's modules count themselves."""
        of_an_expert = sum(matrix[0].numel() for matrix in self.experts.parameters())
        return 2.0 * (of_an_expert * self.routing.top_k + self.gate.weight.numel())


def slots_by_sequence(experts: Tensor, count: int, ctx: Context) -> Tensor:
    """Return how often this rank's tokens chose each of `count` experts, ``[sequences, count]`` fp32."""
    by_sequence = experts.view(ctx.shape[0], -1)
    chosen = torch.zeros(ctx.shape[0], count, device=experts.device)
    return chosen.scatter_add_(1, by_sequence, torch.ones((), device=experts.device).expand_as(by_sequence))


def within_capacity(experts: Tensor, weights: Tensor, chosen: Tensor, capacity: float) -> Tensor:
    """Return which slots of whole sequences are computed, ``[tokens, k]`` bool.

    experts, weights ``[tokens, k]``; `chosen` is the result of `slots_by_sequence`. An expert drops the slots of a
    sequence with the smallest weights, among equal weights those of later tokens. The rule depends only on the
    sequence, so it is the same on every layout.
    """
    flat = experts.view(chosen.shape[0], -1)
    most = math.ceil(capacity * flat.shape[1] / chosen.shape[1])
    order = weights.view_as(flat).argsort(dim=1, descending=True, stable=True)
    order = order.gather(1, flat.gather(1, order).argsort(dim=1, stable=True))  # by expert, and then by weight
    counts = chosen.long()  # integers: on a GPU, the order of a sum of floats varies
    before = (counts.cumsum(1) - counts).gather(1, flat.gather(1, order))  # slots of the preceding experts
    place = torch.arange(flat.shape[1], device=flat.device) - before
    return torch.empty_like(flat, dtype=torch.bool).scatter_(1, order, place < most).view_as(experts)


def router_losses(
    chosen: Tensor, logits: Tensor, scores: Tensor, routing: Routing, ctx: Context, previous: Tensor
) -> Tensor:
    """Return (balance, z) ``[2]`` fp32: these tokens' terms of the means over the global batch, times coefficients.

    `chosen` is the result of `slots_by_sequence`; logits and scores ``[tokens, experts]``. If ranks share a sequence
    (cp), its slots are summed over them. `previous`: slots of each expert in the previous step's global batch.
    """
    count = logits.shape[-1]
    everywhere = chosen if ctx.sum_over_sequence is None else ctx.sum_over_sequence(chosen.clone())
    tokens = everywhere[0].sum() / routing.top_k  # of a sequence
    probabilities = scores if routing.scores == "softmax" else scores / (scores.sum(-1, keepdim=True) + 1e-20)
    means = probabilities.view(*ctx.shape, count).sum(1) / tokens
    slots = previous[None] if routing.over_global_batch else everywhere
    balance = count * (slots / slots.sum(1, keepdim=True).clamp(min=1) * means).sum()
    z = logits.logsumexp(-1).square().sum() / tokens
    return torch.stack((routing.balance * balance, routing.z * z)) * ctx.sequence_scale


class MoEBlock(PreNormBlock):
    """A `PreNormBlock` whose `mlp` is a `MixtureOfExperts`, which reads the context."""

    def forward(self, x: Tensor, rope: tuple[Tensor, Tensor], ctx: Context) -> Tensor:
        """Return the next hidden states; rope is (cos, sin), each ``[sequences, length, head_dim / 2]``."""
        x = x + self.self_attn(self.input_layernorm(x), rope, ctx)
        return x + self.mlp(self.post_attention_layernorm(x), ctx)
