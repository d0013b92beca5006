"""Small random models of every built-in family, in transformers' form and in ours, with the same weights."""

import atexit
import os
import shutil
from collections.abc import Mapping
from copy import deepcopy
from functools import partial
from pathlib import Path
from tempfile import gettempdir
from typing import Any

import torch
import yaml
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, dynamic_module_utils
from transformers.utils import logging

from kenotron.interop.hf_config import architecture_from_hf
from kenotron.interop.hf_weights import Box, Stored, Weights
from kenotron.interop.tensor_names import by_hf_name, from_hf_names
from kenotron.models import named_parameters
from kenotron.models.decoder import Decoder
from kenotron.models.families.hf.configuration_kenotron_nano import KenotronNanoConfig
from kenotron.models.families.hf.modeling_kenotron_nano import KenotronNanoForCausalLM
from kenotron.models.family import HEAD

# Where transformers copies code that came with weights: of this process alone, not below the home folder.
# It makes the folder when it needs it: ranks of layout tests import this file, too, and end without cleaning up.
REMOTE_CODE = Path(gettempdir()) / f"kenotron-remote-code-{os.getpid()}"
dynamic_module_utils.HF_MODULES_CACHE = str(REMOTE_CODE)
atexit.register(shutil.rmtree, REMOTE_CODE, ignore_errors=True)

SHAPES = yaml.safe_load("""{vocab_size: 300, hidden_size: 32, intermediate_size: 48, num_hidden_layers: 2,
    num_attention_heads: 4, num_key_value_heads: 2, max_position_embeddings: 128, eos_token_id: 0,
    pad_token_id: null, bos_token_id: 1}""")
THETA = {"rope_parameters": {"rope_theta": 500.0, "rope_type": "default"}}
NANO = {"hidden_act": "relu2"}
SMALL_EXPERTS = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 12}
LATENT = yaml.safe_load("""{num_key_value_heads: 4, kv_lora_rank: 10, q_lora_rank: 12, qk_nope_head_dim: 6,
    qk_rope_head_dim: 4, v_head_dim: 7, first_k_dense_replace: 1, n_routed_experts: 8, moe_intermediate_size: 12,
    num_experts_per_tok: 3, n_group: 4, topk_group: 2}""")
YARN = yaml.safe_load("""{rope_type: yarn, rope_theta: 500.0, factor: 4.0, original_max_position_embeddings: 32,
    mscale: 0.7, mscale_all_dim: 1.2}""")
