"""Qwen3 with experts (arXiv 2505.09388): a Qwen3 with a mixture of many small experts in place of the MLP."""

from collections.abc import Mapping
from typing import Any, Literal

from kenotron.config.section import key, our_key
from kenotron.models.families.mixtral import SparseStyle
from kenotron.models.families.qwen2_moe import QwenSparseArchitecture
from kenotron.models.families.qwen3 import Qwen3


class Qwen3MoeArchitecture(QwenSparseArchitecture):
    """The Qwen3-MoE family, under Hugging Face's names."""

    family: Literal["qwen3_moe"] = our_key("The family's name.", "qwen3_moe")
    is_qwen3_moe_config: bool = our_key("Marks the family; its value changes nothing.", True)
    attention_bias: bool = key("Biases on the attention projections.", False)
    num_experts_per_tok: int = key("Experts per token.", 8, ge=1)
    num_experts: int = key("Experts per layer.", 128, ge=1)
    moe_intermediate_size: int = key("Width inside an expert.", 768, ge=1)


class Qwen3Moe(SparseStyle[Qwen3MoeArchitecture]):
    """Qwen3-MoE, with norms of queries and keys as in Qwen3, and no shared expert."""

    section = Qwen3MoeArchitecture
    qk_norm = "heads"
    plan = Qwen3.plan
    hf_model_type = "qwen3_moe"
    hf_class = "Qwen3MoeForCausalLM"
    hf_fixed = {"use_sliding_window": False}  # noqa: RUF012

    @classmethod
    def from_hf(cls, values: dict[str, Any], config: Mapping[str, Any]) -> dict[str, Any]:
        """Read the number of experts, which has two names in Hugging Face's files."""
        experts = config.get("num_experts", config.get("num_local_experts", 128))
        return values | {"num_experts": experts}
