"""picotron's Llama and the step of its `train.py`, on one rank.

In bf16 picotron keeps no master weights; here it gets them, by autocast. Two things are better than it ships them on a
CPU: fused AdamW, and rotary tables in bf16 with bf16. What it lacks is added, so that the work is the same: clipping.
"""

from __future__ import annotations

import os
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from checkout import add_to_path, replace_if_missing
from torch import Tensor, nn
from work import Work
from worker import Job, Pace

PLACES = {
    "model.embed_tokens": "embedding",
    "model.layers": "decoder_layers",
    "model.norm": "final_norm",
    "lm_head": "final_proj",
    "self_attn.o_proj": "attention.out_proj",
    "self_attn": "attention",
}


def build(work: Work, weights: dict[str, Tensor]) -> nn.Module:
    dtype = "bfloat16" if work.precision == "bf16" else "float32"
    os.environ |= {
        "FLASH_ATTEN": "0",
        "CONTEXT_PARALLEL": "0",
        "DEVICE": work.device,
        "DTYPE": dtype,
        "LOCAL_RANK": "0",
    }
    replace_if_missing(
        "flash_attn",
        flash_attn_interface=("flash_attn_func",),
        layers__rotary=("apply_rotary_emb",),
        ops__triton__layer_norm=("layer_norm_fn",),
    )
    add_to_path("picotron")
    import picotron.process_group_manager as groups

    groups.process_group_manager = SimpleNamespace(tp_world_size=1, cp_world_size=1, cp_rank=0)
    from picotron.model import Llama

    model = Llama(
        SimpleNamespace(
            hidden_size=work.hidden,
            num_hidden_layers=work.layers,
            num_attention_heads=work.heads,
            num_key_value_heads=work.heads,
            intermediate_size=work.intermediate,
            vocab_size=work.vocab,
            max_position_embeddings=work.sequence,
            rms_norm_eps=work.norm_eps,
            rope_theta=work.rope_theta,
        )
    )
    model.load_state_dict({renamed(name): weight for name, weight in weights.items()})
    return model.to(work.device).train()


def renamed(name: str) -> str:
    """Hugging Face's name of a weight → picotron's."""
    for theirs, here in PLACES.items():
        name = name.replace(theirs, here)
    return name


def train(job: Job, pace: Pace) -> None:
    work = job.work
    model = build(work, job.weights())
    optimizer = torch.optim.AdamW(
        model.parameters(), work.learning_rate, work.betas, work.eps, work.weight_decay, fused=True
    )
    autocast = torch.autocast(work.device, torch.bfloat16, enabled=work.precision == "bf16")
    for batch in job.batches():
        tokens, labels = batch[:, :-1].to(work.device), batch[:, 1:].to(work.device)
        optimizer.zero_grad()
        with autocast:
            outputs = model(input_ids=tokens)
            loss = F.cross_entropy(outputs.view(labels.numel(), -1), labels.reshape(-1), reduction="mean")
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), work.clip)
        optimizer.step()
        optimizer.zero_grad()
        loss = loss.detach()
        del outputs
        pace(loss)
        del loss
