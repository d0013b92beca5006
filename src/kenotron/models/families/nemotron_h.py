"""Nemotron-H (NVIDIA 2025, arXiv 2504.03624): Mamba-2, some attention, and feed-forwards as separate layers.

    M   x ─ norm ─ Mamba-2 ──────(+)─ x
    *   x ─ norm ─ attention ────(+)─ x      no RoPE: the recurrence already encodes the order
    -   x ─ norm ─ feed-forward ─(+)─ x      relu(up x)^2
    E   x ─ norm ─ mixture ──────(+)─ x      of such feed-forwards, routed as in DeepSeek-V3, plus a shared one

With context parallelism (ulysses), attention and recurrence both read contiguous chunks of sequences.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

from kenotron.config.decoder import AttentionArchitecture, Problem
from kenotron.config.section import EXPORT, key, our_key
from kenotron.models.families.mamba2 import MIXER, Mamba2Style, Mamba2StyleArchitecture
from kenotron.models.families.mixtral import BiasedMixtureArchitecture
from kenotron.models.init_rules import Constant, InitRule, Normal
from kenotron.models.plan import Plan

if TYPE_CHECKING:
    from torch import nn

KINDS = {"M": "linear_attention", "*": "full_attention", "-": "mlp", "E": "moe"}  # letter → transformers' name
OLD_NAMES = {"mamba": "M", "attention": "*"}
PARTS = ("column", "kv", "channels", "row")
SPLIT = {  # kind of layer → the modules that tensor parallelism splits
    "M": Mamba2Style.plan,
    "*": Plan(
        blocks="model.layers.*",
        column=tuple(f"{MIXER}.{part}_proj" for part in "qkv"),
        kv=tuple(f"{MIXER}.{part}_proj" for part in "kv"),
        row=(f"{MIXER}.o_proj",),
    ),
    "-": Plan(blocks="model.layers.*", column=(f"{MIXER}.up_proj",), row=(f"{MIXER}.down_proj",)),
    "E": Plan(blocks="model.layers.*"),
}
PUBLISHED = "M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-"  # the model of 8 billion parameters


class NemotronHArchitecture(BiasedMixtureArchitecture, AttentionArchitecture, Mamba2StyleArchitecture):
    """The Nemotron-H family, under Hugging Face's names."""

    head_keys = ("mamba_num_heads", "ssm_state_size")
    shape_keys = (
        *AttentionArchitecture.shape_keys,
        *("hybrid_override_pattern", "inner_size", "mamba_num_heads", "ssm_state_size", "n_groups", "conv_kernel"),
    )

    family: Literal["nemotron_h"] = our_key("The family's name.", "nemotron_h")
    is_nemotron_h_config: bool = our_key("Marks the family; its value changes nothing.", True)
    hybrid_override_pattern: str = our_key(
        "A letter per layer: M Mamba-2, * attention, - feed-forward, E experts.", PUBLISHED, min_length=1
    )
    num_hidden_layers: int = key("Layers: letters of hybrid_override_pattern.", len(PUBLISHED), ge=1)
    hidden_act: str = key("Activation of the feed-forward (mlp_hidden_act).", "relu2")  # type: ignore[assignment]
    tie_word_embeddings: Literal[False] = key("transformers has no tied head in this family.", False)
    mlp_bias: bool = our_key("Biases in the feed-forward.", False)
    n_routed_experts: int = key("Experts in each layer with experts.", 8, ge=1)
    moe_intermediate_size: int = key("Width inside an expert.", 7688, ge=1)
    moe_shared_expert_intermediate_size: int = our_key("Width inside the shared expert.", 7688, ge=1)
    free_head_dim: int | None = key(
        "Channels of an attention head; null: hidden_size / num_attention_heads.", None, ge=1, alias="head_dim"
    )
    mamba_num_heads: int = our_key("Heads of a Mamba-2 layer.", 128, ge=1)
    mamba_head_dim: int = our_key("Channels of a Mamba-2 head.", 64, ge=1)
    ssm_state_size: int = our_key("State size of a channel.", 128, ge=1)
    time_step_min: float = our_key("Minimum time step, initially and later (as in transformers).", 1e-3, gt=0)
    residual_in_fp32: bool = key("Hidden states between layers in fp32, whatever model.dtype is.", False)
    expand: int = key("Written to the export; the heads determine the width of a Mamba-2 layer.", 2, ge=1, mark=EXPORT)

    @property
    def experts(self) -> int:
        """The number of experts in a layer with experts."""
        return self.n_routed_experts if "E" in self.hybrid_override_pattern else 0

    @property
    def head_dim(self) -> int:
        """The number of channels of an attention head, with the default filled in."""
        return self.free_head_dim or super().head_dim

    @property
    def limit(self) -> tuple[float, float]:
        """The lower bound of time steps is `time_step_min`; like transformers, ignore time_step_limit."""
        return self.time_step_min, math.inf

    @property
    def inner_size(self) -> int:
        """The number of channels inside a Mamba-2 layer."""
        return self.mamba_num_heads * self.mamba_head_dim

    def head_dim_problems(self) -> Iterator[Problem]:
        """Yield a problem unless `head_dim` is set or follows from the widths."""
        if self.free_head_dim is None:
            yield from super().head_dim_problems()

    def shape_problems(self) -> Iterator[Problem]:
        """Yield a problem if the pattern does not describe the layers, or heads do not fit."""
        yield from super().shape_problems()
        yield from Mamba2StyleArchitecture.shape_problems(self)
        pattern, layers = self.hybrid_override_pattern, self.num_hidden_layers
        if unknown := sorted(set(pattern) - set(KINDS)):
            expected = f"expected letters among {', '.join(KINDS)}"
            yield "hybrid_override_pattern", f"{expected}, found {unknown[0]!r} in {pattern!r}"
        elif len(pattern) != layers:
            expected = f"expected a letter for each of num_hidden_layers {layers}"
            yield "hybrid_override_pattern", f"{expected}, found {len(pattern)} in {pattern!r}"
        if self.experts and self.mlp_bias:
            yield "mlp_bias", "expected false with layers of experts, whose feed-forwards have no biases here"

    def tp_problems(self, tp: int) -> Iterator[str]:
        """Yield a problem unless tp divides the heads of both kinds, groups, and inner widths of experts."""
        yield from super().tp_problems(tp)
        yield from Mamba2StyleArchitecture.tp_problems(self, tp)
        for name in ("moe_intermediate_size", "moe_shared_expert_intermediate_size") if self.experts else ():
            if getattr(self, name) % tp:
                yield f"expected a divisor of {name} {getattr(self, name)}, found {tp}"

    def cp_problems(self, cp: int, tp: int, method: str, lengths: Mapping[str, int]) -> Iterator[str]:
        """Yield a problem for methods other than ulysses, which alone keeps contiguous chunks for the states."""
        if method == "ulysses":
            yield from super().cp_problems(cp, tp, method, lengths)
        else:
            yield f"expected context_parallel_method ulysses with {self.family}, found {method}"


