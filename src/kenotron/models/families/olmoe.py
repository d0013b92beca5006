"""OLMoE (arXiv 2409.02060): a Llama with many small experts, and norms of queries and keys over all heads."""

from dataclasses import replace
from typing import Literal

from kenotron.config.section import key, our_key
from kenotron.models.families.mixtral import SparseArchitecture, SparseStyle
from kenotron.models.families.olmo2 import Olmo2


class OlmoeArchitecture(SparseArchitecture):
    """The OLMoE family, under Hugging Face's names."""

    family: Literal["olmoe"] = our_key("The family's name.", "olmoe")
    is_olmoe_config: bool = our_key("Marks the family; its value changes nothing.", True)
    attention_bias: bool = key("Biases on the attention projections.", False)
    num_experts: int = key("Experts per layer.", 64, ge=1)
    num_experts_per_tok: int = key("Experts per token.", 8, ge=1)
    norm_topk_prob: bool = key("Divide the weights of a token's experts by their sum.", False)
    router_aux_loss_coef: float = key("Weight of the load-balancing loss.", 0.01, ge=0)


class Olmoe(SparseStyle[OlmoeArchitecture]):
    """OLMoE, where a token's experts are weighted by the softmax over all experts."""

    section = OlmoeArchitecture
    qk_norm = "all"
    plan = replace(Olmo2.plan, sequence=SparseStyle.plan.sequence)  # norms are before the branches
    hf_model_type = "olmoe"
    hf_class = "OlmoeForCausalLM"
    hf_fixed = {"clip_qkv": None}  # noqa: RUF012
