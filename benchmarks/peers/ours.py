"""Kénotron: the trainer's own `train_step` on the trainer's own model and optimizer."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor
from work import Work
from worker import Job, Pace

from kenotron.checkpoint.checkpoints import Checkpoints
from kenotron.config import Config, load
from kenotron.data import TokenBatch
from kenotron.kernels.host_memory import keep_freed_memory
from kenotron.models import named_parameters
from kenotron.optim.build import build_optimizer
from kenotron.parallel.mesh import Mesh, build_mesh
from kenotron.parallel.shards import shard_of
from kenotron.training.initial_weights import fill_weights
from kenotron.training.model_parts import build_parts
from kenotron.training.run import Run
from kenotron.training.step import train_step


def configure(work: Work, compiled: bool) -> Config:
    """The YAML that a user would write for this work."""
    settings: dict[str, Any] = {
        "general": {"project": "benchmark", "run": "peers", "seed": 0},
        "model": {
            "dtype": "bfloat16" if work.precision == "bf16" else "float32",
            "compile": compiled,
            "init_method": {"std": 0.02},
            "model_config": {
                "is_llama_config": True,
                "hidden_size": work.hidden,
                "num_hidden_layers": work.layers,
                "num_attention_heads": work.heads,
                "num_key_value_heads": work.heads,
                "intermediate_size": work.intermediate,
                "vocab_size": work.vocab,
                "max_position_embeddings": work.sequence,
                "rms_norm_eps": work.norm_eps,
                "rope_theta": work.rope_theta,
                "tie_word_embeddings": False,
            },
        },
        "optimizer": {
            "accumulate_grad_in_fp32": True,
            "clip_grad": work.clip,
            "weight_decay": work.weight_decay,
            "zero_stage": 0,
            "optimizer_factory": {
                "name": "adamW",
                "adam_beta1": work.betas[0],
                "adam_beta2": work.betas[1],
                "adam_eps": work.eps,
                "torch_adam_is_fused": True,
            },
            "learning_rate_scheduler": {
                "learning_rate": work.learning_rate,
                "lr_warmup_steps": 0,
                "lr_decay_style": "constant",
            },
        },
        "parallelism": {"dp": 1, "tp": 1, "pp": 1},
        "tokens": {
            "micro_batch_size": work.micro_batch,
            "sequence_length": work.sequence,
            "batch_accumulation_per_replica": 1,
            "train_steps": 1_000_000,
        },
        "tokenizer": None,
        "checkpoints": {"checkpoint_interval": 1_000_000, "checkpoints_path": "unused"},
        "data_stages": [{"name": "all", "start_training_step": 1, "data": {"dataset": None, "seed": 0}}],
    }
    return load(settings)


def build_run(config: Config, mesh: Mesh, device: str = "cpu", weights: dict[str, Tensor] | None = None) -> Run:
    """What the trainer builds on this rank, without data. `weights`: whole tensors, in place of the initial ones."""
    keep_freed_memory()  # as `training.train` does
    parts, pipeline = build_parts(config, mesh, torch.device(device))
    if weights is None:
        fill_weights(parts, config.model.init_method, config.general.seed)
    else:
        with torch.no_grad():
            for name, parameter in named_parameters(*parts):
                shard_of(parameter).tensor.copy_(weights.pop(name))
    optimizer = build_optimizer(named_parameters(*parts), config.optimizer)
    return Run(  # type: ignore[arg-type]
        config,
        mesh,
        torch.device(device),
        parts[0],
        parts,
        optimizer,
        data=None,
        pipeline=pipeline,
        checkpoints=Checkpoints(config),
    )


def train(job: Job, pace: Pace) -> None:
    device = job.work.device
    run = build_run(configure(job.work, job.compiled), build_mesh({}, 1, device), device, job.weights())
    for batch in job.batches():
        tokens = batch.numpy()
        sample_ids = np.arange(run.step * len(tokens), (run.step + 1) * len(tokens))
        result = train_step(run, [TokenBatch(tokens[:, :-1], tokens[:, 1:], sample_ids)])
        run.step += 1
        pace(torch.tensor(result.lm_loss))