class NemotronH(Mamba2Style[NemotronHArchitecture]):
    """Nemotron-H, where every layer is one residual branch."""

    section = NemotronHArchitecture
    hf_model_type = "nemotron_h"
    hf_class = "NemotronHForCausalLM"
    hf_fixed = {  # noqa: RUF012
        "attention_bias": False,
        "mamba_hidden_act": "silu",
        "moe_latent_size": None,
        "num_nextn_predict_layers": 0,
        "sliding_window": None,
    }
    hf_names = Mamba2Style.hf_names | {".shared_expert.": ".shared_experts."}
    hf_fp32 = ("e_score_correction_bias",)

    def __init__(self, config: NemotronHArchitecture) -> None:
        super().__init__(config)
        pattern = config.hybrid_override_pattern
        plans = [SPLIT[kind] for kind in sorted(set(pattern))]
        split: dict[str, Any] = {part: tuple(name for plan in plans for name in getattr(plan, part)) for part in PARTS}
        experts = tuple(f"model.layers.{n}.mixer" for n, kind in enumerate(pattern) if kind == "E")
        self.plan = replace(self.plan, **split, experts=experts)

    def block(self, layer: int) -> nn.Module:
        """Return the module of layer `layer`, of the kind in the pattern."""
        from kenotron.models.blocks.attention import Attention
        from kenotron.models.blocks.mlp import MLP

        config, kind = self.config, self.config.hybrid_override_pattern[layer]
        if kind == "*":
            heads = (config.num_attention_heads, config.kv_heads, config.head_dim)
            return self.mixer_block(Attention(config.hidden_size, *heads, rotary=False), ("positions", "ctx"))
        if kind == "-":
            mlp = MLP(config.hidden_size, config.intermediate_size, config.hidden_act, config.mlp_bias)
            return self.mixer_block(mlp, ())
        if kind == "E":
            return self.mixer_block(self.mixture())
        return super().block(layer)

    def mixture(self) -> nn.Module:
        """Return a layer's experts without gates, with the shared expert and the router."""
        from kenotron.models.blocks.mlp import MLP
        from kenotron.models.blocks.moe import MixtureOfExperts

        config = self.config
        shared = MLP(config.hidden_size, config.moe_shared_expert_intermediate_size, config.hidden_act, bias=False)
        shapes = config.hidden_size, config.experts, config.moe_intermediate_size
        return MixtureOfExperts(*shapes, config.hidden_act, config.routing(), shared, gated=False)

    def init_rules(self, std: float, scaling: str) -> list[InitRule]:
        """Return Mamba's rules, with all other projections into the residual stream damped by depth as well."""
        names = "model.layers.*.*o_proj", "model.layers.*.*down_proj"
        rows = self.damped(scaling, names, lambda by: Normal(std / by))
        return [InitRule("*.e_score_correction_bias", Constant(0.0)), *rows, *super().init_rules(std, scaling)]

    @classmethod
    def from_hf(cls, values: dict[str, Any], config: Mapping[str, Any]) -> dict[str, Any]:
        """Read the pattern, a list of names or in older files a string, whose length is the number of layers."""
        letters = {name: letter for letter, name in KINDS.items()} | OLD_NAMES
        names = config.get("layers_block_type") or config.get("layer_types") or []
        pattern = config.get("hybrid_override_pattern") or "".join(letters.get(name, "?") for name in names)
        values |= {"hybrid_override_pattern": pattern, "num_hidden_layers": len(pattern)}
        values |= {"head_dim": config.get("head_dim") or 128}  # independent of the widths
        return values | {"hidden_act": config.get("mlp_hidden_act", "relu2")}

    def to_hf(self, values: dict[str, Any]) -> dict[str, Any]:
        """Return values for config.json, the inverse of `from_hf`."""
        activation = values.pop("hidden_act")
        return values | {"mlp_hidden_act": activation, "head_dim": self.config.head_dim}