SMALL_HYBRID = {"mamba_num_heads": 8, "mamba_head_dim": 8, "n_groups": 2, "ssm_state_size": 16, "head_dim": 16}
SMALL_HYBRID |= {"moe_intermediate_size": 12, "moe_shared_expert_intermediate_size": 20}
# (model_type, its own keys of config.json)
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {"head_dim": 16}),
    "mamba": ("mamba", {"intermediate_size": 64}),
    "mamba_biased": (
        "mamba",
        yaml.safe_load("""{tie_word_embeddings: false, use_bias: true, use_conv_bias: false, state_size: 5, expand: 3,
            intermediate_size: 96, time_step_rank: 4, conv_kernel: 3, layer_norm_epsilon: 0.01}"""),
    ),
    "mamba2": ("mamba2", {"num_heads": 8, "head_dim": 8, "n_groups": 2, "state_size": 16}),
    "mamba2_of_one_group": (
        "mamba2",  # decoding there forgets time_step_limit: one that is never reached
        yaml.safe_load("""{num_heads: 4, head_dim: 16, n_groups: 1, state_size: 7, use_bias: true,
            tie_word_embeddings: true, time_step_limit: [0.0, 100.0], chunk_size: 4}"""),
    ),
    "mistral": ("mistral", {"sliding_window": 5, "head_dim": 8}),
    "mistral_without_window": ("mistral", {"sliding_window": None, "head_dim": 6}),
    "nemotron_h": (
        "nemotron_h",
        {"num_hidden_layers": 5, "hybrid_override_pattern": "M-M*-", "time_step_min": 1e-5} | SMALL_HYBRID,
    ),
    "nemotron_h_biased": (
        "nemotron_h",  # decoding there forgets time_step_min; heads have more channels than expand * hidden_size
        SMALL_HYBRID
        | yaml.safe_load("""{num_hidden_layers: 4, hybrid_override_pattern: "*M*M", time_step_min: 1.0e-5, head_dim: 6,
            n_groups: 1, mamba_head_dim: 5, ssm_state_size: 7, use_bias: true, use_conv_bias: false, conv_kernel: 3,
            layer_norm_epsilon: 0.01}"""),
    ),
    "nemotron_h_of_feed_forwards": (
        "nemotron_h",
        SMALL_HYBRID
        | yaml.safe_load("""{num_hidden_layers: 2, hybrid_override_pattern: "-*", mlp_bias: true, mlp_hidden_act: gelu,
            head_dim: 8}"""),
    ),
    "nemotron_h_of_experts": (
        "nemotron_h",
        SMALL_HYBRID
        | yaml.safe_load("""{num_hidden_layers: 5, hybrid_override_pattern: ME*E-, time_step_min: 1.0e-5,
            num_experts_per_tok: 3, n_group: 4, topk_group: 2, routed_scaling_factor: 1.5}"""),
    ),
    "olmo2": ("olmo2", {}),
    "olmo2_biased": ("olmo2", {"attention_bias": True, "rms_norm_eps": 1e-3, "head_dim": 6}),
    "qwen3": ("qwen3", {"head_dim": 16}),
    "qwen3_biased": ("qwen3", {"head_dim": 6, "attention_bias": True, "tie_word_embeddings": True}),
    "smollm3": ("smollm3", {"no_rope_layer_interval": 2, "tie_word_embeddings": False}),
    "smollm3_by_list": ("smollm3", {"no_rope_layers": [0, 1], "attention_bias": True}),
    "starcoder2": ("starcoder2", {}),
    "starcoder2_windowed": (
        "starcoder2",
        yaml.safe_load("""{sliding_window: 5, use_bias: false, norm_epsilon: 0.01, num_key_value_heads: 1,
            tie_word_embeddings: false}"""),
    ),
    "gpt_neox": ("gpt_neox", {"num_key_value_heads": 4}),
    "gpt_neox_in_sequence": (
        "gpt_neox",
        yaml.safe_load("""{num_key_value_heads: 4, use_parallel_residual: false, attention_bias: false,
            layer_norm_eps: 0.01, hidden_act: gelu_fast, tie_word_embeddings: true,
            rope_parameters: {rope_theta: 500.0, rope_type: default, partial_rotary_factor: 0.5}}"""),
    ),
    "qwen2": ("qwen2", {"use_sliding_window": False}),
    "mixtral": ("mixtral", {"num_local_experts": 4, "head_dim": 8}),
    "mixtral_with_window": ("mixtral", {"num_local_experts": 3, "sliding_window": 5, "num_experts_per_tok": 1}),
    "olmoe": ("olmoe", {"num_experts": 6, "num_experts_per_tok": 3}),
    "olmoe_normalized": ("olmoe", {"num_experts": 5, "num_experts_per_tok": 2, "norm_topk_prob": True}),
    "qwen2_moe": ("qwen2_moe", SMALL_EXPERTS | {"shared_expert_intermediate_size": 20}),
    "qwen2_moe_mixed": (
        "qwen2_moe",
        SMALL_EXPERTS | {"shared_expert_intermediate_size": 20, "decoder_sparse_step": 2, "norm_topk_prob": True},
    ),
    "qwen3_moe": ("qwen3_moe", SMALL_EXPERTS | {"head_dim": 16, "norm_topk_prob": True}),
    "qwen3_moe_mixed": ("qwen3_moe", SMALL_EXPERTS | {"head_dim": 8, "mlp_only_layers": [0]}),
    "nano": ("kenotron_nano", NANO),
    "nano_tied": ("kenotron_nano", NANO | {"tie_word_embeddings": True, "head_dim": 6, "rms_norm_eps": 1e-2}),
    "nano_with_value_embeddings": (
        "kenotron_nano",
        {"num_hidden_layers": 3, "value_embeddings": True, "final_logit_softcapping": 2.0, "head_dim": 6},
    ),
    "deepseek_v3": ("deepseek_v3", LATENT),
    "deepseek_v3_stretched": (
        "deepseek_v3",
        LATENT
        | {"rope_parameters": YARN}
        | yaml.safe_load("""{q_lora_rank: null, v_head_dim: 12, first_k_dense_replace: 0, n_group: 1, topk_group: 1,
            n_shared_experts: 2, norm_topk_prob: false, routed_scaling_factor: 1.5, rope_interleave: false,
            attention_bias: true, tie_word_embeddings: true}"""),
    ),
    "qwen2_tied": ("qwen2", {"use_sliding_window": False, "tie_word_embeddings": True}),
}


