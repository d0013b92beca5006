"""A plain loop over `transformers`' Llama, as its users write it: autocast for bf16, fused AdamW, clip.

Compiled: `torch.compile` of the whole model, loss inside.
"""

from __future__ import annotations

import torch
from transformers import LlamaConfig, LlamaForCausalLM
from work import Work
from worker import Job, Pace


def build(work: Work, weights: dict[str, torch.Tensor]) -> LlamaForCausalLM:
    config = LlamaConfig(
        hidden_size=work.hidden,
        num_hidden_layers=work.layers,
        num_attention_heads=work.heads,
        num_key_value_heads=work.heads,
        intermediate_size=work.intermediate,
        vocab_size=work.vocab,
        max_position_embeddings=work.sequence,
        rms_norm_eps=work.norm_eps,
        rope_parameters={"rope_type": "default", "rope_theta": work.rope_theta},
        tie_word_embeddings=False,
        use_cache=False,
        attn_implementation="sdpa",  # type: ignore[call-arg]
    )
    model = LlamaForCausalLM(config)
    model.load_state_dict(weights)
    return model.to(work.device).train()


def train(job: Job, pace: Pace) -> None:
    work = job.work
    model = build(work, job.weights())
    forward = torch.compile(model) if job.compiled else model
    optimizer = torch.optim.AdamW(
        model.parameters(), work.learning_rate, work.betas, work.eps, work.weight_decay, fused=True
    )
    autocast = torch.autocast(work.device, torch.bfloat16, enabled=work.precision == "bf16")
    for batch in job.batches():
        tokens, labels = batch[:, :-1].to(work.device), batch[:, 1:].to(work.device).contiguous()
        with autocast:
            loss = forward(input_ids=tokens, labels=labels, shift_labels=labels).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), work.clip)
        optimizer.step()
        optimizer.zero_grad()
        pace(loss.detach())
        del loss
