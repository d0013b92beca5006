"""A small valid config as plain data, and files made from it."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml


@pytest.fixture
def minimal() -> dict[str, Any]:
    """The required keys and little more."""
    return yaml.safe_load("""
        general: {project: debug}
        model:
          model_config: {hidden_size: 16, intermediate_size: 64, num_hidden_layers: 2, num_attention_heads: 4,
            vocab_size: 256}
          init_method: {std: 0.025}
        checkpoints: {checkpoints_path: checkpoints, checkpoint_interval: 10}
        tokens: {sequence_length: 256, train_steps: 15, micro_batch_size: 2, batch_accumulation_per_replica: 1}
        optimizer: {optimizer_factory: {name: adamW}, zero_stage: 0, weight_decay: 0.01, clip_grad: 1.0,
          accumulate_grad_in_fp32: true, learning_rate_scheduler: {learning_rate: 0.0003, lr_warmup_steps: 2}}
        data_stages: [{name: all, start_training_step: 1, data: {dataset: null}}]
    """)


@pytest.fixture
def write(tmp_path: Path) -> Callable[[str], Path]:
    """Write a YAML text to `my.yaml` and return its path."""

    def write_text(text: str) -> Path:
        path = tmp_path / "my.yaml"
        path.write_text(text, encoding="utf-8")
        return path

    return write_text