def hf_model(which: str, seed: int = 0, **shapes: Any) -> PreTrainedModel:
    """A random model of transformers, fp32, in eval mode, of other `shapes` if given; biases are random too."""
    kind, keys = FAMILIES[which]
    logging.set_verbosity_error()
    given = deepcopy(SHAPES | THETA | keys | shapes)  # configs write into their arguments
    if kind == "kenotron_nano":
        model: PreTrainedModel = KenotronNanoForCausalLM(KenotronNanoConfig(**given))
    else:
        config = AutoConfig.for_model(kind, **given)
        model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        biases = [each for each in model.named_buffers() if each[0].endswith("e_score_correction_bias")]
        for name, parameter in [*model.named_parameters(), *biases]:
            mean = 1.0 if name.endswith(("norm.weight", "norm_f.weight")) else 0.0
            parameter.normal_(mean, 0.25, generator=generator)
    return model.eval()


def ours_of(theirs: PreTrainedModel) -> Decoder:
    """Our model of the same config and weights."""
    config = {**theirs.config.to_dict(), "architectures": [type(theirs).__name__]}
    model = Decoder(architecture_from_hf(config, "config.json"))
    return filled(model, in_our_names_of(model, theirs.state_dict()))


def in_our_names_of(model: Decoder, theirs: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """Weights or gradients of the same model of transformers, under our names."""
    in_files = {HEAD: model.family.hf_name(HEAD)}  # in memory every head of transformers 5 has the one name
    if model.family.hf_model_type == "nemotron_h":  # whose body has another name there, too
        theirs = {name.replace("model.", "backbone."): tensor for name, tensor in theirs.items()}
    if any(name.endswith("experts.down_proj") for name in theirs):
        return _experts_apart(model, theirs)
    named = {in_files.get(name, name): tensor for name, tensor in theirs.items()}
    stored = {name: Stored(tuple(tensor.shape), partial(_box, tensor)) for name, tensor in named.items()}
    shapes = {name: tuple(parameter.shape) for name, parameter in named_parameters(model)}
    return from_hf_names(Weights(stored, "memory"), model.family, shapes)


def _box(tensor: Tensor, box: Box) -> Tensor:
    return tensor[box] if box else tensor


def filled(model: Decoder, weights: Mapping[str, Tensor]) -> Decoder:
    """`model` with these weights, by name."""
    with torch.no_grad():
        for name, parameter in named_parameters(model):
            parameter.copy_(weights[name])
    return model


def _experts_apart(model: Decoder, tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """Experts are one tensor in memory, and so are their gate and up; files have other names than that."""
    shapes = {name: tuple(parameter.shape) for name, parameter in named_parameters(model)}
    groups = by_hf_name(model.family, {name: shape for name, shape in shapes.items() if ".experts." not in name})
    tensors = dict(tensors)
    for theirs, ours in groups.items():
        if theirs in tensors:
            parts = model.family.hf_split(theirs, tensors[theirs]) if len(ours) > 1 else [tensors[theirs]]
            tensors |= zip(ours, parts)
    found: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if name.endswith(".experts.gate_up_proj"):
            stem = name.removesuffix("gate_up_proj")
            found[f"{stem}gate_proj.weight"], found[f"{stem}up_proj.weight"] = tensor.chunk(2, 1)
        elif name.endswith((".experts.up_proj", ".experts.down_proj")):
            found[f"{name.replace('backbone.', 'model.')}.weight"] = tensor
        else:
            found[name] = tensor
    return found


def save(theirs: PreTrainedModel, folder: Path) -> Path:
    """`save_pretrained`."""
    logging.disable_progress_bar()
    theirs.save_pretrained(folder)
    return folder
