"""Runs of seconds on a chosen device: small models whose shapes suit a GPU's kernels, on tokens that can be learnt.

config = train_on(torch.device("cuda"), folder, "model.dtype=bfloat16", documents=True)
losses(config)            # [4.16, 4.11, …]
"""

import os
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import yaml

import kenotron as kn
from kenotron.config import Config
from support.tiny_run import tiny_dict, train_quietly
from support.written_tokens import write_ds

STEPS, LENGTH = 15, 64
LLAMA = yaml.safe_load("""{hidden_size: 64, intermediate_size: 96, num_hidden_layers: 2, num_attention_heads: 4,
    num_key_value_heads: 2, vocab_size: 64, max_position_embeddings: 512}""")
# Tests that compare devices want models in whose loss every part shows; the shapes are those kernels ask for.
MODELS: dict[str, dict[str, Any]] = {
    "llama": LLAMA,
    "mixtral": LLAMA | {"is_mixtral_config": True, "num_local_experts": 4, "num_experts_per_tok": 2},
    "mamba2": yaml.safe_load("""{is_mamba2_config: true, hidden_size: 64, num_hidden_layers: 2, num_heads: 8,
        head_dim: 16, state_size: 16, n_groups: 1, vocab_size: 64}"""),
}


def device_config(folder: Path, *overrides: str, model: str = "llama", documents: bool = False) -> Config:
    """`STEPS` steps in fp32 on sequences of `LENGTH`; with `documents`, short ones packed into them and masked."""
    plain = tiny_dict(folder)
    plain["model"]["model_config"] = MODELS[model]
    plain["model"]["document_masking"] = documents
    plain["tokens"] |= {"sequence_length": LENGTH, "train_steps": STEPS}
    plain["optimizer"]["learning_rate_scheduler"]["learning_rate"] = 0.003
    tokens = folder / "tokens" / "0.ds"
    if not tokens.exists():
        write_ds(tokens, [[(i * 7 + j) % 60 for j in range(1 + i * 11 % 37)] for i in range(600)])
    plain["data_stages"][0]["data"]["dataset"] = {"tokens": str(tokens.parent), "packing": "best_fit"}
    return kn.load(plain, overrides)


def train_on(
    device: torch.device, folder: Path, *overrides: str, model: str = "llama", documents: bool = False
) -> Config:
    """Train that config, which is returned; a run that `folder` has already goes on."""
    config = device_config(folder, *overrides, model=model, documents=documents)
    with patch.dict(os.environ, KENOTRON_DEVICE="cpu" if device.type == "cpu" else ""):
        run = train_quietly(config)
    assert run.device.type == device.type
    return config
