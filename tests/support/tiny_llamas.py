"""Small random Llamas in both forms, with weights large enough that every part of the maths shows in the logits."""

from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.utils import logging

from kenotron.checkpoint import saving
from kenotron.config import dump, load
from kenotron.kernels.attention import attention
from kenotron.models import Context, build, initialize_model, materialize, named_parameters
from kenotron.models.decoder import Decoder
from kenotron.text.byte_level_bpe import train_byte_level_bpe
from kenotron.text.tokenizer import TextTokenizer

SHAPES = yaml.safe_load("""{vocab_size: 300, hidden_size: 32, intermediate_size: 48, num_hidden_layers: 2,
    num_attention_heads: 4, num_key_value_heads: 2, max_position_embeddings: 64, rope_theta: 500.0,
    eos_token_id: 0}""")
# What a Llama may vary in, in the keys that both sides share.
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {"num_key_value_heads": 4},
    "grouped_query": {},
    "one_key_head": {"num_key_value_heads": 1},
    "tied": {"tie_word_embeddings": True},
    "attention_bias": {"attention_bias": True},
    "gelu": {"hidden_act": "gelu_pytorch_tanh", "rms_norm_eps": 1e-3},
    "linear": {"rope_scaling": {"rope_type": "linear", "factor": 3.0}},
    "dynamic": {"rope_scaling": {"rope_type": "dynamic", "factor": 4.0}, "max_position_embeddings": 16},
    "llama3": {
        "rope_scaling": yaml.safe_load("""{rope_type: llama3, factor: 8.0, low_freq_factor: 1.0, high_freq_factor: 4.0,
            original_max_position_embeddings: 16}""")
    },
    "yarn": {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}},
    "yarn_with_all_its_keys": {
        "rope_scaling": yaml.safe_load("""{rope_type: yarn, factor: 2.0, original_max_position_embeddings: 32,
            beta_fast: 8.0, beta_slow: 0.5, mscale: 0.7, mscale_all_dim: 0.9, truncate: false}""")
    },
}


def hf_llama(seed: int = 0, **changes: Any) -> LlamaForCausalLM:
    """A random model of transformers, fp32, in eval mode."""
    values = SHAPES | changes
    theta, scaling = values.pop("rope_theta"), values.pop("rope_scaling", None) or {"rope_type": "default"}
    logging.set_verbosity_error()
    model = LlamaForCausalLM(LlamaConfig(**values, rope_parameters={"rope_theta": theta, **scaling}))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(1.0 if name.endswith("norm.weight") else 0.0, 0.25, generator=generator)
    return model.eval()


def save_hf(model: LlamaForCausalLM, folder: Path, tokenizer: TextTokenizer | None = None, shard: str = "5GB") -> Path:
    """`save_pretrained`, with a tokenizer's files beside it."""
    logging.disable_progress_bar()
    model.save_pretrained(folder, max_shard_size=shard)
    if tokenizer:
        tokenizer.save(folder)
    return folder


def hf_logits(model: LlamaForCausalLM, tokens: Tensor) -> Tensor:
    """``[sequences, length]`` → ``[sequences, length, vocab]``."""
    with torch.no_grad():
        return model(tokens).logits


def load_hf(folder: Path) -> LlamaForCausalLM:
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    return LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def our_logits(model: torch.nn.Module, tokens: Tensor) -> Tensor:
    """The same of a model of ours, by one forward pass without a cache."""
    sequences, length = tokens.shape
    positions = torch.arange(length).repeat(sequences)
    with torch.no_grad():
        logits = model(tokens.flatten(), Context((sequences, length), positions, attention))
    return logits.view(sequences, length, -1)


def expect_documents_apart(model: torch.nn.Module) -> None:
    """Logits of documents that share two sequences are those of each document by itself."""
    flat, borders = random_tokens(2, 40).flatten(), (0, 7, 40, 41, 80)
    positions = torch.cat([torch.arange(end - begin) for begin, end in pairwise(borders)])
    ctx = Context((2, 40), positions, attention, cu_seqlens=borders)
    with torch.no_grad():
        together = model(flat, ctx)
    alone = [our_logits(model, flat[None, begin:end])[0] for begin, end in pairwise(borders)]
    assert torch.allclose(together, torch.cat(alone), atol=1e-4)


def our_config(root: Path, dtype: str = "float32", **changes: Any) -> dict[str, Any]:
    """A whole config in YAML's keys."""
    return {
        "general": {"project": "test", "run": "test"},
        "model": {"model_config": SHAPES | changes, "init_method": {"std": 0.25}, "dtype": dtype},
        "checkpoints": {"checkpoints_path": str(root), "checkpoint_interval": 10},
        **yaml.safe_load("""
            tokens: {sequence_length: 16, train_steps: 10, micro_batch_size: 1, batch_accumulation_per_replica: 1}
            optimizer: {optimizer_factory: {name: adamW}, zero_stage: 0, weight_decay: 0.0, clip_grad: null,
                accumulate_grad_in_fp32: true, learning_rate_scheduler: {learning_rate: 0.001, lr_warmup_steps: 0,
                lr_warmup_style: linear, lr_decay_style: linear}}
            data_stages: [{name: one, start_training_step: 1, data: {dataset: null}}]"""),
    }


def our_model(root: Path, **changes: Any) -> torch.nn.Module:
    """A random model of ours, fp32; biases too are random."""
    config = load(our_config(root, **changes))
    with torch.device("meta"):
        model = build(config.model)
    materialize(model, "cpu")
    initialize_model(model, std=0.25, scaling="NONE", seed=1)
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for name, parameter in named_parameters(model):
            if name.endswith((".bias", "norm.weight")):
                parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.2)
    return model.eval()


def save_ours(
    model: torch.nn.Module, root: Path, tokenizer: TextTokenizer | None = None, dtype: str = "float32", **changes: Any
) -> Path:
    """Checkpoint 10 of `root`, as the trainer writes it: fp32 tensors whatever the dtype. Returns its folder."""
    config = load(our_config(root, dtype, **changes))
    saved = saving.save(
        root,
        10,
        model={name: parameter.detach() for name, parameter in named_parameters(model)},
        optimizer=None,
        state={"step": 10},
        config_yaml=dump(config),
        model_config=config.model.architecture.model_dump(by_alias=True),
        save_tokenizer=tokenizer.save if tokenizer else None,
    )
    return saved.path


def small_tokenizer() -> TextTokenizer:
    """Byte-level BPE of 300 tokens; its end-of-text token is 0."""
    text = "def main(argument):\n    return the cat that sat on the mat; é 中文 naïve\n"
    return train_byte_level_bpe([text * 3], 300)


def random_tokens(sequences: int, length: int, seed: int = 0) -> Tensor:
    return torch.randint(SHAPES["vocab_size"], (sequences, length), generator=torch.Generator().manual_seed(seed))


def fresh_model(config: dict[str, Any]) -> Decoder:
    """The model of a config in YAML's keys, with initial weights large enough to show."""
    with torch.device("meta"):
        model = build(load(config).model)
    materialize(model, "cpu")
    initialize_model(model, std=0.05, scaling="NUM_LAYERS", seed=1)
    return model
